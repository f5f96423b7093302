"""The discrete-event core: a clock that jumps from one event to the next. Knows nothing of workers or requests."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Action = Callable[[], None]


class EventQueue:
    """Virtual time and the events due. Implements `Clock`. Events of one instant run in the order they were made."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._due: list[tuple[float, int, Action]] = []
        self._made = 0

    def now_s(self) -> float:
        return self._now_s

    @property
    def events(self) -> int:
        """Number of events made so far."""
        return self._made

    def at(self, when_s: float, action: Action) -> None:
        """Run `action` at `when_s`, which must not be past."""
        if when_s < self._now_s:
            raise ValueError(f"an event at {when_s} s, but it is {self._now_s} s")
        self._made += 1
        heapq.heappush(self._due, (when_s, self._made, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Run `action` in `delay_s` seconds (not negative)."""
        self.at(self._now_s + delay_s, action)

    def run(self, until_s: float = math.inf) -> None:
        """Run everything that is due up to `until_s`, including new events up to then."""
        due, pop = self._due, heapq.heappop
        while due and due[0][0] <= until_s:
            self._now_s, _, action = pop(due)
            action()
