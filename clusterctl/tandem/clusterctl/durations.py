"""Lengths of time as people write them."""

from __future__ import annotations

import re

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")


def duration_s(text: str) -> int | None:
    """Seconds of `30d`, `12h`, `45m` or `90s`; None if it is none of them."""
    match = _DURATION.fullmatch(text)
    return int(match[1]) * _UNITS_S[match[2]] if match is not None else None
