"""The type of a metric: a name with kind, labels, source and meaning. They are listed in metric_names."""

from __future__ import annotations

from enum import StrEnum


class MetricKind(StrEnum):
    """As Prometheus has it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricSource(StrEnum):
    """Source of a metric; the values are the headings of the page."""

    REQUESTS = "Requests, as routers see them"
    ROUTER = "Routers"
    INDEX = "The prefix index"
    CLUSTER = "The cluster"
    WORKER = "Workers"
    TRANSFER = "KV between workers"
    VLLM = "Under the names of vLLM"


class Metric(str):
    """The name of a metric, all that most code needs of it, with its further properties."""

    source: MetricSource
    kind: MetricKind
    text: str
    labels: tuple[str, ...]

    def __new__(cls, source: MetricSource, kind: MetricKind, name: str, text: str, *labels: str) -> Metric:
        metric = super().__new__(cls, name)
        metric.source, metric.kind, metric.text, metric.labels = source, kind, text, labels
        return metric
