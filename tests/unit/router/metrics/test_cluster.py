"""Routers' metrics of the cluster as a whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tandem.core import metric_names as names
from tandem.core.clock import ManualClock
from tandem.core.config import PriceSection
from tandem.core.desired import DesiredState, Pool
from tandem.core.errors import UnavailableError
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.lifecycle import RoleName
from tandem.router.metrics import cluster
from tandem.router.metrics.cluster import ClusterWatch, split_of
from tandem.router.workers.proto_convert import ReportedLoad
from tests.unit.router.stage import Stage, in_loop


class Store:
    """Everything that is looked at; `is_away` = it does not answer."""

    def __init__(self) -> None:
        self.kinds: list[EventKind] = []
        self.state: DesiredState | None = None
        self.said: dict[str, Any] | None = None
        self.is_away = False

    async def last(self, count: int) -> list[tuple[str, ClusterEvent]]:
        return self._from(max(0, len(self.kinds) - count))

    async def after(self, place: str, count: int) -> list[tuple[str, ClusterEvent]]:
        return self._from(int(place))[:2]

    async def load(self) -> DesiredState | None:
        return self.state

    async def word(self) -> dict[str, Any] | None:
        return self.said

    def _from(self, number: int) -> list[tuple[str, ClusterEvent]]:
        if self.is_away:
            raise UnavailableError("Redis does not answer")
        every = [ClusterEvent(time_s=0.0, kind=kind, subject="w", reason="") for kind in self.kinds]
        return [(str(place), one) for place, one in enumerate(every, 1)][number:]


def watching(store: Store, stage: Stage | None = None, price: PriceSection | None = None) -> ClusterWatch:
    links = (lambda: stage.table.links) if stage is not None else list
    clock = stage.clock if stage is not None else ManualClock()
    return ClusterWatch(links, clock, price or PriceSection(), events=store, desired=store, planning=store)


def samples(watch: ClusterWatch, name: str) -> dict[str, float]:
    """Values that are not 0, by the only label."""
    every = [sample for family in watch.collect() for sample in family.samples if sample.name == name]
    return {next(iter(sample.labels.values())): sample.value for sample in every if sample.value}


def test_events_count_from_the_first_look_and_every_kind_is_there() -> None:
    async def run() -> None:
        store = Store()
        store.kinds = [EventKind.STARTED] * 3
        watch = watching(store)
        await watch.look()
        assert samples(watch, names.CLUSTER_EVENTS) == {}
        (family,) = (one for one in watch.collect() if one.name == names.CLUSTER_EVENTS.removesuffix("_total"))
        assert {sample.labels["kind"] for sample in family.samples} == set(EventKind)
        store.kinds += [EventKind.DRAINING, EventKind.PLAN_ACTED, EventKind.DRAINING]
        await watch.look()
        await watch.look()
        assert samples(watch, names.CLUSTER_EVENTS) == {"draining": 2, "plan_acted": 1}

    asyncio.run(run())


def test_what_happened_while_the_store_was_away_is_counted_afterwards() -> None:
    async def run() -> None:
        store = Store()
        watch = watching(store)
        await watch.look()
        store.kinds, store.is_away = [EventKind.EXITED], True
        await watch.look()
        assert samples(watch, names.CLUSTER_EVENTS) == {}
        store.is_away = False
        await watch.look()
        assert samples(watch, names.CLUSTER_EVENTS) == {"exited": 1}

    asyncio.run(run())


def test_wanted_workers_by_role_and_what_the_planner_would_have() -> None:
    async def run() -> None:
        store = Store()
        pools = [Pool(name=f"{role}{n}", model="m", role=role, count=n) for role, n in
                 ((RoleName.PREFILL, 2), (RoleName.DECODE, 3), (RoleName.DECODE, 1))]  # fmt: skip
        store.state = DesiredState(version=1, pools=tuple(pools))
        watch = watching(store)
        assert samples(watch, names.DESIRED_WORKERS) == {}
        await watch.look()
        assert samples(watch, names.DESIRED_WORKERS) == {"prefill": 2, "decode": 4}
        assert samples(watch, names.PLANNED_WORKERS) == {}
        store.said = {"wanted": "3P:3D:1M"}
        await watch.look()
        assert samples(watch, names.PLANNED_WORKERS) == {"prefill": 3, "decode": 3, "mixed": 1}
        store.state, store.said = replace(store.state, is_stopped=True), None
        await watch.look()
        assert samples(watch, names.DESIRED_WORKERS) == samples(watch, names.PLANNED_WORKERS) == {}

    asyncio.run(run())


def test_a_look_that_goes_wrong_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "EVERY_S", 0.0)

    class Broken(Store):
        looks = 0

        async def load(self) -> DesiredState | None:
            self.looks += 1
            if self.looks == 1:
                raise ValueError("what stands there is nothing that can be read")
            pool = Pool(name="p", model="m", role=RoleName.MIXED, count=self.looks)
            return DesiredState(version=1, pools=(pool,))

    async def run() -> None:
        watch = watching(Broken())
        task = asyncio.create_task(watch.run())
        async with asyncio.timeout(10.0):
            while samples(watch, names.DESIRED_WORKERS).get("mixed", 0) < 3:
                await asyncio.sleep(0)
        task.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("text", ["", "None", "P", "two P"])
def test_what_is_no_split_says_nothing(text: str) -> None:
    assert split_of(text) == {}


@in_loop
async def test_tokens_cost_what_their_workers_do() -> None:
    stage = Stage("p1", "d1")
    watch = watching(Store(), stage, PriceSection(prefill=3.6, decode=7.2))
    await watch.look()
    assert samples(watch, names.COST) == {}
    stage.clock.advance(10.0)
    stage.link("p1").load = ReportedLoad(
        counters={"step_seconds": 5, "prefill_step_seconds": 5, "prefill_tokens": 10_000}
    )
    stage.link("d1").load = ReportedLoad(counters={"step_seconds": 5, "decode_tokens": 1_000})
    await watch.look()
    assert samples(watch, names.COST) == pytest.approx({"prefill": 1.0, "decode": 20.0})
