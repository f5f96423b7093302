"""Admission control: dispatch, queue, or reject with Retry-After.

A request goes at once while workers have room and none waits. Otherwise it waits in a fair queue (fair_queue.py) of its
model, as long as its SLO class and its deadline allow; one that would wait longer than that is rejected at once. Pure:
the clock, the room at workers and how long a prompt takes are passed in, and `pump` is called every POLL_S while any
request waits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from tandem.core.clock import Clock
from tandem.core.config import AdmissionSection
from tandem.core.errors import CapacityError, DeadlineError, InternalError, TandemError
from tandem.core.ids import WorkerId
from tandem.core.prefill_queue import QueueRules
from tandem.router.admission.capacity import SHORTER, ResourceDemand
from tandem.router.admission.fair_queue import FairQueue, Waiting
from tandem.router.admission.slo import SloTerms
from tandem.router.admission.throughput import MEMORY_S, DrainRate

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
    """A request in the queue. One of `grant` and `refuse` is called once, unless it leaves before."""

    need: ResourceDemand
    deadline_s: float
    arrived_s: float
    queued_s: float
    slo: str = ""
    grant: Callable[[], None]
    refuse: Callable[[TandemError], None]
    alone: Callable[[int], WorkerId | None]
    is_over: bool = field(default=False, init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """A request that wants in. `cost` in tokens; `model`: the one that its workers must serve."""

    terms: SloTerms
    need: ResourceDemand
    cost: int
    arrived_s: float
    deadline_s: float
    model: str = ""


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
    """`has_room(model, need)` looks at the workers, `has_place(worker, need)` at one that is to serve it whole; `order`
    gives the order in which workers sort prompts; `on_waiting` is called when the first one begins to wait.
    `stranded(model)`: how many were let in and wait for a worker to come at all."""

    def __init__(
        self,
        rules: AdmissionSection,
        clock: Clock,
        has_room: Callable[[str, ResourceDemand], bool],
        meter: AdmissionMeter,
        on_waiting: Callable[[], None] = lambda: None,
        order: Callable[[], QueueRules] = QueueRules,
        has_place: Callable[[WorkerId, ResourceDemand], bool] = lambda worker, need: False,
        stranded: Callable[[str], int] = lambda model: 0,
    ) -> None:
        self._rules, self._clock, self._has_room, self._meter = rules, clock, has_room, meter
        self._order, self._has_place, self._on_waiting = order, has_place, on_waiting
        self._stranded = stranded
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

    def enter(
        self,
        arrived: AdmissionRequest,
        compute_s: Callable[[], float],
        grant: Callable[[], None],
        refuse: Callable[[TandemError], None],
        alone: Callable[[int], WorkerId | None] = lambda waiting: None,
    ) -> QueuedRequest | None:
        """Let a request in: `grant` is called before this returns, and None returned, or later, as is `refuse`.

        `compute_s` gives how long its prompt takes, when that is needed; `alone`, which worker had better serve it
        whole now, seeing how many others wait, if one had. Raises CapacityError if it cannot wait, and what `grant`
        raises if that is called at once.
        """
        self._check_stranded(arrived.model)
        lane = self._lanes.get(arrived.model)
        if (lane is None or not len(lane.queue)) and self._has_room(arrived.model, arrived.need):
            grant()
            return None
        if lane is None:
            lane = self._lanes[arrived.model] = self._new_lane()
        place = self._place(arrived, compute_s(), grant, refuse, alone)
        if not len(lane.queue) and self._has_room(arrived.model, place.need):  # it overtakes what is there
            grant()
            return None
        self._check_wait(lane, place)
        was_idle = not self.waiting
        if lane.rate.idle_s(place.queued_s) > MEMORY_S:
            lane.queue.forget()
        lane.rate.watch(place.queued_s, is_busy=True)
        loser = lane.queue.add(place)
        if loser is not None:
            error = CapacityError(
                "too many requests wait", why=f"a router lets {self._rules.max_waiting} wait, and this tenant has most",
                todo="send it again later", retry_after_s=self._retry_s(lane, 0.0),
            )  # fmt: skip
            self._meter.refused("full")
            if loser is place:
                raise error
            _end(loser, error)
        if was_idle:
            self._on_waiting()
        return place

    def leave(self, place: QueuedRequest) -> None:
        """Remove a request that its client gave up."""
        if not place.is_over:
            place.is_over = True
            for lane in self._lanes.values():
                if lane.queue.remove(place):
                    lane.rate.watch(self._clock.now_s(), is_busy=len(lane.queue) > 0)

    def refuse_all(self, error: TandemError) -> None:
        """Reject all that wait: no request will be sent off any more."""
        for lane in self._lanes.values():
            for place in list(lane.queue):
                lane.queue.remove(place)
                _end(place, error)

    def pump(self) -> None:
        """Send off requests that there is room for, and reject those that waited too long."""
        now_s = self._clock.now_s()
        for model, lane in self._lanes.items():
            lane.rate.watch(now_s, is_busy=len(lane.queue) > 0)
            for place in lane.queue.expired(now_s):
                lane.queue.remove(place)
                self._expire(lane, place, now_s)
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
        if first is None or self._has_room(model, first.need) or self._is_better_alone(model, first):
            return first
        most_s = (first.need.compute_s or 0.0) / SHORTER
        passing = (place for place in queue.passing(_MAX_LOOKAHEAD) if (place.need.compute_s or 0.0) <= most_s)
        return next((place for place in passing if self._has_room(model, place.need)), None)

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
        if worker is None or not self._has_place(worker, first.need):
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

    def _place(
        self,
        arrived: AdmissionRequest,
        compute_s: float,
        grant: Callable[[], None],
        refuse: Callable[[TandemError], None],
        alone: Callable[[int], WorkerId | None],
    ) -> QueuedRequest:
        now_s, terms = self._clock.now_s(), arrived.terms
        due_s = self._order().due_s(arrived_s=arrived.arrived_s, remaining_s=compute_s, now_s=now_s)
        target_s = MARGIN * terms.ttft_s
        # A request that even idle workers would be too late with is not sent away for it.
        latest_s = arrived.arrived_s + target_s - compute_s if compute_s <= target_s else math.inf
        return QueuedRequest(
            tenant=terms.tenant,
            cost=max(1, arrived.cost),
            due_s=due_s + PRIORITY_S * terms.priority,
            gone_s=min(latest_s, arrived.deadline_s),
            need=replace(arrived.need, compute_s=compute_s),
            deadline_s=arrived.deadline_s,
            arrived_s=arrived.arrived_s,
            queued_s=now_s,
            slo=terms.slo,
            grant=grant,
            refuse=refuse,
            alone=alone,
        )

    def _check_stranded(self, model: str) -> None:
        """CapacityError when as many as may wait have gone through here and found no worker at all."""
        if self._stranded(model) >= self._rules.max_waiting:
            self._meter.refused("full")
            raise CapacityError(
                "too many requests wait", why="no worker can serve them now", todo="send it again later",
                retry_after_s=_STRANDED_S,
            )  # fmt: skip

    def _check_wait(self, lane: _Lane, place: QueuedRequest) -> None:
        """CapacityError when it would be gone before its turn comes."""
        rate = lane.rate.per_s
        if rate is None:
            return
        wait_s = lane.queue.cost_before(place.tenant, place.due_s) / rate + self._rules.worker_queue_s
        late_s = place.queued_s + wait_s - place.gone_s
        if late_s > 0:
            self._meter.refused("late")
            raise _late("", late_s)

    def _expire(self, lane: _Lane, place: QueuedRequest, now_s: float) -> None:
        if now_s >= place.deadline_s:
            waited = f"it waited {now_s - place.arrived_s:.1f} s for its turn"
            error: TandemError = DeadlineError("no answer in the time that was given", why=waited, todo="try later")
            self._meter.refused("deadline")
        else:
            error = _late("", self._retry_s(lane, 0.0))
            self._meter.refused("late")
        _end(place, error)

    def _retry_s(self, lane: _Lane, unknown_s: float) -> float:
        """Seconds until all that wait now have been sent off."""
        cost, rate = lane.queue.cost, lane.rate.per_s
        return min(_MOST_S, max(_LEAST_S, cost / rate if rate else unknown_s))


def _end(place: QueuedRequest, error: TandemError) -> None:
    place.is_over = True
    place.refuse(error)


def _late(slo: str, late_s: float) -> CapacityError:
    promise = f"the SLO class {slo}" if slo else "its SLO class or its deadline"
    return CapacityError(
        "the workers are busy", why=f"the first token would come too late for {promise}", todo="send it again later",
        retry_after_s=min(_MOST_S, max(_LEAST_S, late_s)),
    )  # fmt: skip
