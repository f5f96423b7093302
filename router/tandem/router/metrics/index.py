"""The state of a router's replica of the index as Prometheus metrics; read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.core import metric_names as names
from tandem.statestore.index.replica import IndexReplica


class IndexCollector(Collector):
    """Reads one replica."""

    def __init__(self, replica: IndexReplica) -> None:
        self._replica = replica

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        replica, counters = self._replica, self._replica.counters
        yield GaugeMetricFamily(names.INDEX_BLOCKS, names.INDEX_BLOCKS.text, replica.entries)
        yield GaugeMetricFamily(names.INDEX_BYTES, names.INDEX_BYTES.text, replica.memory_bytes)
        yield CounterMetricFamily(names.INDEX_EVICTED, names.INDEX_EVICTED.text, value=replica.evicted)
        yield CounterMetricFamily(names.INDEX_ENTRIES, names.INDEX_ENTRIES.text, value=counters.events)
        trouble = CounterMetricFamily(names.INDEX_TROUBLE, names.INDEX_TROUBLE.text, labels=names.INDEX_TROUBLE.labels)
        for kind in ("gaps", "mismatches", "unreadable", "rereads", "outages"):
            trouble.add_metric([kind], getattr(counters, kind))
        yield trouble
