"""Admission control: dispatch, queue, or reject with Retry-After.

A request goes at once while workers have room and none waits. Otherwise it waits in a fair queue (fair_queue.py) of its
model, as long as its SLO class and its deadline allow; one that would wait longer than that is rejected at once. Pure:
the clock, the room at workers and how long a prompt takes are passed in, and `pump` is called every POLL_S while any
request waits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.clock import Clock
from tandem.core.config import AdmissionSection
from tandem.core.errors import CapacityError, DeadlineError, InternalError, TandemError
from tandem.core.ids import WorkerId
from tandem.core.prefill_queue import PrefillSpeed, QueuedWork, QueueRules
from tandem.core.state_enums import RoleName
from tandem.router.admission.fair_queue import MEMORY_S, DrainRate, FairQueue, Waiting
from tandem.router.admission.slo_classes import SloTerms
from tandem.router.routing.observed_traffic import InFlightWork, Outstanding

_log = logging.getLogger(__name__)
POLL_S = 0.005
ANSWER_TOKENS = 128
"""Assumed answer length, if the answer may be so long."""
PRIORITY_S = 1.0
"""Queue time that one step of priority is worth: bounded, so that no request is overtaken for ever."""
MARGIN = 0.9
"""Share of a promised time to the first token that predicted waiting and computing may take."""
_LEAST_S, _MOST_S = 0.1, 60.0
"""Bounds of the Retry-After of a rejected request."""
_STRANDED_S = 1.0
"""Retry-After where it is not known when a worker will come."""
CREDIT_TOKENS = 4096
"""Cost that a tenant's short requests may spend before their turn, while a long one of another finds no room."""
ASK_EVERY_S = 0.02
"""Least interval between two checks if one worker had better serve a request whole, while the answer is no."""
_MAX_LOOKAHEAD = 4
"""How many are looked at when there is no room for the first in turn."""


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedRequest(Waiting):
    """A request in admission, with the tokens of all its prompts and its choices. `cost` in tokens; `model`: the one
    that its workers must serve.

    One of `grant` and `refuse` is called once, unless it leaves before. `compute_time` gives how long its prompt takes,
    `alone` the worker that had better serve it whole now, if one had, with so many others waiting. Admission sets
    `compute_s` (None = not known how long), `queued_s`, and the times by which it is due and gone.
    """

    tenant: str = field(init=False)
    due_s: float = field(default=0.0, init=False)
    gone_s: float = field(default=math.inf, init=False)
    terms: SloTerms = field(default_factory=SloTerms)
    prompt_tokens: int
    choices: int
    arrived_s: float = 0.0
    deadline_s: float = math.inf
    model: str = ""
    grant: Callable[[], None]
    refuse: Callable[[TandemError], None]
    compute_time: Callable[[], float]
    alone: Callable[[int], WorkerId | None] = lambda waiting: None
    compute_s: float | None = None
    queued_s: float = field(default=0.0, init=False)
    is_over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.tenant = self.terms.tenant


class AdmissionMeter(Protocol):
    """Counts the decisions of admission."""

    def waited(self, seconds: float) -> None: ...
    def refused(self, reason: str) -> None: ...


@dataclass(slots=True)
class _Lane:
    """Those that wait for one model's workers."""

    queue: FairQueue[QueuedRequest]
    rate: DrainRate = field(default_factory=DrainRate)
    ask_again_s: float = -math.inf
    """None was better off alone: not to be asked for each of them every POLL_S."""


class AdmissionController:
    """`has_room(model, request)` looks at the workers, `has_place(worker, request)` at one that is to serve it whole;
    `order` gives the order in which workers sort prompts; `on_waiting` is called when the first one begins to wait.
    `stranded(model)`: how many were let in and wait for a worker to come at all."""

    def __init__(
        self,
        rules: AdmissionSection,
        clock: Clock,
        has_room: Callable[[str, QueuedRequest], bool],
        meter: AdmissionMeter,
        on_waiting: Callable[[], None] = lambda: None,
        order: Callable[[], QueueRules] = QueueRules,
        has_place: Callable[[WorkerId, QueuedRequest], bool] = lambda worker, request: False,
        stranded: Callable[[str], int] = lambda model: 0,
    ) -> None:
        self._rules, self._clock, self._has_room, self._meter = rules, clock, has_room, meter
        self._order, self._has_place, self._on_waiting = order, has_place, on_waiting
        self.stranded = stranded
        self._lanes: dict[str, _Lane] = {}

    @property
    def waiting(self) -> int:
        return sum(len(lane.queue) for lane in self._lanes.values())

    def waiting_for(self, model: str) -> int:
        """Return how many wait for workers of this model."""
        lane = self._lanes.get(model)
        return 0 if lane is None else len(lane.queue)

    @property
    def lanes(self) -> dict[str, tuple[FairQueue[QueuedRequest], DrainRate]]:
        """Queue and drain rate of each model; to be looked at alone."""
        return {model: (lane.queue, lane.rate) for model, lane in self._lanes.items()}

    def enter(self, request: QueuedRequest) -> bool:
        """Let a request in: its `grant` is called before this returns, or later, as is its `refuse`; True = it waits.

        Raises CapacityError if it cannot wait, and what `grant` raises if that is called at once.
        """
        self._check_stranded(request.model)
        lane = self._lanes.get(request.model)
        if (lane is None or not len(lane.queue)) and self._has_room(request.model, request):
            request.grant()
            return False
        if lane is None:
            lane = self._lanes[request.model] = self._new_lane()
        self._set_times(request)
        if not len(lane.queue) and self._has_room(request.model, request):  # it overtakes what is there
            request.grant()
            return False
        self._check_wait(lane, request)
        was_idle = not self.waiting
        if lane.rate.idle_s(request.queued_s) > MEMORY_S:
            lane.queue.forget()
        lane.rate.watch(request.queued_s, is_busy=True)
        loser = lane.queue.add(request)
        if loser is not None:
            error = CapacityError(
                "too many requests wait", why=f"a router queues {self._rules.max_waiting}, this tenant has the most",
                todo="send it again later", retry_after_s=self._retry_s(lane, 0.0),
            )  # fmt: skip
            self._meter.refused("full")
            if loser is request:
                raise error
            _end(loser, error)
        if was_idle:
            self._on_waiting()
        return True

    def leave(self, request: QueuedRequest) -> None:
        """Remove a request that its client gave up."""
        if not request.is_over:
            request.is_over = True
            for lane in self._lanes.values():
                if lane.queue.remove(request):
                    lane.rate.watch(self._clock.now_s(), is_busy=len(lane.queue) > 0)

    def refuse_all(self, error: TandemError) -> None:
        """Reject all that wait: no request will be sent off any more."""
        for lane in self._lanes.values():
            for request in list(lane.queue):
                lane.queue.remove(request)
                _end(request, error)

    def pump(self) -> None:
        """Send off requests that there is room for, and reject those that waited too long."""
        now_s = self._clock.now_s()
        for model, lane in self._lanes.items():
            lane.rate.watch(now_s, is_busy=len(lane.queue) > 0)
            for request in lane.queue.expired(now_s):
                lane.queue.remove(request)
                self._expire(lane, request, now_s)
            while (first := self._next(model, lane.queue)) is not None:
                lane.queue.take(first)
                first.is_over = True
                try:
                    first.grant()
                except TandemError as error:
                    first.refuse(error)
                except Exception as error:  # noqa: BLE001 - it would wait for ever
                    _log.exception("a request whose turn had come could not be sent off")
                    first.refuse(InternalError("the router failed", why=type(error).__name__, todo="report this"))
                else:
                    lane.rate.sent(first.cost)
                    self._meter.waited(now_s - first.queued_s)
            if not len(lane.queue):
                lane.rate.watch(now_s, is_busy=False)

    def _next(self, model: str, queue: FairQueue[QueuedRequest]) -> QueuedRequest | None:
        """Next to dispatch: the head if it fits, else a shorter one that would overtake it at a worker, too."""
        first = queue.first()
        if first is None or self._has_room(model, first) or self._is_better_alone(model, first):
            return first
        most_s = (first.compute_s or 0.0) / SHORTER
        passing = (request for request in queue.passing(_MAX_LOOKAHEAD) if (request.compute_s or 0.0) <= most_s)
        return next((request for request in passing if self._has_room(model, request)), None)

    def _is_better_alone(self, model: str, first: QueuedRequest) -> bool:
        """True if a worker should serve it whole, past those that it would wait for as half of a pair."""
        lane, now_s = self._lanes[model], self._clock.now_s()
        if now_s < lane.ask_again_s:
            return False
        lane.ask_again_s = now_s + ASK_EVERY_S
        try:
            worker = first.alone(len(lane.queue) - 1)
        except Exception:  # noqa: BLE001 - an error of ours: it waits for its turn, as do all others
            _log.exception("not planned", extra={"fields": {"model": model}})
            return False
        if worker is None or not self._has_place(worker, first):
            return False
        lane.ask_again_s = now_s
        return True

    def check_slo(self, terms: SloTerms, arrived_s: float, first_token_s: float, compute_s: float) -> None:
        """CapacityError when the first token would come too late for the class, and not because the prompt is long."""
        late_s = self._clock.now_s() + first_token_s - arrived_s - MARGIN * terms.ttft_s
        if late_s > 0 and compute_s <= MARGIN * terms.ttft_s:
            self._meter.refused("late")
            raise _late(terms.slo, late_s)

    def _new_lane(self) -> _Lane:
        rules = self._rules
        return _Lane(
            FairQueue[QueuedRequest](
                quantum=rules.quantum_tokens,
                limit=rules.max_waiting,
                credit=CREDIT_TOKENS,
                savings=rules.saved_tokens,
            )
        )

    def _set_times(self, request: QueuedRequest) -> None:
        compute_s = request.compute_s = request.compute_time()
        now_s, terms = self._clock.now_s(), request.terms
        due_s = self._order().due_s(arrived_s=request.arrived_s, remaining_s=compute_s, now_s=now_s)
        target_s = MARGIN * terms.ttft_s
        # A request that even idle workers would be too late with is not sent away for it.
        latest_s = request.arrived_s + target_s - compute_s if compute_s <= target_s else math.inf
        request.cost, request.queued_s = max(1, request.cost), now_s
        request.due_s, request.gone_s = due_s + PRIORITY_S * terms.priority, min(latest_s, request.deadline_s)

    def _check_stranded(self, model: str) -> None:
        """CapacityError when as many as may wait have gone through here and found no worker at all."""
        if self.stranded(model) >= self._rules.max_waiting:
            self._meter.refused("full")
            raise CapacityError(
                "too many requests wait", why="no worker can serve them now", todo="send it again later",
                retry_after_s=_STRANDED_S,
            )  # fmt: skip

    def _check_wait(self, lane: _Lane, request: QueuedRequest) -> None:
        """CapacityError when it would be gone before its turn comes."""
        rate = lane.rate.per_s
        if rate is None:
            return
        wait_s = lane.queue.cost_before(request.tenant, request.due_s) / rate + self._rules.worker_queue_s
        late_s = request.queued_s + wait_s - request.gone_s
        if late_s > 0:
            self._meter.refused("late")
            raise _late("", late_s)

    def _expire(self, lane: _Lane, request: QueuedRequest, now_s: float) -> None:
        if now_s >= request.deadline_s:
            waited = f"it waited {now_s - request.arrived_s:.1f} s for its turn"
            error: TandemError = DeadlineError("no answer in the time that was given", why=waited, todo="try later")
            self._meter.refused("deadline")
        else:
            error = _late("", self._retry_s(lane, 0.0))
            self._meter.refused("late")
        _end(request, error)

    def _retry_s(self, lane: _Lane, unknown_s: float) -> float:
        """Seconds until all that wait now have been sent off."""
        cost, rate = lane.queue.cost, lane.rate.per_s
        return min(_MOST_S, max(_LEAST_S, cost / rate if rate else unknown_s))


def _end(request: QueuedRequest, error: TandemError) -> None:
    request.is_over = True
    request.refuse(error)


def _late(slo: str, late_s: float) -> CapacityError:
    promise = f"the SLO class {slo}" if slo else "its SLO class or its deadline"
    return CapacityError(
        "the workers are busy", why=f"the first token would come too late for {promise}", todo="send it again later",
        retry_after_s=min(_MOST_S, max(_LEAST_S, late_s)),
    )  # fmt: skip


_ASSUMED_BLOCK_TOKENS = 16
SHORTER = 2.0
"""A prompt that is so many times shorter than another may count on overtaking it, however rates are measured next."""


class Reported(Protocol):
    """The part of a load report from which room is computed."""

    @property
    def queued_requests(self) -> int: ...
    @property
    def queue(self) -> Sequence[QueuedWork]: ...
    @property
    def queue_rules(self) -> QueueRules: ...
    @property
    def prefill_speed(self) -> PrefillSpeed: ...
    @property
    def decode_step_s(self) -> float: ...
    @property
    def decode_sequence_s(self) -> float: ...
    @property
    def decoding_sequences(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def total_blocks(self) -> int: ...


class Facts(Protocol):
    @property
    def role(self) -> RoleName: ...
    @property
    def block_tokens(self) -> int: ...


class WorkerLoad(Protocol):
    """A worker as a router sees it; a `WorkerLink` is one. `facts` None = not connected."""

    @property
    def facts(self) -> Facts | None: ...
    @property
    def load(self) -> Reported: ...
    @property
    def outstanding(self) -> Outstanding: ...


class CapacityCheck:
    """Room at the workers for another request, by what workers reported and what was sent to them since.

    Workers keep a short queue, so that they never idle and short prompts overtake long ones there; what they do not
    need for that waits in the router, where order is fair. `least_itl_s()`: a decode worker takes no more sequences
    than keep its steps shorter; inf = as many as fit.
    """

    def __init__(self, rules: AdmissionSection, least_itl_s: Callable[[], float] = lambda: math.inf) -> None:
        self._rules, self._least_itl_s = rules, least_itl_s

    def is_there(self, request: QueuedRequest, links: Iterable[WorkerLoad], now_s: float) -> bool:
        """True if one worker can soon begin the prompt and one can go on with the answer.

        True where no worker serves at all, too: then nothing is gained by waiting here.
        """
        here = [link for link in links if link.facts is not None]
        computing = [link for link in here if _role(link) is not RoleName.DECODE] or here
        decoding = [link for link in here if _role(link) is not RoleName.PREFILL] or here
        if not here:
            return True
        return any(self._can_compute(link, request, now_s) for link in computing) and any(
            self._can_decode(link, request, now_s) for link in decoding
        )

    def is_there_whole(self, request: QueuedRequest, link: WorkerLoad, now_s: float) -> bool:
        """True if this worker can take the whole request, its prompt too. A decode worker that has room for the answer
        has it for the prompt: the caller has weighed that."""
        if link.facts is None or not self._can_decode(link, request, now_s):
            return False
        return _role(link) is RoleName.DECODE or self._can_compute(link, request, now_s)

    def _can_compute(self, link: WorkerLoad, request: QueuedRequest, now_s: float) -> bool:
        """True if little is ahead of it there. What it would overtake does not count, if that is known."""
        load, is_stale, due_s = link.load, link.outstanding.is_stale(now_s), math.inf
        if request.compute_s is not None:
            due_s = load.queue_rules.due_s(arrived_s=now_s, remaining_s=SHORTER * request.compute_s, now_s=now_s)
        reported = [row for row in load.queue if row.due_s <= due_s] if not is_stale else []
        sent = [row for row in link.outstanding.queue(now_s) if row.due_s <= due_s]
        if sum(row.requests for row in (*reported, *sent)) < self._rules.worker_queue_requests:
            return True
        speed, since_s = load.prefill_speed, now_s - link.outstanding.reported_s
        reported_s = sum(speed.seconds(row.tokens, row.attended) for row in reported)
        sent_s = sum(speed.seconds(row.tokens, row.attended) for row in sent)
        left_s = max(0.0, reported_s - since_s)  # of what it reported it has worked on since
        return left_s + sent_s < self._rules.worker_queue_s

    def _can_decode(self, link: WorkerLoad, request: QueuedRequest, now_s: float) -> bool:
        load, coming = link.load, link.outstanding.uncounted(now_s)
        if link.outstanding.is_stale(now_s):
            return True
        if _role(link) is RoleName.DECODE and load.queued_requests:
            return False  # a request waits for blocks or a place there
        step_s = load.decode_step_s + load.decode_sequence_s * (len(coming) + request.choices)
        if load.decoding_sequences and step_s > self._least_itl_s():
            return False
        return not load.total_blocks or self._fits(link, request, coming)

    def _fits(self, link: WorkerLoad, request: QueuedRequest, coming: list[InFlightWork]) -> bool:
        size = (link.facts.block_tokens if link.facts is not None else 0) or _ASSUMED_BLOCK_TOKENS
        wanted = -(-request.prompt_tokens // size) + request.choices
        is_idle = not link.load.in_flight and not coming
        return is_idle or link.load.free_blocks - sum(one.blocks for one in coming) >= wanted


def _role(link: WorkerLoad) -> RoleName:
    if link.facts is None:
        raise RuntimeError("a link that is down was asked for its role")
    return link.facts.role
