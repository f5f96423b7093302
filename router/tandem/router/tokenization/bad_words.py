"""Words that an answer may not contain, as the token sequences that sampling forbids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tandem.core.errors import InvalidRequestError
from tandem.router.tokenization.tokenizer import Tokenizer

MAX_WORDS = 256
MAX_WORD_CHARS = 256
_MANY_WORDS = 32
"""From here on they are tokenised in a thread: the event loop has other streams to feed."""


def check_words(words: Sequence[str]) -> None:
    """Raise InvalidRequestError for too many words, and for empty or long ones."""
    if len(words) > MAX_WORDS:
        what = f"bad_words has {len(words)} words"
        raise InvalidRequestError(what, why=f"at most {MAX_WORDS} are allowed", param="bad_words")
    for word in words:
        if not 1 <= len(word) <= MAX_WORD_CHARS:
            why = f"each must have 1 to {MAX_WORD_CHARS} characters"
            raise InvalidRequestError(f"bad_words has a word of {len(word)} characters", why=why, param="bad_words")


async def word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of every word as it is written at the beginning of a text and behind a space."""
    if len(words) < _MANY_WORDS:
        return _word_tokens(words, tokenizer)
    return await asyncio.to_thread(_word_tokens, words, tokenizer)


def _word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            found[tuple(tokenizer.encode_now(text, add_special_tokens=False))] = None
    return tuple(tokens for tokens in found if tokens)
