"""Quotes clients' values in errors: short, since gRPC carries them in headers, which have a limit."""

from __future__ import annotations

_LONGEST_CHARS = 100


def quoted(text: str) -> str:
    """`text` in quotes, without what is beyond 100 characters."""
    return repr(shortened(text))


def shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_CHARS else f"{text[:_LONGEST_CHARS]}…"
