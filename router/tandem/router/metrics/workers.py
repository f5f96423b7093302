"""Workers' last reports, and routers' knowledge of them, as Prometheus metrics; read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.core import metric_names as names
from tandem.core.label_limiter import BoundedLabel
from tandem.core.metric_names import Metric, MetricKind
from tandem.core.state_enums import WorkerState
from tandem.router.workers.connection import WorkerLink
from tandem.router.workers.proto_convert import ReportedLoad, WorkerFacts

Family = CounterMetricFamily | GaugeMetricFamily
_BLOCK_STATES = ("free", "cached", "request", "pushing", "reserved")


class WorkerCollector(Collector):
    """Reads the last load report of every worker when asked."""

    def __init__(self, links: Callable[[], Iterable[WorkerLink]]) -> None:
        self._links = links

    def describe(self) -> list[Family]:
        return []  # names depend on what workers report

    def collect(self) -> Iterator[Family]:
        table = _Table(_ALWAYS)
        for link in self._links():
            facts, own = link.facts, {"worker": link.worker}
            table.add(names.WORKER_UP, own, float(facts is not None))
            table.add(names.WORKER_REGISTERED, own, float(link.is_registered))
            if facts is not None:
                self._add(table, link, facts)
        yield from table.families()

    def _add(self, table: _Table, link: WorkerLink, facts: WorkerFacts) -> None:
        load, own = link.load, {"worker": facts.worker, "role": facts.role.value}
        for state in WorkerState:
            table.add(names.WORKER_STATE, {**own, "state": state.value}, float(link.state is state))
        table.add(names.WORKER_IN_FLIGHT, own, load.in_flight)
        table.add(names.WORKER_QUEUED, own, load.queued_requests)
        table.add(names.WORKER_RUNNING, own, load.running_requests)
        table.add(names.WORKER_QUEUED_TOKENS, own, load.queued_tokens)
        _add_blocks(table, own, load)
        _add_links(table, own, load)
        said: set[Metric] = set()
        for key, count in load.counters.items():
            found = names.reported(key)
            if found is not None:
                metric, labels = found
                table.add(metric, {**labels, **own}, count)
                said.add(metric)
        for metric in _FROM_ZERO:
            if metric not in said:
                table.add(metric, own, 0.0)


class _Table:
    """Samples by metric; `always` are there without any, too."""

    def __init__(self, always: Iterable[Metric]) -> None:
        self._families = {metric: _family(metric) for metric in always}

    def add(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """A sample; `labels` are those of the metric."""
        family = self._families.get(metric)
        if family is None:
            family = self._families[metric] = _family(metric)
        family.add_metric([labels[label] for label in metric.labels], value)

    def families(self) -> Iterator[Family]:
        yield from self._families.values()


_FROM_ZERO = (
    names.HASH_MISMATCHES,
    names.MESSAGES_TOO_LARGE,
    names.PREEMPTIONS,
    names.REQUESTS_FAILED,
    names.STEP_STALLS,
    names.TICKETS_REFUSED,
    names.TRANSFERS_FORGOTTEN,
)
"""Alerts ask how much these grew: that begins with a sample before anything happened."""
_ALWAYS = (
    names.WORKER_UP,
    names.WORKER_REGISTERED,
    names.WORKER_STATE,
    names.WORKER_IN_FLIGHT,
    names.WORKER_QUEUED,
    names.WORKER_RUNNING,
    names.WORKER_QUEUED_TOKENS,
    names.KV_BLOCKS,
    names.KV_RECEIVING,
)


def _family(metric: Metric) -> Family:
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    return kind(metric, metric.text, labels=metric.labels)


def _add_links(table: _Table, own: Mapping[str, str], load: ReportedLoad) -> None:
    """Links between ranks, added up by worker."""
    peers = BoundedLabel()
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for link in load.links:
        if link.transport:  # else it is not open yet
            place = peers.of(link.peer), link.transport
            speed, stalls = found.get(place, (0.0, 0))
            found[place] = speed + link.achieved_bytes_per_s, stalls + link.stalls
    for (peer, transport), (speed, stalls) in found.items():
        labels = {**own, "peer": peer, "transport": transport}
        table.add(names.KV_LINK_SPEED, labels, speed)
        table.add(names.KV_LINK_STALLS, labels, stalls)


def _add_blocks(table: _Table, own: Mapping[str, str], load: ReportedLoad) -> None:
    for count in load.blocks:
        for state in _BLOCK_STATES:
            labels = {**own, "group": str(count.group), "state": state}
            table.add(names.KV_BLOCKS, labels, getattr(count, state))
