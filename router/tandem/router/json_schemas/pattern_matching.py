"""Matches texts with patterns of schemas as llguidance does: in linear time, and in its dialect."""

from __future__ import annotations

import functools
import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

_LIMITS = LLParserLimits(initial_lexer_fuel=20_000, step_lexer_fuel=20_000, verbose_errors=False)
MAX_PATTERN_CHARS = 512
MAX_TEXT_CHARS = 256


class _Bytes:
    """A vocabulary of the 256 bytes and an end, in the form that llguidance's `TokenizerWrapper` takes."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else str(text).encode())


@functools.cache
def byte_tokenizer() -> LLTokenizer:
    """A tokenizer with a token for each byte."""
    return LLTokenizer(TokenizerWrapper(_Bytes()))


@functools.lru_cache(1024)
def is_match(pattern: str, text: str) -> bool | None:
    """True if the pattern is found in the text; None = this is not known."""
    if len(pattern) > MAX_PATTERN_CHARS or len(text) > MAX_TEXT_CHARS:
        return None
    grammar = json.dumps({"grammars": [{"json_schema": {"type": "string", "pattern": pattern}}]})
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=_LIMITS)
    if matcher.get_error():
        return False if "Unsatisfiable" in matcher.get_error() else None
    data = list(json.dumps(text, ensure_ascii=False).encode())
    taken = matcher.try_consume_tokens(data)
    if taken < len(data) and matcher.get_error():
        return None
    return taken == len(data) and bool(matcher.is_accepting())
