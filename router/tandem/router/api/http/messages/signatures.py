"""Signatures of thoughts: clients need one, and send it back. That of a thought which is not shown contains it."""

from __future__ import annotations

import base64
import binascii

from tandem.router.api.http.messages.blocks import ThinkingBlock

SHOWN = "dGFuZGVt"
"""Of every thought that is shown."""


def signature_of(thought: str, *, is_shown: bool) -> str:
    """The signature of a thought."""
    return SHOWN if is_shown else base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def thought_of(block: ThinkingBlock) -> str:
    """The thought of a block; of one that was not shown, the text in its signature. Foreign signatures have none."""
    if block.thinking or block.signature in (None, SHOWN):
        return block.thinking
    try:
        return base64.b64decode(block.signature, validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return ""
