"""Retry policy: which workers a failure is charged to, which may try next, and when. Decisions alone: no sockets, no
timers, and the clock is passed in (docs/failure-handling.md).

failure ──▶ judge: fault? ──▶ the request's own: it ends
                          └─▶ a worker's: left out from now on
                              ──▶ RetryPolicy.denial ──▶ RetryPolicy.choose: Plan or RetryLater
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.clock import Clock
from tandem.core.config import RouterSection
from tandem.core.errors import (
    AuthError,
    CancelledError,
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    PairRefusedError,
    TandemError,
    TransferError,
    UnavailableError,
    WorkerLostError,
)
from tandem.router.dispatch.circuit_breaker import Breakers, Member
from tandem.router.dispatch.recently_lost import RecentlyLostWorkers
from tandem.router.dispatch.retry_budget import RetryBudget
from tandem.router.routing.plan import Candidate, Job, Plan, Policy

_OWN_FAULT = (InvalidRequestError, AuthError, DeadlineError)
"""They would fail everywhere."""
SECOND_CHANCE_S = 0.1
"""Wait after a failure, before a suspect is tried again because no other worker is left; doubles."""
_DOUBLINGS = 5
_MACHINE_LOST = 2
"""Workers of one machine that fail a request by dying, or by transfers that break: the machine may be what died."""


class Cause(StrEnum):
    """Causes of a failed attempt, as the metric names them."""

    LOST = "lost"
    """The worker died, fell silent, or became another incarnation."""
    TRANSFER = "transfer"
    """KV did not get across."""
    REFUSED = "refused"
    """The worker has no room, or cannot take it now."""
    BROKEN = "broken"
    """The worker failed in another way of its own."""
    STALLED = "stalled"
    """Nothing came for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An attempt's end. `suspects` get the request again if no other is left; breakers of `charged` count it."""

    cause: Cause
    error: TandemError
    suspects: frozenset[Member]
    charged: frozenset[Member] = frozenset()


@dataclass(slots=True)
class AttemptHistory:
    """Failures of one request so far. A suspect that died is no candidate any more, whatever happens here. `revision`:
    of the worker that began the answer; while others of it can serve, the answer goes on there."""

    failures: int = 0
    error: TandemError | None = None
    failed_s: float = 0.0
    suspects: set[Member] = field(default_factory=set)
    hosts: dict[Member, str] = field(default_factory=dict)
    """Where the workers are that had it."""
    lost_on: Counter[str] = field(default_factory=Counter)
    """How many attempts were lost on a machine, as it looked."""
    revision: str = ""

    def note_hosts(self, plan: Plan, candidates: Sequence[Candidate]) -> None:
        """Those of the plan are about to have it."""
        self.hosts.update((_member(c), c.host) for c in candidates if c.worker in plan.workers)


@dataclass(frozen=True, slots=True)
class RetryLater:
    """No worker may serve it now, but one should soon: look again at `until_s`, or when a worker comes."""

    until_s: float


def judge(error: TandemError, reporter: Member, peer: Member | None) -> Failure | None:
    """Charge a failure that `reporter` reported of an attempt which it had with `peer`; None = the request's own fault.

    A worker that reports a failed transfer is alive, and means the other one. A worker that ends a request by itself
    was made to by the other one, or is about to be another incarnation.
    """
    if isinstance(error, _OWN_FAULT):
        return None
    here, other = frozenset({reporter}), frozenset({peer or reporter})
    if isinstance(error, PairRefusedError):
        return Failure(cause=Cause.TRANSFER, error=error, suspects=other)
    if isinstance(error, TransferError):
        # Both are charged: the one that is not to blame succeeds with others meanwhile.
        return Failure(cause=Cause.TRANSFER, error=error, suspects=other, charged=here | other)
    if isinstance(error, CancelledError):  # not by this router
        ended = WorkerLostError("a worker ended the request by itself", why=error.what, todo="send it again")
        return Failure(cause=Cause.LOST, error=ended, suspects=here | other)
    if isinstance(error, CapacityError):
        return Failure(cause=Cause.REFUSED, error=error, suspects=here)
    cause = Cause.REFUSED if isinstance(error, UnavailableError) else Cause.BROKEN
    return Failure(cause=cause, error=error, suspects=here, charged=here)


def lost(error: TandemError, member: Member) -> Failure:
    """The connection to a worker that the attempt needed is gone, and with it what the worker had of it."""
    return Failure(cause=Cause.LOST, error=error, suspects=frozenset({member}))


def stalled(error: TandemError, member: Member) -> Failure:
    """This worker was waited for and sent nothing of the attempt for too long."""
    blamed = frozenset({member})
    return Failure(cause=Cause.STALLED, error=error, suspects=blamed, charged=blamed)


class RetryPolicy:
    """One router's choice of workers for a request, the first time and after failures."""

    def __init__(self, policy: Policy, settings: RouterSection, clock: Clock) -> None:
        self.budget = RetryBudget(settings.retry_burst, settings.retry_ratio, settings.retry_per_s, clock)
        self.breakers = Breakers(settings.breaker_failures, settings.breaker_open_s, clock)
        self.recently_lost = RecentlyLostWorkers(settings.worker_wait_s, clock)
        self._policy, self._clock = policy, clock
        self.stall_s, self._max_attempts = settings.stall_s, settings.max_attempts
        self.mode = settings.disaggregation

    def note(self, history: AttemptHistory, failure: Failure) -> None:
        """Remember a failed attempt: for this request, and against the workers."""
        history.failures += 1
        history.error, history.failed_s = failure.error, self._clock.now_s()
        history.suspects |= failure.suspects
        has_broken = failure.cause is Cause.LOST or failure.cause is Cause.TRANSFER
        if has_broken and not isinstance(failure.error, PairRefusedError):
            history.lost_on.update({host for one in failure.suspects if (host := history.hosts.get(one))})
        for charged in failure.charged:
            self.breakers.failed(charged)

    def denial(self, history: AttemptHistory) -> str:
        """The reason to deny another attempt: "attempts", "budget", or "" and the re-attempt is paid for."""
        if history.failures >= self._max_attempts:
            return "attempts"
        return "" if self.budget.take() else "budget"

    def choose(
        self, job: Job, candidates: Sequence[Candidate], history: AttemptHistory, model: str = ""
    ) -> Plan | RetryLater:
        """Choose workers for a request for `model` ("" = any) now. Raises its last failure, or UnavailableError, when
        waiting would not help."""
        refusal: TandemError | None = None
        for tier in _own_first(self._tiers(candidates, history), history.revision):
            try:
                plan = self._policy.plan(job, tier)
            except UnavailableError as error:
                refusal = error
            else:
                again_s = self._second_chance_s(history, candidates, plan)
                if self._clock.now_s() < again_s:
                    return RetryLater(again_s)
                history.note_hosts(plan, candidates)
                return plan
        if self._is_worth_waiting(job, candidates, model):
            return RetryLater(self.recently_lost.until_s())
        raise history.error or refusal or UnavailableError("no worker is connected")

    def could_avoid(self, job: Job, candidates: Sequence[Candidate], history: AttemptHistory, member: Member) -> bool:
        """True if workers without a suspicion or an open breaker could serve the request instead."""
        others = [c for c in self.trusted(candidates, history) if _member(c) != member]
        try:
            self._policy.plan(job, others)
        except UnavailableError:
            return False
        return history.failures + 1 < self._max_attempts and self.budget.tokens >= 1.0

    def trusted(self, candidates: Sequence[Candidate], history: AttemptHistory) -> Sequence[Candidate]:
        """Candidates without a suspicion or an open breaker."""
        if not history.suspects and self.breakers.is_quiet:  # nearly always
            return candidates
        fresh = [c for c in candidates if _member(c) not in history.suspects]
        return [c for c in fresh if self.breakers.allows(_member(c))]

    def _tiers(self, candidates: Sequence[Candidate], history: AttemptHistory) -> Iterator[Sequence[Candidate]]:
        """Ever more of the candidates: workers of a machine that seems to have died, those with an open breaker, and
        suspects only if there are no others."""
        trusted = self.trusted(candidates, history)
        if history.lost_on:
            elsewhere = [c for c in trusted if history.lost_on[c.host] < _MACHINE_LOST]
            if 0 < len(elsewhere) < len(trusted):
                yield elsewhere
        yield trusted
        fresh = [c for c in candidates if _member(c) not in history.suspects]
        if len(fresh) > len(trusted):
            yield fresh
        if len(candidates) > len(fresh):
            yield candidates

    def _is_worth_waiting(self, job: Job, candidates: Sequence[Candidate], model: str) -> bool:
        """True if the workers that are expected back could serve it, alone or with those that are here."""
        expected = self.recently_lost.expected(model)
        if not expected:
            return False
        try:
            self._policy.plan(job, [*candidates, *expected])
        except UnavailableError:
            return False
        return True

    def _second_chance_s(self, history: AttemptHistory, candidates: Sequence[Candidate], plan: Plan) -> float:
        """The time from which suspects may have it again; 0 = none is in the plan."""
        planned = {_member(c) for c in candidates if c.worker in plan.workers}
        if not planned & history.suspects:
            return 0.0
        return history.failed_s + SECOND_CHANCE_S * 2.0 ** min(history.failures - 1, _DOUBLINGS)


def _own_first(tiers: Iterator[Sequence[Candidate]], revision: str) -> Iterator[Sequence[Candidate]]:
    """Of each tier first those of `revision`, if there is one and others are among them: answers of two may differ."""
    for tier in tiers:
        own = [one for one in tier if one.profile is not None and one.profile.revision == revision] if revision else []
        if own and len(own) < len(tier):
            yield own
        yield tier


def _member(candidate: Candidate) -> Member:
    return (candidate.worker, candidate.incarnation)
