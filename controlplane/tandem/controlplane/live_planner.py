"""Runs the planner in a live cluster: reads routers' reports, advises changes with reasons, in `act` makes them.

State that has to outlive this process is in the store: the age of the desired state, by any writer, is the elapsed
cool-down, and events hold the advice given already. It changes the desired state as an operator does: only onto the
version that it looked at.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from redis.asyncio import Redis

from tandem.controlplane.planner.inputs import Unclear, Watch, loads, split_of, unsettled
from tandem.controlplane.planner.planner import Planner
from tandem.controlplane.planner.records import Decision, Forecast, Observation, Rates, RoleSplit, Rules
from tandem.controlplane.resolve import ResolvedCluster
from tandem.core.clock import Clock, MonotonicClock
from tandem.core.config import PlannerMode, PlannerSection
from tandem.core.demand import RouterDemand
from tandem.core.desired import DesiredState
from tandem.core.desired_changes import ChangeKind, changes, with_scale
from tandem.core.errors import ConfigError, ConflictError, TandemError
from tandem.core.events import MAX_EVENTS, EventKind, EventSink
from tandem.core.logs import event
from tandem.core.prefill_queue import QueueRules
from tandem.core.state_enums import RoleName
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore
from tandem.statestore.stores.events import ClusterEventStore
from tandem.statestore.stores.planning import PlanningStore

log = logging.getLogger(__name__)

SUBJECT: Final = "planner"
"""Subject of its events."""
REPEAT_S: Final = 3600.0
"""The same advice is given again after so long, if the split is still the same."""
_SILENT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Stores that it reads, and those that it writes."""

    desired: DesiredStateStore
    planning: PlanningStore
    events: ClusterEventStore


class LivePlanner:
    """Plans for one model. `run` it in a task."""

    def __init__(
        self,
        section: PlannerSection,
        planner: Planner,
        watch: Watch,
        stores: Stores,
        events: EventSink,
        clock: Clock,
        wall_s: Callable[[], float],
    ) -> None:
        self._section, self._planner, self._watch, self._model = section, planner, watch, watch.model
        self._stores, self._events, self._clock, self._wall_s = stores, events, clock, wall_s
        self._version, self._split = 0, RoleSplit(0, 0)
        self._told: dict[str, float] | None = None
        """Advice and denials, with their times; None = not looked up yet."""
        self._last: dict[EventKind, dict[str, Any]] = {}
        self._unsure: tuple[DesiredState, str] | None = None
        """A state written without a response, and the report to make if it stands there."""

    async def run(self) -> None:
        """Look every `interval_s` until cancelled. An outage, or a bug of its own, costs a look and no more."""
        while True:
            try:
                await self.look()
            except TandemError as error:
                event(log, "nothing planned", logging.WARNING, why=error.message)
            except Exception:
                log.exception("the planner failed")
            await asyncio.sleep(self._section.interval_s)

    async def look(self) -> None:
        """Look once. UnavailableError when Redis does not answer."""
        state, age_s = await self._stores.desired.dated()
        if state is None or state.is_stopped:
            return
        every, now_s = await self._stores.planning.heard(), self._clock.now_s()
        if self._told is None:
            self._told = await self._recalled(age_s)
        self._note_unsure(state)
        self._note_version(state, now_s - age_s)
        seen = self._watch.observe(state, every, now_s)
        if isinstance(seen, Unclear):
            self._planner.forget_wishes()
            await self._say(state, every, {"reason": seen.reason})
            return
        decision = await asyncio.to_thread(self._planner.decide, seen, now_s)
        if decision.is_due and decision.is_change:
            if decision.is_to_act:
                await self._act(state, decision, every)
            else:
                self._tell(EventKind.PLAN_ADVISED, _step(decision), f"because {decision.reason}")
        await self._say(state, every, _figures(decision, seen))

    # ---- history --------------------------------------------------------------------------------------------------

    async def _recalled(self, age_s: float) -> dict[str, float]:
        """Return what this planner, or one before it, reported of the record as it is."""
        told: dict[str, float] = {}
        for _, happened in await self._stores.events.last(MAX_EVENTS):
            if happened.kind in _PLANNED:
                self._last[happened.kind] = {"at_s": happened.time_s, "what": happened.reason}
            if happened.kind in _TOLD_ONCE and happened.time_s >= self._wall_s() - age_s:
                told[happened.reason.partition(",")[0]] = happened.time_s
        return told

    def _note_unsure(self, state: DesiredState) -> None:
        if self._unsure is not None and self._unsure[0] == state:
            self._record(EventKind.PLAN_ACTED, self._unsure[1])
        self._unsure = None

    def _note_version(self, state: DesiredState, at_s: float) -> None:
        """Start the cool-down at a new version of the record, unless this planner wrote it."""
        if state.version != self._version:
            self._version = state.version
            self._planner.note_change(at_s)
        split = split_of(state, self._model)
        if split != self._split:
            if self._split.total and self._told is not None:
                self._told.clear()
            self._split = split

    # ---- actions --------------------------------------------------------------------------------------------------

    async def _act(self, state: DesiredState, decision: Decision, every: Sequence[RouterDemand]) -> None:
        """Write the record as `scale` would: flips first, victims chosen. Of two writers one wins."""
        step, wanted = _step(decision), decision.wanted
        counts = {role: wanted.of(role) for role in RoleName if wanted.of(role) != decision.current.of(role)}
        try:
            after = replace(with_scale(state, counts, loads(every), model=self._model), version=state.version + 1)
            deeds = changes(state, after)
            if wanted.total <= decision.current.total and any(one.deed is ChangeKind.START for one in deeds):
                raise ConflictError("it takes another start", why="no worker can change its role without a gap")
            done = ", ".join(f"{one.worker_id} {one.deed} {one.detail}".rstrip() for one in deeds)
            what = f"{step}, because {decision.reason}; version {after.version}: {done}"
            self._unsure = after, what
            is_saved = await self._stores.desired.save(after, state.version)
            self._unsure = None
        except (ConflictError, ConfigError) as error:
            self._tell(EventKind.PLAN_DENIED, step, error.message)
            return
        if not is_saved:
            self._record(EventKind.PLAN_DENIED, f"{step}, another writer changed the desired state first")
            return
        self._version = after.version
        self._record(EventKind.PLAN_ACTED, what)

    def _tell(self, kind: EventKind, step: str, why: str) -> None:
        """Report a step once while the split stays the same."""
        now_s, told = self._wall_s(), self._told if self._told is not None else {}
        if now_s - told.get(step, float("-inf")) >= REPEAT_S:
            told[step] = now_s
            self._record(kind, f"{step}, {why}")

    def _record(self, kind: EventKind, what: str) -> None:
        self._last[kind] = {"at_s": round(self._wall_s(), 3), "what": what}
        self._events.record(kind, SUBJECT, what)

    async def _say(self, state: DesiredState, every: Sequence[RouterDemand], word: Mapping[str, Any]) -> None:
        split = str(split_of(state, self._model))
        whole = {
            "mode": self._section.mode.value,
            "at_s": round(self._wall_s(), 3),
            "version": state.version,
            "split": split,
            "wanted": split,
            "is_due": False,
            "is_advice": self._section.mode is not PlannerMode.ACT,
            "waits_s": 0.0,
            "requests": 0,
            "routers": len(every),
            "link_bytes_per_s": 0.0,
            "unsettled": unsettled(state, every),
            "now": None,
            "then": None,
            "last_advice": self._last.get(EventKind.PLAN_ADVISED),
            "last_action": self._last.get(EventKind.PLAN_ACTED),
            "last_denial": self._last.get(EventKind.PLAN_DENIED),
            **word,
        }
        await self._stores.planning.say(whole, for_s=3 * self._section.interval_s + _SILENT_S)


def planner_of(resolved: ResolvedCluster, redis: Redis, events: EventSink) -> LivePlanner | None:
    """Return the planner as configured; None if the cluster is to have none."""
    section = resolved.config.planner
    if section.mode is PlannerMode.OFF:
        return None
    keys, worker, (model, *_) = Keys(resolved.config.name), resolved.config.worker, resolved.models
    ranks = max(resolved.workers[pool.role].tp for pool in resolved.pools)
    rules = Rules.configured(section, resolved.config.max_ranks // ranks)
    known = Rates(
        max_step_s=worker.max_step_s,
        max_sequences=worker.max_sequences,
        queue=QueueRules(stretch=worker.queue_stretch, max_overtake_s=worker.queue_max_overtake_s),
    )
    stores = Stores(
        desired=DesiredStateStore(redis, keys),
        planning=PlanningStore(redis, keys),
        events=ClusterEventStore(redis, keys),
    )
    watch = Watch(rules, known, model.source.name)
    return LivePlanner(section, Planner(rules), watch, stores, events, MonotonicClock(), time.time)


_TOLD_ONCE = (EventKind.PLAN_ADVISED, EventKind.PLAN_DENIED)
_PLANNED = (*_TOLD_ONCE, EventKind.PLAN_ACTED)


def _step(decision: Decision) -> str:
    """Return the prefix of its event."""
    return f"{decision.current} → {decision.wanted}"


def _figures(decision: Decision, seen: Observation) -> dict[str, Any]:
    return {
        "wanted": str(decision.wanted),
        "reason": decision.reason,
        "is_due": decision.is_due,
        "is_advice": decision.is_advice or decision.mode is not PlannerMode.ACT,
        "waits_s": round(decision.waits_s, 1),
        "requests": len(seen.recent),
        "link_bytes_per_s": round(seen.rates.link_bytes_per_s if seen.rates.wire_token_s else 0.0),
        "now": _forecast(decision.now),
        "then": _forecast(decision.then),
    }


def _forecast(one: Forecast | None) -> dict[str, Any] | None:
    if one is None:
        return None
    digits = {"attained": 4, "goodput_per_s": 3, "ttft_p90_s": 4, "itl_p90_s": 5, "prefill_busy": 3}
    return {"split": str(one.split), **{name: round(getattr(one, name), count) for name, count in digits.items()}}
