"""The router's own measurements as Prometheus metrics, and the registry that all others join. No globals."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from tandem.core import metric_names as names
from tandem.core.metric_names import Metric, MetricKind
from tandem.core.output_format_names import ToolFormatName
from tandem.router.dispatch.migration import CAUSE as MOVED
from tandem.router.dispatch.retry_policy import Cause, RetryPolicy
from tandem.router.metrics.vllm import VllmCollector
from tandem.router.metrics.workers import WorkerCollector
from tandem.router.routing.plan import Plan
from tandem.router.workers.connection import WorkerLink
from tandem.statestore.memory import RedisMemory

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_HANDOFF_S = (
    0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.0045, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01,
    0.0125, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0,
)  # fmt: skip


_SHORT = frozenset({names.HANDOFF_OVERHEAD, names.TRANSFER})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Metrics of requests for one model, by their constants in metric_names. Histograms are in seconds, counters in
    tokens."""

    ttft: Histogram
    first_content: Histogram
    predicted_ttft: Histogram
    ttft_error: Histogram
    second_token: Histogram
    itl: Histogram
    e2e: Histogram
    queue: Histogram
    prefill: Histogram
    transfer: Histogram
    decode: Histogram
    handoff_overhead: Histogram
    prompt_tokens: Counter
    generated_tokens: Counter
    cached_tokens: Counter


_OF_REQUESTS: dict[str, Metric] = {one.name: getattr(names, one.name.upper()) for one in fields(RequestMetrics)}


class Metrics:
    """`links` gives the workers to report on at each scrape; `in_flight` the number of requests in this router."""

    def __init__(self, links: Callable[[], Iterable[WorkerLink]], in_flight: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._links = links
        self._models: dict[str, RequestMetrics] = {}
        self._of_requests = {metric: self._measuring(metric) for metric in _OF_REQUESTS.values()}
        self._requests = self._counter(names.REQUESTS)
        self._predicted = self._counter(names.PREFIX_PREDICTED)
        self._found = self._counter(names.PREFIX_ACTUAL)
        self._mismatches = self._counter(names.PREFIX_MISMATCHES)
        self._recomputed = self._counter(names.RECOMPUTED_TOKENS)
        self._dropped = self._counter(names.DROPPED_CHUNKS)
        self._plans = self._counter(names.PLANS)
        self._admission_wait = self._histogram(names.ADMISSION_WAIT)
        self.refusals: dict[str, int] = {}
        """Requests that were rejected with Retry-After, by reason."""
        self._not_admitted = self._counter(names.ADMISSION_REFUSED)
        self._slo = self._counter(names.SLO_REQUESTS)
        self._again = self._counter(names.REATTEMPTS)
        self._given_up = self._counter(names.GIVEN_UP)
        self._unread_calls = self._counter(names.UNREAD_CALLS)
        self._gauge(names.ROUTER_IN_FLIGHT, in_flight)
        self._registry.register(WorkerCollector(links))
        self._registry.register(VllmCollector(links, self._of_requests))
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Alerts ask how much these grew: that begins with a sample before anything happened."""
        for cause in (*Cause, MOVED):
            self._again.labels(cause)
            self._recomputed.labels(cause)
        for reason in ("attempts", "budget", "no_worker"):
            self._given_up.labels(reason)
        for form in ToolFormatName:
            if form not in (ToolFormatName.AUTO, ToolFormatName.NONE):
                self._unread_calls.labels(form)
        for reason in ("full", "late", "deadline", "budget"):
            self._not_admitted.labels(reason)
        for reason in ("attempt", "choice", "duplicate", "unknown", "unwanted"):
            self._dropped.labels(reason)
        for basis, found in itertools.product(("index", "speculation"), ("less", "more")):
            self._mismatches.labels(basis, found)

    def of(self, model: str) -> RequestMetrics:
        """Return the metrics of requests for a model of this router."""
        found = self._models.get(model)
        if found is None:
            own: dict[str, Any] = {name: self._of_requests[one].labels(model) for name, one in _OF_REQUESTS.items()}
            found = self._models[model] = RequestMetrics(**own)
        return found

    def calls_unread(self, form: str, count: int) -> None:
        """Count tool calls that could not be read."""
        self._unread_calls.labels(form).inc(count)

    def watch_batches(self, running: Callable[[], int]) -> None:
        """Report how many requests of batches run here."""
        self._gauge(names.BATCH_RUNNING, running)

    def watch_redis(self, memory: Callable[[], RedisMemory]) -> None:
        """Report how full Redis is."""
        metric = names.REDIS_MEMORY
        gauge = Gauge(metric, metric.text, metric.labels, registry=self._registry)
        gauge.labels("used").set_function(lambda: memory().used)
        gauge.labels("max").set_function(lambda: memory().most)

    def watch_admission(self, waiting: Callable[[], int]) -> None:
        """Report how many requests wait for room or to be read."""
        self._gauge(names.ADMISSION_WAITING, waiting)

    def waited(self, seconds: float) -> None:
        """A request has waited until there was room."""
        self._admission_wait.observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a request that was rejected with Retry-After."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        self._not_admitted.labels(reason).inc()

    def slo(self, slo: str, outcome: str) -> None:
        """Count an answer: "met", "missed", "failed" or "cancelled"."""
        self._slo.labels(slo, outcome).inc()

    def add(self, collector: Collector) -> None:
        """Register another collector."""
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

    def recomputed(self, cause: str, tokens: int) -> None:
        """An attempt computed tokens that the one before, which ended by this cause, had computed."""
        self._recomputed.labels(cause).inc(tokens)

    def attempted_again(self, cause: str) -> None:
        self._again.labels(cause).inc()

    def gave_up(self, reason: str) -> None:
        self._given_up.labels(reason).inc()

    def watch(self, retry_policy: RetryPolicy, waiting: Callable[[], int]) -> None:
        """Report on what decides about re-attempts, and how many requests wait for one."""
        self._gauge(names.RETRY_BUDGET, lambda: retry_policy.budget.tokens)
        self._gauge(names.WAITING, waiting)
        self._registry.register(_BreakerCollector(self._links, retry_policy))

    def dropped(self, reason: str) -> None:
        self._dropped.labels(reason).inc()

    def samples(self) -> Iterator[Sample]:
        """Samples about requests; none about workers, which are many."""
        wanted = (names.TTFT, names.ITL, names.PROMPT_TOKENS, names.CACHED_TOKENS, names.GENERATED_TOKENS)
        of_requests = [self._of_requests[name] for name in wanted]
        for metric in (*of_requests, self._predicted, self._found, self._slo, self._requests):
            for family in metric.collect():
                yield from family.samples

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _measuring(self, metric: Metric) -> Counter | Histogram:
        if metric.kind is MetricKind.COUNTER:
            return self._counter(metric)
        return self._histogram(metric, _HANDOFF_S if metric in _SHORT else _LATENCY_S)

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric, metric.text, metric.labels, registry=self._registry)

    def _histogram(self, metric: Metric, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
        return _LoopHistogram(metric, metric.text, metric.labels, buckets=buckets, registry=self._registry)

    def _gauge(self, metric: Metric, value: Callable[[], float]) -> None:
        Gauge(metric, metric.text, registry=self._registry).set_function(value)


class _LoopHistogram(Histogram):
    """Observed by the event loop alone: numbers, where the library takes a lock for each and looks at all bounds."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._counts, self._total = [0] * len(self._upper_bounds), 0.0

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._counts[bisect_left(self._upper_bounds, amount)] += 1
        self._total += amount

    def _child_samples(self) -> Iterable[Sample]:
        for value, count in zip(self._buckets, self._counts, strict=True):
            value.set(count)
        self._sum.set(self._total)
        return super()._child_samples()


class _BreakerCollector(Collector):
    """The breaker of every connected worker."""

    def __init__(self, links: Callable[[], Iterable[WorkerLink]], retry_policy: RetryPolicy) -> None:
        self._links, self._retry_policy = links, retry_policy

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(names.BREAKER, names.BREAKER.text, labels=names.BREAKER.labels)
        for link in self._links():
            state = self._retry_policy.breakers.state((link.worker, link.where.incarnation))
            family.add_metric([link.worker], float(state))
        yield family
