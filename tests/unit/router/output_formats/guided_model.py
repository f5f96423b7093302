"""A tokenizer with the tags of a format, and llguidance on it: tells which answers a grammar lets through."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer

from tandem.core.output_format_names import ToolFormatName
from tandem.router.output_formats.registry import TOOLS
from tests.unit.router.output_formats.answers import FORMATS, written

MODEL = Path(__file__).parents[4] / "models" / "tandem-tiny" / "tokenizer.json"
EOS = 1
EACH = pytest.mark.parametrize("form", FORMATS)
TOKENS = pytest.mark.parametrize("tags_are_tokens", [False, True], ids=["text", "tokens"])


class Model:
    """A tokenizer, for answers and for grammars."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        tokenizer = json.loads(MODEL.read_text())
        first = len(tokenizer["model"]["vocab"])
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"] += [{"id": first + place, "content": tag, **flags} for place, tag in enumerate(tags)]
        text = json.dumps(tokenizer)
        self.tags = {tag: first + place for place, tag in enumerate(tags)}
        self.vocab = first + len(tags)
        self.hub = Tokenizer.from_str(text)
        self.guide = llguidance.LLTokenizer(text, n_vocab=self.vocab, eos_token=EOS)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.hub.encode(text, add_special_tokens=False).ids
        return ids

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self.guide, grammar)
        assert matcher.get_error() == "", grammar
        return matcher

    def accepts(self, grammar: str, text: str) -> bool:
        matcher, ids = self.matcher(grammar), self.ids(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@cache
def model_of(form: str, tags_are_tokens: bool) -> Model:
    return Model((*TOOLS[ToolFormatName(form)].tags, "<think>", "</think>") if tags_are_tokens else ())


def text_of(form: str, *calls: tuple[str, Any]) -> str:
    if form == "pythonic":  # with strings as JSON has them
        each = (f"{name}({', '.join(f'{k}={json.dumps(v)}' for k, v in one.items())})" for name, one in calls)
        return f"[{', '.join(each)}]"
    return written(form, calls).removesuffix("<|call|>")
