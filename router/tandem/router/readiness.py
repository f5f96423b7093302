"""Whether this router can serve: a pair that has moved KV in its present incarnations, or a worker that answers alone.

It is ready when it can serve one of its models. The router does not wait for clients to find out: it sends a request of
two tokens through every new pair.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.core.config import Disaggregation
from tandem.core.errors import TandemError
from tandem.core.ids import new_request_id
from tandem.core.lifecycle import RoleName
from tandem.core.logs import event
from tandem.core.sampling import SamplingParams
from tandem.router.dispatch import Dispatcher
from tandem.router.plan import Candidate, Plan, pairs
from tandem.router.requests import Inbox, Work
from tandem.router.workers import WorkerTable

_log = logging.getLogger(__name__)
PROBE_S = 20.0
_LOOK_S = 1.0
_FIRST_RETRY_S = 0.25
_LAST_RETRY_S = 5.0
_AT_ONCE = 4
_BACKLOG_BYTES = 1 << 20

Key = tuple[tuple[str, int], ...]
"""(worker, incarnation) of everybody who works together, in any order."""


@dataclass(slots=True)
class _Trial:
    """What came of probing one key so far."""

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
        dispatcher: Dispatcher,
        mode: Disaggregation,
        clock: Clock,
        probes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._table, self._dispatcher, self._mode, self._clock = table, dispatcher, mode, clock
        self._probes = dict(probes)
        self._proven: set[frozenset[tuple[str, int]]] = set()
        self._trials: dict[frozenset[tuple[str, int]], _Trial] = {}
        self._wake = asyncio.Event()
        self.is_draining = False
        dispatcher.on_link_up = self._wake.set
        dispatcher.on_proven = self._prove

    @property
    def is_ready(self) -> bool:
        """Whether some model can be served."""
        return not self.is_draining and any(not self._missing(model) for model in self._probes)

    def missing(self) -> list[str]:
        """What keeps models from being served, for people; empty = all are."""
        if self.is_draining:
            return ["the router is stopping"]
        if len(self._probes) == 1:
            return self._missing(next(iter(self._probes)))
        return [f"{model}: {line}" for model in self._probes for line in self._missing(model)]

    def _missing(self, model: str) -> list[str]:
        plans = self._targets(model)
        if any(frozenset(key) in self._proven for _, key in plans):
            return []
        if plans:
            lines = []
            for plan, key in plans:
                trial = self._trials.get(frozenset(key))
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

    async def run(self) -> None:
        """Probe whatever is new, and again what failed, until cancelled."""
        while True:
            self._forget_gone()
            targets = [(model, *target) for model in self._probes for target in self._targets(model)]
            due = [target for target in targets if self._is_due(frozenset(target[2]))]
            async with asyncio.TaskGroup() as group:
                for model, plan, key in due[:_AT_ONCE]:
                    group.create_task(self._try(model, plan, frozenset(key)))
            if not due:
                self._wake.clear()
                await self._sleep()

    async def _sleep(self) -> None:
        now_s = self._clock.now_s()
        waits = [trial.retry_at_s - now_s for trial in self._trials.values()]
        try:
            async with asyncio.timeout(max(0.01, min([_LOOK_S, *waits]))):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _try(self, model: str, plan: Plan, key: frozenset[tuple[str, int]]) -> None:
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        work = Work(prompt=self._probes[model], sampling=sampling, timeout_s=PROBE_S, model=model)
        inbox = Inbox(_BACKLOG_BYTES)
        try:
            with self._dispatcher.fly(new_request_id("probe"), 0, work, inbox, plan) as flight:
                while not flight.is_finished:
                    await inbox.take()
            self._prove(tuple(key))
            event(_log, "workers answer", workers="+".join(plan.workers))
        except TandemError as error:
            last = self._trials.get(key)
            backoff_s = min(2 * last.backoff_s, _LAST_RETRY_S) if last else _FIRST_RETRY_S
            self._trials[key] = _Trial(self._clock.now_s() + backoff_s, backoff_s, error.message)
            event(_log, "probe failed", logging.WARNING, workers="+".join(plan.workers), why=error.message)

    def _prove(self, key: Key) -> None:
        self._proven.add(frozenset(key))
        self._trials.pop(frozenset(key), None)

    def _is_due(self, key: frozenset[tuple[str, int]]) -> bool:
        trial = self._trials.get(key)
        return key not in self._proven and (trial is None or trial.retry_at_s <= self._clock.now_s())

    def _targets(self, model: str) -> list[tuple[Plan, Key]]:
        """Everybody who could serve `model` together now."""
        able = self._table.candidates(model=model)
        targets: list[tuple[Plan, Key]] = []
        if self._mode is not Disaggregation.NEVER:
            for prefill, decode in pairs(able):
                plan = Plan(decode=decode.worker, prefill=prefill.worker, reason="probe")
                targets.append((plan, (_key(prefill), _key(decode))))
        alone = {RoleName.MIXED} if self._mode is Disaggregation.AUTO else {RoleName.MIXED, RoleName.DECODE}
        if self._mode is not Disaggregation.ALWAYS:
            for candidate in able:
                if candidate.role in alone:
                    plan = Plan(decode=candidate.worker, prefill=None, reason="probe")
                    targets.append((plan, (_key(candidate),)))
        return targets

    def _forget_gone(self) -> None:
        here = {(link.worker, link.where.incarnation) for link in self._table.links if link.is_up}
        self._proven = {key for key in self._proven if key <= here}
        self._trials = {key: trial for key, trial in self._trials.items() if key <= here}


def _key(candidate: Candidate) -> tuple[str, int]:
    return (candidate.worker, candidate.incarnation)
