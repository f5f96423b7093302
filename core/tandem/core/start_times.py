"""Duration of each phase of a worker's start: phases follow one another, so that they add up to the whole."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

from tandem.core.clock import Clock, MonotonicClock

_STARTED_FIELD = 19
"""Field of /proc/PID/stat, counted behind the program's name: clock ticks from boot to the process's start."""
LONGEST_S = 3600.0
"""A process that seems to have begun longer ago was not started by a clock that can be compared with ours."""


class StartPhase(StrEnum):
    """Phases in words shown to users; logs use the name, `weights_s`."""

    IMPORTS = "importing Tandem"
    CONFIG = "reading the configuration"
    RANKS = "starting the ranks"
    TORCH = "importing torch"
    GROUP = "waiting for the other ranks"
    KERNELS = "loading kernels"
    COMPILING = "compiling kernels"
    WEIGHTS = "loading the model"
    PACKING = "packing the weights"
    POOL = "allocating KV memory"
    GRAPHS = "capturing CUDA graphs"
    WARM_UP = "warming up"
    TRANSFERS = "opening transfer ends"
    REGISTRATION = "registering"


class StartTimes:
    """Begins with a phase at `began_s`, or now. Not thread-safe."""

    def __init__(self, phase: StartPhase, clock: Clock | None = None, began_s: float | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._phase, self._entered_s = phase, self._clock.now_s() if began_s is None else began_s
        self._took_s: dict[StartPhase, float] = {}

    def enter(self, phase: StartPhase) -> None:
        """Begin this phase and end the one before."""
        now_s = self._clock.now_s()
        self._took_s[self._phase] = self._took_s.get(self._phase, 0.0) + now_s - self._entered_s
        self._phase, self._entered_s = phase, now_s

    def fields(self) -> dict[str, float]:
        """Seconds of each phase and of all, up to now, as a log has them."""
        self.enter(self._phase)
        took = {f"{phase.name.lower()}_s": round(took_s, 3) for phase, took_s in self._took_s.items()}
        return {"took_s": round(sum(self._took_s.values()), 3), **took}

    def words(self) -> str:
        """The same for people, the longest first."""
        self.enter(self._phase)
        longest = sorted(self._took_s.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{phase} {took_s:.2f} s" for phase, took_s in longest if took_s >= 0.005)
        return f"started in {sum(self._took_s.values()):.2f} s: {parts}"


def process_started_s(clock: Clock, pid: int | None = None) -> float:
    """Start time of a process, or of this one, by `MonotonicClock`, to a hundredth of a second; now if it is not
    known."""
    now_s = clock.now_s()
    try:
        fields = Path(f"/proc/{pid or 'self'}/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[_STARTED_FIELD]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now_s
    return started_s if 0.0 <= now_s - started_s <= LONGEST_S else now_s
