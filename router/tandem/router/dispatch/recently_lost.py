"""Workers that were connected until lately: they are probably on their way back, under another incarnation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tandem.core.clock import Clock
from tandem.core.ids import WorkerId
from tandem.router.routing.plan import Candidate
from tandem.router.workers.proto_convert import WorkerFacts


@dataclass(frozen=True, slots=True)
class _Absentee:
    model: str
    candidate: Candidate
    until_s: float = math.inf


class RecentlyLostWorkers:
    """A worker is expected back for `wait_s` after it was lost."""

    def __init__(self, wait_s: float, clock: Clock) -> None:
        self._wait_s, self._clock = wait_s, clock
        self._here: dict[WorkerId, _Absentee] = {}
        self._gone: dict[WorkerId, _Absentee] = {}

    def came(self, facts: WorkerFacts) -> None:
        """The worker is connected."""
        self._gone.pop(facts.worker, None)
        candidate = Candidate(
            worker=facts.worker, incarnation=facts.incarnation, role=facts.role, profile=facts.profile
        )
        self._here[facts.worker] = _Absentee(facts.model, candidate)

    def went(self, worker: WorkerId) -> None:
        """Its connection was lost."""
        self._forget()
        absentee = self._here.pop(worker, None)
        if absentee is not None:
            self._gone[worker] = replace(absentee, until_s=self._clock.now_s() + self._wait_s)

    def expected(self, model: str = "") -> list[Candidate]:
        """Workers that serve `model` ("" = any) and may come back any moment, as they were."""
        self._forget()
        return [absentee.candidate for absentee in self._gone.values() if model in ("", absentee.model)]

    def until_s(self) -> float:
        """The time when the first of them is no longer expected; call it only while some are."""
        return min(absentee.until_s for absentee in self._gone.values())

    def _forget(self) -> None:
        now_s = self._clock.now_s()
        self._gone = {worker: absentee for worker, absentee in self._gone.items() if absentee.until_s > now_s}
