"""The bytes of every token of a GGUF file's vocabulary: what output grammars need to know of a tokenizer."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from tandem.core.errors import ModelError
from tandem.core.gguf.metadata import Metadata
from tandem.core.gguf.tokens import TOKENS, TYPES, TokenType

_BLANK = "▁"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class GgufVocabulary:
    """Token bytes, in the form that llguidance's `TokenizerWrapper` takes. It cuts no text: that is the router's.

    `eos_token_ids`: the first of them is the one end of sequence that the form has room for. Raises ModelError.
    """

    def __init__(self, metadata: Metadata, eos_token_ids: tuple[int, ...]) -> None:
        texts = metadata.texts(TOKENS)
        types = metadata.wholes(TYPES) or [int(TokenType.NORMAL)] * len(texts)
        if not texts or len(types) != len(texts) or not eos_token_ids:
            raise ModelError("the vocabulary of the GGUF file is incomplete", why="it lacks tokens, types or an end")
        is_byte_level = metadata.text("tokenizer.ggml.model") == "gpt2"
        self.tokens = [
            _bytes_of(text or f"[EMPTY_{number}]", kind, is_byte_level=is_byte_level)
            for number, (text, kind) in enumerate(zip(texts, types, strict=True))
        ]
        self.special_token_ids = [number for number, kind in enumerate(types) if kind == TokenType.CONTROL]
        self.eos_token_id, self.bos_token_id = eos_token_ids[0], None

    def __call__(self, text: Any) -> list[int]:
        """Cut `text` into single bytes, as far as there are tokens for them."""
        data = text if isinstance(text, bytes) else str(text).encode()
        single = {token: number for number, token in reversed(list(enumerate(self.tokens))) if len(token) == 1}
        return [single[data[at : at + 1]] for at in range(len(data)) if data[at : at + 1] in single]


def _bytes_of(text: str, kind: int, *, is_byte_level: bool) -> bytes:
    if kind == TokenType.CONTROL or (is_byte_level and kind == TokenType.USER_DEFINED):
        return text.encode()
    if is_byte_level:
        alphabet = _byte_alphabet()
        return bytes(alphabet[one] for one in text) if all(one in alphabet for one in text) else text.encode()
    byte = _BYTE.fullmatch(text) if kind == TokenType.BYTE else None
    return bytes([int(byte[1], 16)]) if byte is not None else text.replace(_BLANK, " ").encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for those from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
