"""Whether ranks still tick, counted in the host's own looks at their pulses.

No clock: a machine that was suspended, host and ranks together, costs one look and is no false alarm.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.workerhost.pulse import Pulse

WATCH_EVERY_S = 0.25
SILENT_LOOKS = 10
"""So many looks in a row without a new tick (ranks tick every 0.2 s) and the rank has stopped: 2.5 to 2.75 s."""


class RankWatch:
    """Call `look` every WATCH_EVERY_S."""

    def __init__(self, pulses: Sequence[Pulse]) -> None:
        self._pulses = tuple(pulses)
        self._ticked_s = [pulse.ticked_s for pulse in pulses]
        self._silent = [0] * len(self._pulses)

    def look(self) -> list[int]:
        """The ranks that have not ticked for SILENT_LOOKS looks."""
        for rank, pulse in enumerate(self._pulses):
            ticked_s = pulse.ticked_s
            self._silent[rank] = self._silent[rank] + 1 if ticked_s == self._ticked_s[rank] else 0
            self._ticked_s[rank] = ticked_s
        return [rank for rank, looks in enumerate(self._silent) if looks >= SILENT_LOOKS]

    def step_s(self, now_s: float) -> tuple[int, float]:
        """The rank whose step in progress has run longest, and for how long (0 between steps)."""
        started_s = [pulse.step_started_s for pulse in self._pulses]  # once: a step may end between two readings
        running = [now_s - began_s if began_s else 0.0 for began_s in started_s]
        rank = max(range(len(running)), key=running.__getitem__)
        return rank, running[rank]
