"""Routers' export of workers' reports: names and labels of the catalogue, and nothing that it lacks."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.core import metric_names as names
from tandem.core.ids import WorkerId
from tandem.core.label_limiter import MAX_VALUES, OTHER
from tandem.core.lifecycle import WorkerState
from tandem.router.metrics.router import Metrics
from tandem.router.workers.proto_convert import BlockCounts, ReportedLink, ReportedLoad
from tests.unit.router.stage import Stage, in_loop

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


@in_loop
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


@in_loop
async def test_what_alerts_look_at_is_there_before_it_happened() -> None:
    stage = Stage("m1")
    found = scraped(stage)
    assert found[names.TRANSFERS_FORGOTTEN] == {("m1", "mixed"): 0}
    assert found[names.REATTEMPTS]["lost",] == 0
    stage.link("m1").load = ReportedLoad(counters={"transfers_forgotten": 3.0})
    assert scraped(stage)[names.TRANSFERS_FORGOTTEN] == {("m1", "mixed"): 3}


@in_loop
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


@in_loop
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


@in_loop
async def test_blocks_by_state() -> None:
    stage = Stage("d1")
    blocks = BlockCounts(group=0, total=9, free=1, cached=2, request=3, pushing=1, reserved=2)
    stage.link("d1").load = ReportedLoad(blocks=(blocks,))
    states = {labels[3]: value for labels, value in scraped(stage)[names.KV_BLOCKS].items()}
    assert states == pytest.approx({"free": 1, "cached": 2, "request": 3, "pushing": 1, "reserved": 2})
