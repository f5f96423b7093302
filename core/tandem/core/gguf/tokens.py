"""Tokens of a file's vocabulary that end an answer."""

from __future__ import annotations

from enum import IntEnum

from tandem.core.gguf.metadata import Metadata

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ENDS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<eos>", "</s>", "<|end_of_text|>",
})  # fmt: skip
"""Ends of chats: files name only one of them, and llama.cpp knows the others by their text."""


def end_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Return the ids that the file names, and control tokens with the text of an end. Raises ModelError for an id
    outside the vocabulary."""
    tokens, types = metadata.texts(TOKENS), metadata.wholes(TYPES)
    found: dict[int, None] = {}
    for name in _KEYS:
        key = f"tokenizer.ggml.{name}"
        token = metadata.whole(key)
        if token is None or (token == -1 or token == 0xFFFFFFFF):
            continue
        if not 0 <= token < max(len(tokens), 1):
            raise metadata.error(key, f"it is {token}, and there are {len(tokens)} tokens")
        found[token] = None
    for token, (text, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind == TokenType.CONTROL and text in _ENDS:
            found[token] = None
    return tuple(found)
