"""What several processes of a router say, put together."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tandem.router.orders import POLICY_PATH, SLO_PATH, Orders
from tandem.router.parts_admin import added_up


def text(requests: int, seconds: float, worker_steps: int) -> str:
    registry = CollectorRegistry()
    Counter("requests", "Requests.", ["api"], registry=registry).labels("chat").inc(requests)
    Histogram("wait_seconds", "Waiting.", buckets=(1.0, 2.0), registry=registry).observe(seconds)
    Gauge("in_flight", "Now.", registry=registry).set(requests)
    Counter("steps", "By a worker.", ["worker"], registry=registry).labels("d0").inc(worker_steps)
    return generate_latest(registry).decode()


def test_samples_are_added_but_for_what_workers_reported() -> None:
    families = {family.name: family for family in added_up([text(3, 0.5, 70), text(4, 1.5, 71)])}
    values = {(s.name, *sorted(s.labels.values())): s.value for f in families.values() for s in f.samples}
    assert values["requests_total", "chat"] == 7
    assert values[("in_flight",)] == 7
    assert (values["wait_seconds_count",], values["wait_seconds_sum",]) == (2, 2.0)
    assert [values["wait_seconds_bucket", le] for le in ("1.0", "2.0", "+Inf")] == [1, 2, 2]
    assert values["steps_total", "d0"] == 70, "both heard it from the worker"
    assert families["wait_seconds"].type == "histogram"
    assert families["requests"].documentation == "Requests."


def test_the_last_order_for_each_thing_is_kept() -> None:
    orders = Orders()
    first, other, last = b'{"slo":"a","ttft_s":1}', b'{"slo":"b"}', b'{"slo":"a","ttft_s":2}'
    for path, body in ((SLO_PATH, first), (POLICY_PATH, b'{"policy":"random"}'), (SLO_PATH, other), (SLO_PATH, last),
                       (POLICY_PATH, b'{"policy":"cost"}')):  # fmt: skip
        orders.keep(path, body)
    assert sorted(orders.every()) == [(POLICY_PATH, b'{"policy":"cost"}'), (SLO_PATH, last), (SLO_PATH, other)]
