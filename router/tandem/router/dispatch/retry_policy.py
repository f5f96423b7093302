"""Retry policy: which workers a failure is charged to, which may try next, and when. Decisions alone: no sockets, no
timers, and the clock is passed in (docs/failure-handling.md).

failure ──▶ judge: fault? ──▶ the request's own: it ends
                          └─▶ a worker's: left out from now on
                              ──▶ RetryPolicy.denial ──▶ RetryPolicy.choose: Plan or RetryLater
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from tandem.core.clock import Clock
from tandem.core.config import PolicyName, RouterSection
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
from tandem.core.ids import Incarnation, WorkerId
from tandem.router.routing.plan import Candidate, Job, Plan, Policy
from tandem.router.routing.policies import create_policy
from tandem.router.workers.proto_convert import WorkerFacts

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
        self.policy, self._clock = policy, clock
        self.stall_s, self._max_attempts = settings.stall_s, settings.max_attempts
        self.mode = settings.disaggregation

    def select(self, name: str) -> None:
        """Plan by this policy from now on; plans in progress stay. InvalidRequestError names all there are."""
        try:
            known = PolicyName(name)
        except ValueError:
            why = f"the policies are {', '.join(PolicyName)}"
            raise InvalidRequestError(f"there is no policy {name[:40]!r}", why=why, param="policy") from None
        self.policy = create_policy(known, self.mode)

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
                plan = self.policy.plan(job, tier)
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
            self.policy.plan(job, others)
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
            self.policy.plan(job, [*candidates, *expected])
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
    """One circuit breaker per incarnation of a worker: repeated failures stop new requests for a while, then allow one
    trial at a time. Opens after `failures` in a row for `open_s`, longer each time a trial fails.

    closed ──failures in a row──▶ open ──time──▶ half-open ──the trial succeeds──▶ closed
                                   ▲                 └──the trial fails: twice the time──┐
                                   └─────────────────────────────────────────────────────┘
    """

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


class RetryBudget:
    """A token bucket of re-attempts: enough for the death of a full worker, too few to double a cluster's load.

    Every request puts `per_request` in, every second `per_s`, at most `burst` are in it; a re-attempt takes one out. It
    starts full.
    """

    def __init__(self, burst: float, per_request: float, per_s: float, clock: Clock) -> None:
        self._burst, self._per_request, self._per_s, self._clock = burst, per_request, per_s, clock
        self._tokens, self._filled_s = burst, clock.now_s()

    @property
    def tokens(self) -> float:
        now_s = self._clock.now_s()
        self._tokens = min(self._burst, self._tokens + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        return self._tokens

    def deposit(self) -> None:
        """A request came in."""
        self._tokens = min(self._burst, self.tokens + self._per_request)

    def take(self) -> bool:
        """Pay for a re-attempt; False = there is nothing left."""
        if self.tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


@dataclass(frozen=True, slots=True)
class _Absentee:
    model: str
    candidate: Candidate
    until_s: float = math.inf


class RecentlyLostWorkers:
    """Workers that are probably on their way back, under another incarnation: for `wait_s` after each was lost."""

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
