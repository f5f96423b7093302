"""The router's own measurements, and the workers' reports as Prometheus metrics. One registry a router, no globals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.core import metricnames as names
from tandem.router.flights.survival import Survival
from tandem.router.planning.plan import Plan
from tandem.router.workers.links import WorkerLink
from tandem.router.workers.wire import Load

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_HANDOFF_S = (
    0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.0045, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01,
    0.0125, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0,
)  # fmt: skip
_ALIASES: dict[str, tuple[str, dict[str, str]]] = {
    "kv_sent_bytes": (names.KV_TRANSFER_BYTES, {"direction": "sent"}),
    "kv_received_bytes": (names.KV_TRANSFER_BYTES, {"direction": "received"}),
    "kv_sent_blocks": (names.KV_TRANSFER_BLOCKS, {"direction": "sent"}),
    "kv_received_blocks": (names.KV_TRANSFER_BLOCKS, {"direction": "received"}),
    "prefix_hash_mismatches": (names.HASH_MISMATCHES, {}),
    "steps": (names.STEPS, {}),
    "kv_skipped_blocks": (names.KV_TRANSFER_SKIPPED_BLOCKS, {}),
}
"""Short names that workers count under."""
_DROPPED = "transfer_dropped_"
"""What workers count dropped frames under begins so; the reason follows."""
_OPEN = "transfer_open"
"""Sent among the counters, but it falls too."""


class Metrics:
    """`links` gives the workers to report on at each scrape; `in_flight` the number of requests in this router."""

    def __init__(self, links: Callable[[], Iterable[WorkerLink]], in_flight: Callable[[], int]) -> None:
        registry = self._registry = CollectorRegistry()
        self._links = links
        self._requests = Counter(names.REQUESTS, "Requests by outcome.", ["api", "outcome"], registry=registry)
        self.ttft = _histogram(names.TTFT, "From arrival to the first token.", registry)
        self.predicted_ttft = _histogram(names.PREDICTED_TTFT, "As the plan had it, from dispatch on.", registry)
        self.ttft_error = _histogram(names.TTFT_ERROR, "By how much the plan was wrong.", registry)
        self.second_token = _histogram(names.SECOND_TOKEN, "From the first token to the second.", registry)
        self.itl = _histogram(names.ITL, "Between tokens of one choice.", registry)
        self.e2e = _histogram(names.E2E, "From arrival to the end of the answer.", registry)
        self.queue = _histogram(names.QUEUE, "From dispatch until a worker began with the prompt.", registry)
        self.handoff = Histogram(
            names.HANDOFF_OVERHEAD,
            "What a hand-off from prefill to decode added to the second token.",
            buckets=_HANDOFF_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(names.PROMPT_TOKENS, "Prompt tokens.", registry=registry)
        self.generated_tokens = Counter(names.GENERATED_TOKENS, "Output tokens.", registry=registry)
        self.cached_tokens = Counter(names.CACHED_TOKENS, "Prompt tokens nobody had to compute.", registry=registry)
        self._predicted = Counter(names.PREFIX_PREDICTED, "Prompt tokens predicted to be known.", registry=registry)
        self._found = Counter(names.PREFIX_ACTUAL, "Prompt tokens found known, where that was said.", registry=registry)
        self._mismatches = Counter(
            names.PREFIX_MISMATCHES, "Predictions that were wrong.", ["basis", "found"], registry=registry
        )
        self._dropped = Counter(names.DROPPED_CHUNKS, "Token chunks kept from clients.", ["reason"], registry=registry)
        self._plans = Counter(names.PLANS, "Plans by reason.", ["reason"], registry=registry)
        self._admission_wait = _histogram(names.ADMISSION_WAIT, "Until there was room, of those that waited.", registry)
        self.refusals: dict[str, int] = {}
        """Requests that were told to come back later, by reason."""
        self._not_admitted = Counter(
            names.ADMISSION_REFUSED, "Requests told to come back later.", ["reason"], registry=registry
        )
        self._slo = Counter(names.SLO_REQUESTS, "Answers by SLO class.", ["slo", "outcome"], registry=registry)
        self._again = Counter(names.REATTEMPTS, "Attempts after a failure.", ["cause"], registry=registry)
        self._given_up = Counter(names.GIVEN_UP, "Failures not tried again.", ["reason"], registry=registry)
        flying = Gauge(names.ROUTER_IN_FLIGHT, "Requests in flight in this router.", registry=registry)
        flying.set_function(in_flight)
        registry.register(_WorkerCollector(links))

    def watch_batches(self, running: Callable[[], int]) -> None:
        """Report how many requests of batches run here."""
        Gauge(names.BATCH_RUNNING, "Requests of batches that run now.", registry=self._registry).set_function(running)

    def watch_admission(self, waiting: Callable[[], int]) -> None:
        """Report how many requests wait for room."""
        gauge = Gauge(names.ADMISSION_WAITING, "Requests that wait in this router.", registry=self._registry)
        gauge.set_function(waiting)

    def waited(self, seconds: float) -> None:
        """A request has waited until there was room."""
        self._admission_wait.observe(seconds)

    def refused(self, reason: str) -> None:
        """A request was told to come back later."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        self._not_admitted.labels(reason).inc()

    def slo(self, slo: str, outcome: str) -> None:
        """Count an answer: "met", "missed", "failed" or "cancelled"."""
        self._slo.labels(slo, outcome).inc()

    def add(self, collector: Collector) -> None:
        """Report on something more."""
        self._registry.register(collector)

    def request_ended(self, api: str, outcome: str) -> None:
        """Count one request; `outcome` is "ok" or the code of an error."""
        self._requests.labels(api, outcome).inc()

    def planned(self, plan: Plan) -> None:
        self._plans.labels(plan.reason).inc()

    def prefix_found(self, predicted_tokens: int, actual_tokens: int, *, is_hoped: bool) -> None:
        """Count one prompt: what its worker was predicted to know of it, and what it knew."""
        self._predicted.inc(predicted_tokens)
        self._found.inc(actual_tokens)
        if predicted_tokens != actual_tokens:
            found = "less" if actual_tokens < predicted_tokens else "more"
            self._mismatches.labels("speculation" if is_hoped else "index", found).inc()

    def attempted_again(self, cause: str) -> None:
        self._again.labels(cause).inc()

    def gave_up(self, reason: str) -> None:
        self._given_up.labels(reason).inc()

    def watch(self, survival: Survival, waiting: Callable[[], int]) -> None:
        """Report on what decides about re-attempts, and how many requests wait for one."""
        budget = Gauge(names.RETRY_BUDGET, "Re-attempts that may be made now.", registry=self._registry)
        budget.set_function(lambda: survival.budget.tokens)
        held = Gauge(names.WAITING, "Requests that no worker has now.", registry=self._registry)
        held.set_function(waiting)
        self._registry.register(_BreakerCollector(self._links, survival))

    def dropped(self, reason: str) -> None:
        self._dropped.labels(reason).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _WorkerCollector(Collector):
    """Reads the last load report of every worker when asked."""

    def __init__(self, links: Callable[[], Iterable[WorkerLink]]) -> None:
        self._links = links

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # names depend on what workers report

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        labels = ["worker", "role"]
        gauges = {
            names.WORKER_IN_FLIGHT: GaugeMetricFamily(names.WORKER_IN_FLIGHT, "Requests at the worker.", labels=labels),
            names.WORKER_QUEUED: GaugeMetricFamily(names.WORKER_QUEUED, "Requests that wait.", labels=labels),
            names.WORKER_RUNNING: GaugeMetricFamily(names.WORKER_RUNNING, "Requests in the batch.", labels=labels),
            names.WORKER_QUEUED_TOKENS: GaugeMetricFamily(names.WORKER_QUEUED_TOKENS, "Tokens ahead.", labels=labels),
        }
        up = GaugeMetricFamily(names.WORKER_UP, "Whether the router is connected to the worker.", labels=["worker"])
        blocks = GaugeMetricFamily(names.KV_BLOCKS, "KV blocks by state.", labels=[*labels, "group", "state"])
        receiving = GaugeMetricFamily(names.KV_RECEIVING, "Transfers open in the receiver.", labels=labels)
        counters = _CounterFamilies()
        for link in self._links():
            facts, load = link.facts, link.load
            up.add_metric([link.worker], float(facts is not None))
            if facts is None:
                continue
            here = [facts.worker, facts.role.value]
            values = (load.in_flight, load.queued_requests, load.running_requests, load.queued_tokens)
            for family, value in zip(gauges.values(), values, strict=True):
                family.add_metric(here, value)
            _add_blocks(blocks, here, load)
            for key, count in load.counters.items():
                if key == _OPEN:
                    receiving.add_metric(here, count)
                else:
                    counters.add(key, count, worker=facts.worker, role=facts.role.value)
        yield up
        yield from gauges.values()
        yield blocks
        yield receiving
        yield from counters.families()


class _BreakerCollector(Collector):
    """The breaker of every connected worker."""

    def __init__(self, links: Callable[[], Iterable[WorkerLink]], survival: Survival) -> None:
        self._links, self._survival = links, survival

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(names.BREAKER, "0 closed, 1 half-open, 2 open.", labels=["worker"])
        for link in self._links():
            state = self._survival.breakers.state((link.worker, link.where.incarnation))
            family.add_metric([link.worker], float(state))
        yield family


class _CounterFamilies:
    """Counters that arrive as keys; all samples of a name share one set of labels."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}

    def add(self, key: str, value: float, **labels: str) -> None:
        if key in _ALIASES:
            name, own = _ALIASES[key]
        elif key.startswith(_DROPPED):
            name, own = names.KV_FRAMES_DROPPED, {"reason": key.removeprefix(_DROPPED)}
        else:
            name, own = names.parse_counter_key(key)
        name = name if name.endswith("_total") else f"{name}_total"
        self._samples.setdefault(name, []).append(({**labels, **own}, value))

    def families(self) -> Iterator[CounterMetricFamily]:
        for name, samples in sorted(self._samples.items()):
            labels = sorted({label for own, _ in samples for label in own})
            family = CounterMetricFamily(name, "Reported by workers.", labels=labels)
            for own, value in samples:
                family.add_metric([own.get(label, "") for label in labels], value)
            yield family


def _add_blocks(family: GaugeMetricFamily, labels: list[str], load: Load) -> None:
    for count in load.blocks:
        states = ("free", "cached", "request", "pushing", "reserved")
        for state in states:
            family.add_metric([*labels, str(count.group), state], getattr(count, state))


def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, buckets=_LATENCY_S, registry=registry)
