"""Durations in the notation of flags."""

from __future__ import annotations

import re

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")


def duration_s(text: str) -> int | None:
    """Parse `30d`, `12h`, `45m` or `90s` to seconds; None if it is none of them."""
    match = _DURATION.fullmatch(text)
    return int(match[1]) * _UNITS_S[match[2]] if match is not None else None
