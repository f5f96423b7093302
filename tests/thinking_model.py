"""The bundled model with tags of thoughts as tokens, in place of words at the end of its vocabulary."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

MODEL = Path(__file__).parents[1] / "models" / "tandem-tiny"
TEMPLATES = Path(__file__).parent / "unit" / "router" / "output_formats" / "templates"
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
OPENS = (
    "{%- if add_generation_prompt and (enable_thinking is not defined or enable_thinking) %}"
    "{{ '<think>\\n' }}{% endif %}"
)
"""The prompt begins the thought, as those of DeepSeek R1 do."""


def thinking_model(folder: Path, tags: Sequence[str] = TAGS, template: str = "hermes", more: str = OPENS) -> Path:
    """A model in `folder` with these tags, and with a chat template of the tests behind which stands `more`."""
    model = folder / "thinking"
    shutil.copytree(MODEL, model)
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    parts = {part for merge in merges for part in merge}
    last = [word for word in sorted(words, key=words.__getitem__) if word not in parts][-len(tags) :]
    tokenizer["model"]["merges"] = [merge for merge in merges if "".join(merge) not in last]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for word, tag in zip(last, tags, strict=True):
        words[tag] = words.pop(word)
        tokenizer["added_tokens"].append({"id": words[tag], "content": tag, **flags})
    path.write_text(json.dumps(tokenizer))
    (model / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text().rstrip() + more)
    return model
