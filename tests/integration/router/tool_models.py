"""A model that reasons and calls tools: the bundled tokenizer with the tags of Qwen as tokens, and its way to write."""

import json
import shutil
from pathlib import Path

from tandem.core.config import ServedModel
from tandem.router.tokenization.tokenizer import Tokenizer
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.router.house import MODEL, ROOT
from tools.made_up_worker import EOS

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATES = ROOT / "tests" / "unit" / "router" / "output_formats" / "templates"


def tool_model(folder: Path, form: str = "hermes") -> ServedModel:
    """A model in `folder` that answers with calls in this format."""
    model = folder / "tools"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first = len(tokenizer["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [{"id": first + place, "content": tag, **flags} for place, tag in enumerate(TAGS)]
    path.write_text(json.dumps(tokenizer))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": first + len(TAGS)}))
    shutil.copy(TEMPLATES / f"{form}.jinja", model / "chat_template.jinja")
    return ServedModel(name="tandem-tiny", model_dir=str(model), served_names=("tools",))


class Said:
    """Answers that the next requests get, choice by choice, with results of calls those of `then` if it has any; they
    end unless `is_cut`."""

    def __init__(self, model: ServedModel) -> None:
        self.tokenizer = Tokenizer.load(Path(model.model_dir))
        self.texts: list[str] = [""]
        self.then: list[str] = []
        self.is_cut = False

    def answer(self, submit: w.Submit, choice: int) -> list[int]:
        texts = self.then if self.then and "<tool_response>" in self.prompt(submit) else self.texts
        text = texts[choice % len(texts)]
        tokens = self.tokenizer.encode_now(text, add_special_tokens=False)[: submit.sampling.max_tokens]
        return tokens if self.is_cut or len(tokens) == submit.sampling.max_tokens else [*tokens, EOS]

    def prompt(self, submit: w.Submit) -> str:
        return self.tokenizer.decode_all(submit.prompt)
