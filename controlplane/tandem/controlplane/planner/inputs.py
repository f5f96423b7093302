"""Converts routers' reports to the planner's input. Pure, and it remembers only rates and usual lengths.

routers' Demand ─┐
desired state ───┴──▶ Watch.observe ──▶ Observation, or Unclear: the reason why there is none now
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.controlplane.planner.observer import MeasuredRates, RecentRequests
from tandem.controlplane.planner.records import Observation, ObservedRequest, Rates, RoleSplit, Rules
from tandem.core.config import SloSection
from tandem.core.demand import RouterDemand, WorkerSeen
from tandem.core.desired import DesiredState, roles_of
from tandem.core.desired_changes import WorkerLoad
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName


@dataclass(frozen=True, slots=True)
class Unclear:
    """The reason why nothing can be planned."""

    reason: str


class Watch:
    """Combines routers' reports on one model's workers. `known`: rates until they are measured."""

    def __init__(self, rules: Rules, known: Rates, model: str) -> None:
        self._rules, self.model = rules, model
        self._rates, self._usual = MeasuredRates(known), 1.0

    def observe(self, state: DesiredState, every: Sequence[RouterDemand], now_s: float) -> Observation | Unclear:
        """Return the observation. `now_s`: on the planner's clock, as the arrivals in the result."""
        if not every:
            return Unclear("no router says what is asked of it")
        workers = latest_workers(every)
        self._rates.note(workers.values())
        rates = self._rates.rates
        promises = min(every, key=lambda heard: heard.age_s).demand.promises
        recent = self._recent(every, now_s)
        promised = sum(_promises_anything(promises.get(one.slo)) for one in recent)
        if not any(map(_promises_anything, promises.values())):
            return Unclear("no SLO class promises anything, so that every split is as good")
        if promised < self._rules.min_requests:
            what = f"{promised} requests of the last {self._rules.window_s:g} s were promised anything"
            return Unclear(f"{what}: {self._rules.min_requests} are needed")
        if not rates.prefill.tokens_per_s:
            return Unclear("no worker has measured how fast it computes prompts")
        return Observation(
            split=split_of(state, self.model), recent=recent, rates=_with_kv(rates, workers.values(), every),
            promises=promises, is_settled=not unsettled(state, every),
        )  # fmt: skip

    def _recent(self, every: Sequence[RouterDemand], now_s: float) -> list[ObservedRequest]:
        """Return all routers' requests by arrival, each choice as one: those behind the first find the prompt
        computed."""
        rows = [(now_s - heard.age_s - one.age_s, one) for heard in every for one in heard.demand.asked]
        rows.sort(key=lambda row: row[0])
        book = RecentRequests(self._rules.window_s, self._usual)
        for number, (at_s, one) in enumerate(rows):
            if at_s < now_s - self._rules.window_s:
                continue
            for choice in range(min(max(1, one.choices), self._rules.max_requests)):
                key = f"{number}/{choice}"
                book.came(key, at_s, one.prompt_tokens, one.slo)
                book.started(key, one.prompt_tokens if choice else min(one.cached_tokens, one.prompt_tokens))
                (book.ended if one.has_ended else book.progressed)(key, one.output_tokens)
        found = book.seen()
        self._usual = book.usual
        return found[-self._rules.max_requests :]


def split_of(state: DesiredState, model: str) -> RoleSplit:
    """Return the desired split."""
    counts = roles_of(state.pools, model)
    return RoleSplit(counts[RoleName.PREFILL], counts[RoleName.DECODE], counts[RoleName.MIXED])


def unsettled(state: DesiredState, every: Sequence[RouterDemand]) -> str:
    """Return why the workers are not those of the record, ready for work; "" if they are, as every router sees them."""
    cordoned = next((member.worker_id for member in state.members if member.is_cordoned), None)
    if cordoned is not None:
        return f"{cordoned} is to have no work"
    for heard in every:
        seen = {worker.worker: worker for worker in heard.demand.workers}
        for member in state.members:
            worker = seen.pop(member.worker_id, None)
            if worker is None:
                return f"{member.worker_id} is not there yet"
            if worker.role is not member.role:
                return f"{member.worker_id} is to become a {member.role} worker"
            if not worker.takes_work:
                return f"{member.worker_id} takes no work"
        if seen:
            return f"{next(iter(seen))} is to leave"
    return ""


def latest_workers(every: Sequence[RouterDemand]) -> dict[WorkerId, WorkerSeen]:
    """Return each worker as the router with the latest report saw it."""
    found: dict[WorkerId, WorkerSeen] = {}
    for heard in sorted(every, key=lambda heard: -heard.age_s):
        found.update({worker.worker: worker for worker in heard.demand.workers})
    return found


def loads(every: Sequence[RouterDemand]) -> Mapping[WorkerId, WorkerLoad]:
    """Return the loads by which victims are chosen."""
    return {
        worker.worker: WorkerLoad(in_flight=worker.in_flight, unique_prefix_bytes=worker.unique_prefix_bytes)
        for worker in latest_workers(every).values()
    }


def _promises_anything(promise: SloSection | None) -> bool:
    return promise is not None and bool(promise.ttft_s or promise.itl_s)


def _with_kv(rates: Rates, workers: Iterable[WorkerSeen], every: Sequence[RouterDemand]) -> Rates:
    """Return rates with KV. A pool holds as much as the smallest one. A token's KV has the size at the generating
    workers, and travels at the median of the routers' link speeds; unless both are known, moving it is taken to need no
    time."""
    generating = [one for one in workers if one.role is not RoleName.PREFILL]
    sizes = [one.kv_tokens for one in generating if one.kv_tokens]
    rates = replace(rates, kv_tokens=min(sizes)) if sizes else rates
    speeds = [heard.demand.link_bytes_per_s for heard in every if heard.demand.link_bytes_per_s]
    kept = [one.kv_token_bytes for one in generating if one.kv_token_bytes]
    if not speeds or not kept:
        return rates
    return replace(rates, link_bytes_per_s=statistics.median(speeds), kv_token_bytes=statistics.median_high(kept))
