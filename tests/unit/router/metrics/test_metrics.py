"""Test the router's metrics: cluster, costs, vLLM's names and workers."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.core import metric_names as names
from tandem.core.clock import ManualClock
from tandem.core.config import PriceSection
from tandem.core.desired import DesiredState, Pool
from tandem.core.errors import UnavailableError
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.ids import WorkerId
from tandem.core.label_limiter import MAX_VALUES, OTHER
from tandem.core.link_speed import ReportedLink
from tandem.core.metric_names import MetricSource
from tandem.core.state_enums import RoleName, WorkerState
from tandem.router.metrics import cluster
from tandem.router.metrics.cluster import WINDOW_S, ClusterWatch, CostMeter, WorkerCounts, split_of
from tandem.router.metrics.router import Metrics
from tandem.router.metrics.vllm import kv_usage
from tandem.router.workers.proto_convert import BlockCounts, ReportedLoad
from tests.unit.router.stage import Stage


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


async def test_events_count_from_the_first_look_and_every_kind_is_there() -> None:
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


async def test_what_happened_while_the_store_was_away_is_counted_afterwards() -> None:
    store = Store()
    watch = watching(store)
    await watch.look()
    store.kinds, store.is_away = [EventKind.EXITED], True
    await watch.look()
    assert samples(watch, names.CLUSTER_EVENTS) == {}
    store.is_away = False
    await watch.look()
    assert samples(watch, names.CLUSTER_EVENTS) == {"exited": 1}


async def test_wanted_workers_by_role_and_what_the_planner_would_have() -> None:
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


async def test_a_look_that_goes_wrong_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "EVERY_S", 0.0)

    class Broken(Store):
        looks = 0

        async def load(self) -> DesiredState | None:
            self.looks += 1
            if self.looks == 1:
                raise ValueError("what stands there is nothing that can be read")
            pool = Pool(name="p", model="m", role=RoleName.MIXED, count=self.looks)
            return DesiredState(version=1, pools=(pool,))

    watch = watching(Broken())
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(10.0):
        while samples(watch, names.DESIRED_WORKERS).get("mixed", 0) < 3:
            await asyncio.sleep(0)
    task.cancel()


@pytest.mark.parametrize("text", ["", "None", "P", "two P"])
def test_what_is_no_split_says_nothing(text: str) -> None:
    assert split_of(text) == {}


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


P, D, M = WorkerId("p"), WorkerId("d"), WorkerId("m")
ZERO = WorkerCounts(
    role=RoleName.PREFILL, price_per_h=3.6, step_s=0, prefill_step_s=0, prefill_tokens=0, decode_tokens=0
)
"""A thousandth a second."""


def test_each_phase_pays_for_its_own_workers() -> None:
    meter, decode = CostMeter(), replace(ZERO, role=RoleName.DECODE, price_per_h=7.2)
    meter.look({P: ZERO, D: decode}, 0.0)
    assert meter.per_million() == {}
    now = {
        P: replace(ZERO, step_s=5, prefill_step_s=5, prefill_tokens=20_000),
        D: replace(decode, step_s=9, decode_tokens=1_000),
    }
    meter.look(now, 10.0)
    assert meter.per_million() == pytest.approx({"prefill": 0.5, "decode": 20.0})


def test_a_mixed_worker_is_split_by_the_time_of_its_steps() -> None:
    meter, mixed = CostMeter(), replace(ZERO, role=RoleName.MIXED)
    meter.look({M: mixed}, 0.0)
    meter.look({M: replace(mixed, step_s=8, prefill_step_s=2, prefill_tokens=1_000, decode_tokens=1_000)}, 10.0)
    assert meter.per_million() == pytest.approx({"prefill": 2.5, "decode": 7.5})


def test_idle_workers_cost_as_much() -> None:
    meter, decode = CostMeter(), replace(ZERO, role=RoleName.DECODE)
    every = {P: ZERO, D: decode, WorkerId("p2"): ZERO}
    meter.look(every, 0.0)
    meter.look(every | {P: replace(ZERO, step_s=1, prefill_step_s=1, prefill_tokens=1_000)}, 10.0)
    assert meter.per_million() == pytest.approx({"prefill": 20.0})


@pytest.mark.parametrize("change", [{"step_s": 1.0, "prefill_tokens": 0}, {"role": RoleName.DECODE, "step_s": 99.0}])
def test_counters_that_began_again_are_left_out(change: dict[str, float]) -> None:
    meter = CostMeter()
    meter.look({P: replace(ZERO, step_s=50, prefill_step_s=50, prefill_tokens=9_000)}, 0.0)
    meter.look({P: replace(ZERO, **change)}, 10.0)  # type: ignore[arg-type]
    assert meter.per_million() == {}


def test_only_the_last_minute_counts() -> None:
    meter, tokens = CostMeter(), 0
    for second in range(0, 300, 5):
        tokens += 5_000 if second < 200 else 500
        meter.look({P: replace(ZERO, step_s=second, prefill_step_s=second, prefill_tokens=tokens)}, float(second))
    assert meter.per_million() == pytest.approx({"prefill": 10.0})
    assert len(meter._looks) <= WINDOW_S / 5 + 2


def test_without_a_price_there_is_no_cost() -> None:
    meter, free = CostMeter(), replace(ZERO, price_per_h=0.0)
    meter.look({P: free}, 0.0)
    meter.look({P: replace(free, step_s=5, prefill_step_s=5, prefill_tokens=1_000)}, 10.0)
    assert meter.per_million() == {}


WORKER = {"model_name": "m", "worker": "d1", "role": "decode"}


def values(metrics: Metrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def blocks(group: int, total: int, free: int, cached: int) -> BlockCounts:
    held = total - free - cached
    return BlockCounts(group=group, total=total, free=free, cached=cached, request=held, pushing=0, reserved=0)


async def test_a_worker_s_load() -> None:
    stage = Stage("d1")
    stage.link("d1").load = ReportedLoad(
        running_requests=3, queued_requests=2, blocks=(blocks(0, 100, 50, 25),), counters={"preemptions": 4.0}
    )
    found = values(Metrics(lambda: stage.table.links, lambda: 0))
    assert found[names.VLLM_RUNNING] == [(WORKER, 3)]
    assert found[names.VLLM_WAITING] == [(WORKER, 2)]
    assert found[names.VLLM_KV_USAGE] == found[names.VLLM_KV_USAGE_BEFORE] == [(WORKER, 0.25)]
    assert found[names.VLLM_PREEMPTIONS] == [(WORKER, 4)]
    assert found[names.VLLM_CACHE_CONFIG] == [({**WORKER, "block_size": "16", "num_gpu_blocks": "512"}, 1)]


def test_requests_by_model() -> None:
    metrics = Metrics(list, lambda: 0)
    for model, seconds in (("a", 0.5), ("a", 1.5), ("b", 0.25)):
        metrics.of(model).ttft.observe(seconds)
        metrics.of(model).cached_tokens.inc(10)
    found = values(metrics)
    assert found[f"{names.VLLM_TTFT}_sum"] == [({"model_name": "a"}, 2.0), ({"model_name": "b"}, 0.25)]
    assert found[names.VLLM_CACHE_HITS] == [({"model_name": "a"}, 20), ({"model_name": "b"}, 10)]
    own = {(labels["model"], labels["le"]): value for labels, value in found[f"{names.TTFT}_bucket"]}
    alias = {(labels["model_name"], labels["le"]): value for labels, value in found[f"{names.VLLM_TTFT}_bucket"]}
    assert own == alias
    assert metrics.of("a") is metrics.of("a")


def test_the_fullest_group_counts() -> None:
    assert kv_usage(ReportedLoad()) == 0.0
    assert kv_usage(ReportedLoad(blocks=(blocks(0, 10, 5, 5), blocks(1, 8, 1, 1)))) == pytest.approx(0.75)


def test_every_name_says_what_it_stands_for() -> None:
    aliases = [metric for metric in names.CATALOGUE.values() if metric.source is MetricSource.VLLM]
    assert all(metric.startswith("vllm:") and "model_name" in metric.labels for metric in aliases)
    text = Metrics(list, lambda: 0).render().decode()
    for metric in aliases:
        assert f"# HELP {metric} " in text


Samples = dict[tuple[str, ...], float]


def scraped(stage: Stage) -> dict[str, Samples]:
    """Values by name and labels, in the order of the catalogue."""
    text = Metrics(lambda: stage.table.links, lambda: 0).render().decode()
    found: dict[str, Samples] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            metric = names.CATALOGUE.get(sample.name)
            if metric is not None:
                assert set(sample.labels) == set(metric.labels), sample
                labels = tuple(sample.labels[label] for label in metric.labels)
                found.setdefault(sample.name, {})[labels] = sample.value
    return found


def link(peer: str, **more: Any) -> ReportedLink:
    fields: dict[str, Any] = {
        "rank": 0, "peer": WorkerId(peer), "peer_rank": 0, "transport": "tcp", "from_host": "a", "to_host": "b",
        "bytes_per_s": 0.0, "latency_s": 0.0, "achieved_bytes_per_s": 1e9, "stalls": 2, "reason": "", "unused": (),
    } | more  # fmt: skip
    return ReportedLink(**fields)


async def test_counters_have_the_labels_of_the_catalogue() -> None:
    stage = Stage("p1", "d1")
    counters = {
        "steps": 7.0, "transfer_open": 2.0, names.counter_key(names.KV_LINK_BYTES, peer="d1"): 4096.0,
        "invented": 1.0, "handovers{to=d1}": 1.0, str(names.REQUESTS): 1.0,
    }  # fmt: skip
    stage.link("p1").load = ReportedLoad(counters=counters, queued_tokens=5)
    found = scraped(stage)
    assert found[names.STEPS] == {("p1", "prefill"): 7}
    assert found[names.KV_RECEIVING] == {("p1", "prefill"): 2}
    assert found[names.KV_LINK_BYTES] == {("p1", "prefill", "d1"): 4096}
    assert found[names.WORKER_QUEUED_TOKENS] == {("p1", "prefill"): 5, ("d1", "decode"): 0}
    assert names.HANDOVERS not in found
    assert names.REQUESTS not in found


async def test_what_alerts_look_at_is_there_before_it_happened() -> None:
    stage = Stage("m1")
    found = scraped(stage)
    assert found[names.TRANSFERS_FORGOTTEN] == {("m1", "mixed"): 0}
    assert found[names.REATTEMPTS]["lost",] == 0
    stage.link("m1").load = ReportedLoad(counters={"transfers_forgotten": 3.0})
    assert scraped(stage)[names.TRANSFERS_FORGOTTEN] == {("m1", "mixed"): 3}


async def test_a_worker_s_state_and_lease() -> None:
    stage = Stage("d1", "d2")
    stage.link("d1").state = WorkerState.DRAINING
    stage.link("d2").is_registered = False
    found = scraped(stage)
    assert {labels[2] for labels, value in found[names.WORKER_STATE].items() if value and labels[0] == "d1"} == {
        "draining"
    }
    assert found[names.WORKER_REGISTERED] == {("d1",): 1, ("d2",): 0}
    stage.link("d2").facts = None
    found = scraped(stage)
    assert found[names.WORKER_UP] == {("d1",): 1, ("d2",): 0}
    assert {labels[0] for labels in found[names.WORKER_STATE]} == {"d1"}


async def test_links_between_ranks_are_added_up_and_peers_are_bounded() -> None:
    stage = Stage("p1")
    few = (link("d1"), link("d1", rank=1), link("d2", transport=""), link("d1", transport="grpc"))
    stage.link("p1").load = ReportedLoad(links=few)
    found = scraped(stage)
    assert found[names.KV_LINK_SPEED] == {("p1", "prefill", "d1", "tcp"): 2e9, ("p1", "prefill", "d1", "grpc"): 1e9}
    assert found[names.KV_LINK_STALLS]["p1", "prefill", "d1", "tcp"] == 4
    stage.link("p1").load = ReportedLoad(links=tuple(link(f"d{number}") for number in range(MAX_VALUES + 3)))
    speeds = scraped(stage)[names.KV_LINK_SPEED]
    assert len(speeds) == MAX_VALUES + 1
    assert speeds["p1", "prefill", OTHER, "tcp"] == 3e9


async def test_blocks_by_state() -> None:
    stage = Stage("d1")
    blocks = BlockCounts(group=0, total=9, free=1, cached=2, request=3, pushing=1, reserved=2)
    stage.link("d1").load = ReportedLoad(blocks=(blocks,))
    states = {labels[3]: value for labels, value in scraped(stage)[names.KV_BLOCKS].items()}
    assert states == pytest.approx({"free": 1, "cached": 2, "request": 3, "pushing": 1, "reserved": 2})
