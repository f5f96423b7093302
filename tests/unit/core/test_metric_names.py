"""The catalogue of metrics: kinds and names agree, and every counter of a worker is in it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.core import metric_names as names
from tandem.core.label_limiter import OTHER, BoundedLabel
from tandem.core.metric_names import CATALOGUE, Metric, MetricKind

ROOT = Path(__file__).resolve().parents[3]
OF_WORKERS = ("workercore", "workerhost", "prefill_worker", "decode_worker", "worker")


def test_every_metric_has_a_name_of_its_own() -> None:
    declared = [metric for metric in vars(names).values() if isinstance(metric, Metric)]
    assert len(declared) == len(CATALOGUE) > 80


@pytest.mark.parametrize("metric", CATALOGUE.values(), ids=str)
def test_names_say_what_a_metric_is(metric: Metric) -> None:
    assert (metric.kind is MetricKind.COUNTER) == metric.endswith("_total")
    assert metric.kind is not MetricKind.HISTOGRAM or metric.endswith("_seconds")
    assert metric.text.endswith(".")
    assert len(set(metric.labels)) == len(metric.labels)


def counted() -> Iterator[tuple[str, str]]:
    """Yield the names, written as text, that workers count under, and their places."""
    for folder in OF_WORKERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "count":
                    for name in node.args[:1]:
                        if isinstance(name, ast.Constant) and isinstance(name.value, str):
                            yield name.value, f"{path.name}:{node.lineno}"


def test_every_counter_of_a_worker_is_a_metric() -> None:
    found = list(counted())
    assert len(found) > 30
    assert [place for name, place in found if names.reported(name) is None] == []


def test_a_key_stands_for_a_metric_and_its_own_labels() -> None:
    key = names.counter_key(names.FETCHES_FAILED, reason="late")
    assert names.reported(key) == (names.FETCHES_FAILED, {"reason": "late"})
    assert names.reported("kv_sent_bytes") == (names.KV_TRANSFER_BYTES, {"direction": "sent"})
    assert names.reported("transfer_dropped_fenced") == (names.KV_FRAMES_DROPPED, {"reason": "fenced"})
    assert names.reported("steps") == (names.STEPS, {})
    assert names.reported(names.LEASES) == (names.LEASES, {})


@pytest.mark.parametrize("key", ["invented", "handovers{to=d0}", "tandem_requests_total", "kv_fetches_failed"])
def test_what_is_no_metric_of_workers_or_has_other_labels_is_none(key: str) -> None:
    assert names.reported(key) is None


def test_a_label_takes_so_many_values() -> None:
    label = BoundedLabel(2)
    assert [label.of(value) for value in "abacb"] == ["a", "b", "a", OTHER, "b"]
