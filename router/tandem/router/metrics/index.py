"""The state of a router's replica of the index as Prometheus metrics; read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.core import metricnames as names
from tandem.prefixindex.replica import IndexReplica


class IndexCollector(Collector):
    """Reads one replica."""

    def __init__(self, replica: IndexReplica) -> None:
        self._replica = replica

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        replica, counters = self._replica, self._replica.counters
        yield GaugeMetricFamily(names.INDEX_BLOCKS, "Blocks in the replica of the index.", replica.entries)
        yield GaugeMetricFamily(names.INDEX_BYTES, "Memory of the replica of the index.", replica.memory_bytes)
        yield CounterMetricFamily(names.INDEX_EVICTED, "Blocks forgotten for want of memory.", value=replica.evicted)
        yield CounterMetricFamily(names.INDEX_ENTRIES, "Entries of workers' streams applied.", value=counters.events)
        trouble = CounterMetricFamily(names.INDEX_TROUBLE, "What went wrong in following.", labels=["kind"])
        for kind in ("gaps", "mismatches", "unreadable", "rereads", "outages"):
            trouble.add_metric([kind], getattr(counters, kind))
        yield trouble
