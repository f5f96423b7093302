"""Capacity check: room at the workers for another request, or a wait here, where order is fair.

Workers keep a short queue, so that they never idle and short prompts overtake long ones there; what they do not need
for that waits in the router. Pure arithmetic over what workers reported and what was sent to them since.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.core.config import AdmissionSection
from tandem.core.lifecycle import RoleName
from tandem.core.prefill_queue import PrefillSpeed, QueuedWork, QueueRules
from tandem.router.routing.inflight_load import InFlightWork, Outstanding

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDemand:
    """Resources of a request: tokens of all its prompts, and its choices. `compute_s` None = not known how long."""

    prompt_tokens: int
    choices: int
    compute_s: float | None = None


class CapacityCheck:
    """`least_itl_s()`: a decode worker takes no more sequences than keep its steps shorter; inf = as many as fit."""

    def __init__(self, rules: AdmissionSection, least_itl_s: Callable[[], float] = lambda: math.inf) -> None:
        self._rules, self._least_itl_s = rules, least_itl_s

    def is_there(self, need: ResourceDemand, links: Iterable[WorkerLoad], now_s: float) -> bool:
        """True if one worker can soon begin the prompt and one can go on with the answer.

        True where no worker serves at all, too: then nothing is gained by waiting here.
        """
        here = [link for link in links if link.facts is not None]
        computing = [link for link in here if _role(link) is not RoleName.DECODE] or here
        decoding = [link for link in here if _role(link) is not RoleName.PREFILL] or here
        if not here:
            return True
        return any(self._can_compute(link, need, now_s) for link in computing) and any(
            self._can_decode(link, need, now_s) for link in decoding
        )

    def is_there_whole(self, need: ResourceDemand, link: WorkerLoad, now_s: float) -> bool:
        """True if this worker can take the whole request, its prompt too. A decode worker that has room for the answer
        has it for the prompt: the caller has weighed that."""
        if link.facts is None or not self._can_decode(link, need, now_s):
            return False
        return _role(link) is RoleName.DECODE or self._can_compute(link, need, now_s)

    def _can_compute(self, link: WorkerLoad, need: ResourceDemand, now_s: float) -> bool:
        """True if little is ahead of it there. What it would overtake does not count, if that is known."""
        load, is_stale, due_s = link.load, link.outstanding.is_stale(now_s), math.inf
        if need.compute_s is not None:
            due_s = load.queue_rules.due_s(arrived_s=now_s, remaining_s=SHORTER * need.compute_s, now_s=now_s)
        reported = [row for row in load.queue if row.due_s <= due_s] if not is_stale else []
        sent = [row for row in link.outstanding.queue(now_s) if row.due_s <= due_s]
        if sum(row.requests for row in (*reported, *sent)) < self._rules.worker_queue_requests:
            return True
        speed, since_s = load.prefill_speed, now_s - link.outstanding.reported_s
        reported_s = sum(speed.seconds(row.tokens, row.attended) for row in reported)
        sent_s = sum(speed.seconds(row.tokens, row.attended) for row in sent)
        left_s = max(0.0, reported_s - since_s)  # of what it reported it has worked on since
        return left_s + sent_s < self._rules.worker_queue_s

    def _can_decode(self, link: WorkerLoad, need: ResourceDemand, now_s: float) -> bool:
        load, coming = link.load, link.outstanding.uncounted(now_s)
        if link.outstanding.is_stale(now_s):
            return True
        if _role(link) is RoleName.DECODE and load.queued_requests:
            return False  # a request waits for blocks or a place there
        step_s = load.decode_step_s + load.decode_sequence_s * (len(coming) + need.choices)
        if load.decoding_sequences and step_s > self._least_itl_s():
            return False
        return not load.total_blocks or self._fits(link, need, coming)

    def _fits(self, link: WorkerLoad, need: ResourceDemand, coming: list[InFlightWork]) -> bool:
        size = (link.facts.block_tokens if link.facts is not None else 0) or _ASSUMED_BLOCK_TOKENS
        wanted = -(-need.prompt_tokens // size) + need.choices
        is_idle = not link.load.in_flight and not coming
        return is_idle or link.load.free_blocks - sum(one.blocks for one in coming) >= wanted


def _role(link: WorkerLoad) -> RoleName:
    if link.facts is None:
        raise RuntimeError("a link that is down was asked for its role")
    return link.facts.role
