"""Watches that ranks tick, and how long their steps run, counted in the host's own looks at their pulses.

No clock: a machine that was suspended, host and ranks together, costs one look and is no false alarm, also in the
middle of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.timeout_scale import patient
from tandem.workercore.heartbeat_page import Pulse

WATCH_EVERY_S = 0.25
SILENT_LOOKS = int(patient(10))
"""So many looks in a row without a new tick (ranks tick every 0.2 s) mean that the rank has stopped: 2.5 to 2.75 s."""
LOADING_LOOKS = int(patient(480))
"""While it loads: 2 minutes. Imports from a cold disk block every thread of the process, the ticking one too."""


class RankWatch:
    """Call `look` every WATCH_EVERY_S."""

    def __init__(self, pulses: Sequence[Pulse], silent_looks: int = SILENT_LOOKS) -> None:
        self._pulses, self._silent_looks = tuple(pulses), silent_looks
        self._ticked_s = [pulse.ticked_s for pulse in pulses]
        self._silent = [0] * len(self._pulses)
        self._step = [pulse.step for pulse in pulses]
        self._stepping = [0] * len(self._pulses)

    def look(self) -> list[int]:
        """Return the ranks that have not ticked for `silent_looks` looks."""
        for rank, pulse in enumerate(self._pulses):
            ticked_s, step = pulse.ticked_s, pulse.step
            self._silent[rank] = self._silent[rank] + 1 if ticked_s == self._ticked_s[rank] else 0
            self._stepping[rank] = self._stepping[rank] + 1 if step and step == self._step[rank] else 0
            self._ticked_s[rank], self._step[rank] = ticked_s, step
        return [rank for rank, looks in enumerate(self._silent) if looks >= self._silent_looks]

    def step_s(self) -> tuple[int, float]:
        """The rank that has been in the same step for most looks, and their duration (0: another step, or none, at the
        latest look)."""
        rank = max(range(len(self._stepping)), key=self._stepping.__getitem__)
        return rank, self._stepping[rank] * WATCH_EVERY_S
