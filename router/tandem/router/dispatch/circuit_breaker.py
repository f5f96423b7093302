"""One circuit breaker per worker: repeated failures stop new requests for a while, then allow one trial at a time.

closed ──failures in a row──▶ open ──time──▶ half-open ──the trial succeeds──▶ closed
                               ▲                 └──the trial fails: twice the time──┐
                               └─────────────────────────────────────────────────────┘

A breaker belongs to an incarnation: a worker that was started again starts closed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

from tandem.core.clock import Clock
from tandem.core.ids import Incarnation, WorkerId

Member = tuple[WorkerId, Incarnation]

LONGEST_OPEN_S = 60.0
BURST_S = 0.25
"""Failures so close together are one: a single breakage fails many requests."""


class BreakerState(IntEnum):
    """As the metric shows it."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(slots=True)
class _Breaker:
    failures: int = 0
    counted_s: float = float("-inf")
    open_s: float = 0.0
    """How long it opened last; 0 = it is closed."""
    open_until_s: float = 0.0
    trial: str = ""
    """The request that tries a half-open worker out."""


class Breakers:
    """All breakers of one router. Opens after `failures` in a row for `open_s`, longer each time a trial fails."""

    def __init__(self, failures: int, open_s: float, clock: Clock) -> None:
        self._limit, self._open_s, self._clock = failures, open_s, clock
        self._breakers: dict[Member, _Breaker] = {}

    def state(self, member: Member) -> BreakerState:
        breaker = self._breakers.get(member)
        if breaker is None or not breaker.open_s:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock.now_s() < breaker.open_until_s else BreakerState.HALF_OPEN

    @property
    def is_quiet(self) -> bool:
        """True if no worker has a counted failure or an open breaker."""
        return not self._breakers

    def allows(self, member: Member) -> bool:
        """True if a new request may go there: it is closed, or half-open without a trial."""
        state = self.state(member)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._breakers[member].trial)

    def sent(self, member: Member, request: str) -> None:
        """A request went there; at a half-open worker it is the trial."""
        if self.state(member) is BreakerState.HALF_OPEN and not self._breakers[member].trial:
            self._breakers[member].trial = request

    def ended(self, member: Member, request: str) -> None:
        """It is over there without a verdict: another may be the trial."""
        breaker = self._breakers.get(member)
        if breaker is not None and breaker.trial == request:
            breaker.trial = ""

    def succeeded(self, member: Member) -> None:
        """A request was served there. One that was sent before the breaker opened does not close it."""
        if member in self._breakers and self.state(member) is not BreakerState.OPEN:
            del self._breakers[member]

    def failed(self, member: Member) -> None:
        """A request failed there by the worker's fault."""
        if self._limit == 0:
            return
        breaker, now_s = self._breakers.setdefault(member, _Breaker()), self._clock.now_s()
        state = self.state(member)
        if state is BreakerState.OPEN or now_s - breaker.counted_s < BURST_S:
            return
        breaker.failures, breaker.counted_s = breaker.failures + 1, now_s
        if state is BreakerState.HALF_OPEN or breaker.failures >= self._limit:
            breaker.open_s = min(LONGEST_OPEN_S, 2 * breaker.open_s or self._open_s)
            breaker.open_until_s, breaker.trial = now_s + breaker.open_s, ""

    def keep(self, members: Collection[Member]) -> None:
        """Forget all others: these incarnations are gone."""
        for member in [member for member in self._breakers if member not in members]:
            del self._breakers[member]
