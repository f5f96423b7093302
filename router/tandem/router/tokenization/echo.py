"""Prompts that are repeated in front of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.router.tokenization.detokenizer import Decode, IncrementalDetokenizer
from tandem.router.tokenization.tokenizer import Tokenizer

_MANY_TOKENS = 512
"""From here on offsets are looked for in a thread: the event loop has other streams to feed."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's text, and the offsets of its tokens, if they are wanted."""

    text: str
    tokens: Sequence[int]
    offsets: Sequence[int] = ()


async def echo_of(
    prompt: str | Sequence[int], tokens: Sequence[int], tokenizer: Tokenizer, wants_offsets: bool
) -> Echo:
    """`prompt` as the client gave it: token ids are shown as text, special ones too."""
    text = prompt if isinstance(prompt, str) else tokenizer.decode_all(tokens)
    if not wants_offsets:
        return Echo(text, tokens)
    if len(tokens) < _MANY_TOKENS:
        return Echo(text, tokens, offsets_in(text, tokens, tokenizer.decode_all))
    return Echo(text, tokens, await asyncio.to_thread(offsets_in, text, tokens, tokenizer.decode_all))


def offsets_in(text: str, tokens: Sequence[int], decode: Decode) -> list[int]:
    """Return where each token begins in `text`; tokens that the tokenizer puts around a text begin at its ends.

    A token that completes no character begins where that character does.
    """
    shift = max(0, decode(tokens).find(text))
    detokenizer, at, offsets = IncrementalDetokenizer(decode), 0, []
    for token in tokens:
        offsets.append(min(max(0, at - shift), len(text)))
        at += len(detokenizer.add([token]))
    return offsets
