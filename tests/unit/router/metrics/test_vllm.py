"""Metrics under vLLM's names have the values of the own ones."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.core import metric_names as names
from tandem.core.metric_names import MetricSource
from tandem.router.metrics.router import Metrics
from tandem.router.metrics.vllm import kv_usage
from tandem.router.workers.proto_convert import BlockCounts, ReportedLoad
from tests.unit.router.stage import Stage, in_loop

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


@in_loop
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
