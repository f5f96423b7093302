"""Readiness: a pair that has moved KV in its present incarnations, or a worker that answers alone.

The router is ready when it can serve one of its models. It does not wait for clients to find out: it sends a request of
two tokens through new pairs, so many that every worker has been tried with PAIRS_EACH others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.core.config import Disaggregation
from tandem.core.errors import TandemError
from tandem.core.ids import WorkerId, new_request_id
from tandem.core.logs import event
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import RoleName
from tandem.core.timeout_scale import patient
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest
from tandem.router.routing.plan import Candidate, Plan, pairs
from tandem.router.workers.table import WorkerTable

_log = logging.getLogger(__name__)
PROBE_S = patient(20.0)
LOOK_S = 1.0
_FIRST_RETRY_S = 0.25
_LAST_RETRY_S = 5.0
AT_ONCE = 4
PAIRS_EACH = 4
"""All pairs would be thousands of requests in a large cluster."""
_BACKLOG_BYTES = 1 << 20

Key = frozenset[tuple[str, int]]
"""(worker, incarnation) of all workers that serve together."""


@dataclass(slots=True)
class _Trial:
    """Result of probing one key so far."""

    retry_at_s: float
    backoff_s: float
    trouble: str


class Readiness:
    """`is_draining` is set when the router is about to stop: it takes no new work and is not ready.

    `probes` has every model that is to be served, with a short prompt for it.
    """

    def __init__(
        self,
        table: WorkerTable,
        mode: Disaggregation,
        clock: Clock,
        probes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._table, self._mode, self._clock = table, mode, clock
        self._probes = dict(probes)
        self._proven: set[Key] = set()
        self._trials: dict[Key, _Trial] = {}
        self._targets: dict[str, dict[Key, Plan]] = {}
        """By model, every key that could serve it, as of `_able`, and those of them that are tried."""
        self._tried: dict[str, dict[Key, Plan]] = {}
        self._able: tuple[tuple[str, int], ...] | None = None
        self._probing: set[Key] = set()
        self._wake = asyncio.Event()
        self._served: set[str] = set()
        self.is_draining = False

    def on_link_up(self) -> None:
        """Wake the prober: a worker is connected, and may be one to probe."""
        self._wake.set()

    def on_proven(self, workers: Iterable[tuple[str, int]]) -> None:
        """These, in these incarnations, have answered a request together."""
        key = frozenset(workers)
        links = [self._table.link(WorkerId(worker)) for worker, _ in key]
        self._served |= {link.facts.model for link in links if link is not None and link.facts is not None}
        self._proven.add(key)
        self._trials.pop(key, None)

    @property
    def is_ready(self) -> bool:
        """True if some model can be served."""
        return not self.is_draining and any(not self._missing(model) for model in self._probes)

    def missing(self) -> list[str]:
        """Why models cannot be served, for people; empty = all can."""
        if self.is_draining:
            return ["the router is stopping"]
        if len(self._probes) == 1:
            return self._missing(next(iter(self._probes)))
        return [f"{model}: {line}" for model in self._probes for line in self._missing(model)]

    def _missing(self, model: str) -> list[str]:
        self._look()
        if any(key in self._targets[model] for key in self._proven):
            return []
        if self._tried[model]:
            lines = []
            for key, plan in self._tried[model].items():
                trial = self._trials.get(key)
                trouble = trial.trouble if trial and trial.trouble else "the first request is on its way"
                lines.append(f"{' + '.join(plan.workers)}: {trouble}")
            return lines
        lines = [
            f"{worker}: {link.trouble}" for link in self._table.links if not link.is_up and (worker := link.worker)
        ]
        lines += [f"{prefill} + {decode}: {why}" for prefill, decode, why in self._table.refused_pairs()]
        if self._table.trouble:
            lines.append(self._table.trouble)
        roles = {
            Disaggregation.ALWAYS: "a prefill and a decode worker",
            Disaggregation.AUTO: "a prefill and a decode worker, or a mixed one",
            Disaggregation.NEVER: "a mixed or a decode worker",
        }
        return [f"{roles[self._mode]} must be connected", *lines]

    async def run(self, dispatcher: Dispatcher) -> None:
        """Probe, through `dispatcher`, whatever is new, and again what failed, until cancelled. One that hangs keeps no
        other waiting."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                self._look()
                targets = [(model, plan, key) for model, tried in self._tried.items() for key, plan in tried.items()]
                due = [target for target in targets if self._is_due(target[2])]
                for target in due[: AT_ONCE - len(self._probing)]:
                    self._probing.add(target[2])
                    group.create_task(self._probe(dispatcher, *target))
                await self._sleep()

    async def _probe(self, dispatcher: Dispatcher, model: str, plan: Plan, key: Key) -> None:
        try:
            await self._try(dispatcher, model, plan, key)
        finally:
            self._probing.discard(key)
            self._wake.set()

    async def _sleep(self) -> None:
        """Until a worker comes, a probe ends or is to be tried again."""
        try:
            async with asyncio.timeout(self._pause_s()):
                await self._wake.wait()
        except TimeoutError:
            return

    def _pause_s(self) -> float:
        if len(self._probing) >= AT_ONCE:
            return LOOK_S
        now_s = self._clock.now_s()
        failed = (self._trials[key] for tried in self._tried.values() for key in tried if self._may_fail_again(key))
        return max(0.01, min([LOOK_S, *(trial.retry_at_s - now_s for trial in failed)]))

    def _may_fail_again(self, key: Key) -> bool:
        return key in self._trials and key not in self._proven and key not in self._probing

    async def _try(self, dispatcher: Dispatcher, model: str, plan: Plan, key: Key) -> None:
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        work = GenerationRequest(prompt=self._probes[model], sampling=sampling, timeout_s=PROBE_S, model=model)
        inbox = ArrivalQueue(_BACKLOG_BYTES)
        try:
            with dispatcher.submit(new_request_id("probe"), 0, work, inbox, plan) as flight:
                while not flight.is_finished:
                    await inbox.take()
            self.on_proven(key)
            event(_log, "workers answer", workers="+".join(plan.workers))
        except TandemError as error:
            last = self._trials.get(key)
            backoff_s = min(2 * last.backoff_s, _LAST_RETRY_S) if last else _FIRST_RETRY_S
            self._trials[key] = _Trial(self._clock.now_s() + backoff_s, backoff_s, error.message)
            event(_log, "probe failed", logging.WARNING, workers="+".join(plan.workers), why=error.message)

    def _is_due(self, key: Key) -> bool:
        trial = self._trials.get(key)
        is_known = key in self._proven or key in self._probing
        return not is_known and (trial is None or trial.retry_at_s <= self._clock.now_s())

    def _look(self) -> None:
        """Update the targets to the workers that are here now, and forget the others; cheap while nothing changes."""
        able = tuple((link.worker, link.where.incarnation) for link in self._table.usable())
        if able == self._able:
            return
        self._able = able
        for model in self._probes:
            candidates = self._table.candidates(model=model)
            alone = [one for one in candidates if one.role in self._alone(model, candidates)]
            here = {_key(one): Plan(decode=one.worker, prefill=None, reason="probe") for one in alone}
            paired = {} if self._mode is Disaggregation.NEVER else pair_plans(candidates)
            self._targets[model] = {**paired, **here}
            self._tried[model] = {**enough(paired), **here}
        up = {(link.worker, link.where.incarnation) for link in self._table.links if link.is_up}
        self._proven = {key for key in self._proven if key <= up}
        self._trials = {key: trial for key, trial in self._trials.items() if key <= up}

    def _alone(self, model: str, candidates: Sequence[Candidate]) -> set[RoleName]:
        """Roles that are expected to serve alone. A model that starts waits for its pairs; once it was served, decode
        workers may go on alone."""
        if self._mode is Disaggregation.ALWAYS:
            return set()
        is_left_alone = model in self._served and not any(one.role is RoleName.PREFILL for one in candidates)
        if self._mode is Disaggregation.AUTO and not is_left_alone:
            return {RoleName.MIXED}
        return {RoleName.MIXED, RoleName.DECODE}


def pair_plans(candidates: Sequence[Candidate]) -> dict[Key, Plan]:
    """Every pair that may be planned, ordered so that the first ones have all workers in them."""
    prefills = {one.worker: place for place, one in enumerate(c for c in candidates if c.role is RoleName.PREFILL)}
    decodes = {one.worker: place for place, one in enumerate(c for c in candidates if c.role is RoleName.DECODE)}
    most = max(len(prefills), len(decodes))
    diagonals = sorted(pairs(candidates), key=lambda pair: (decodes[pair[1].worker] - prefills[pair[0].worker]) % most)
    return {_key(p, d): Plan(decode=d.worker, prefill=p.worker, reason="probe") for p, d in diagonals}


def enough(plans: Mapping[Key, Plan]) -> dict[Key, Plan]:
    """Those among them with which every worker is in PAIRS_EACH, if it can be in so many."""
    counts: Counter[WorkerId] = Counter()
    enough = {}
    for key, plan in plans.items():
        if any(counts[worker] < PAIRS_EACH for worker in plan.workers):
            enough[key] = plan
            counts.update(plan.workers)
    return enough


def _key(*candidates: Candidate) -> Key:
    return frozenset((one.worker, one.incarnation) for one in candidates)
