"""Fraction of time a worker spends in prefill; answers there get at most one token a chunk meanwhile.

From a counter of seconds in its load reports; fades with FADE_S, so that a minute's change is seen. One thread, no I/O.
"""

from __future__ import annotations

import math
from typing import Final

COMPUTING_SECONDS: Final = "prefill_step_seconds"
"""The counter."""
FADE_S: Final = 5.0
"""A worker's share of so long ago counts for a third: a few prompts long, so that it is no one prompt's."""


class ComputingShare:
    """Prefill utilization of one worker in one incarnation."""

    def __init__(self) -> None:
        self.share = 0.0
        """From 0 to 1."""
        self._seconds = self._reported_s = 0.0
        self._is_known = False

    def report(self, now_s: float, seconds: float) -> None:
        """Until `now_s` it has spent so many seconds in steps that computed prompts, in all."""
        passed_s, more_s = now_s - self._reported_s, seconds - self._seconds
        if self._is_known and passed_s <= 0:
            return
        if self._is_known and more_s >= 0:
            lately = min(1.0, more_s / passed_s)
            self.share += (1 - math.exp(-passed_s / FADE_S)) * (lately - self.share)
        self._seconds, self._reported_s, self._is_known = seconds, now_s, True

    def clear(self) -> None:
        """Another process, which counts from 0."""
        self.share, self._is_known = 0.0, False
