"""Metrics of the cluster as a whole, for Prometheus: its events, how many workers are wanted, the price of tokens, the
replica of the index. Looks at the stores every few seconds, and is read when it is asked for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.core import metric_names as names
from tandem.core.clock import Clock
from tandem.core.config import PriceSection
from tandem.core.desired import DesiredState
from tandem.core.errors import TandemError
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.ids import WorkerId
from tandem.core.logs import event
from tandem.core.metric_names import Metric
from tandem.core.state_enums import RoleName
from tandem.router.workers.connection import WorkerLink
from tandem.statestore.index.replica import IndexReplica

_log = logging.getLogger(__name__)
EVERY_S: Final = 5.0
_AT_ONCE: Final = 500
_PART: Final = re.compile(r"([0-9]+)([PDM])")
_ROLES: Final = {"P": RoleName.PREFILL, "D": RoleName.DECODE, "M": RoleName.MIXED}
WINDOW_S: Final = 60.0
_HOUR_S: Final = 3600.0
_IDLE: Final = {RoleName.PREFILL: 1.0, RoleName.DECODE: 0.0, RoleName.MIXED: 0.5}
"""Share of idle time that counts as prefill, by role."""
PHASES: Final = ("prefill", "decode")


class Events(Protocol):
    """Store of the cluster's events."""

    async def last(self, count: int) -> list[tuple[str, ClusterEvent]]: ...
    async def after(self, place: str, count: int) -> list[tuple[str, ClusterEvent]]: ...


class DesiredSource(Protocol):
    """Store of the desired state."""

    async def load(self) -> DesiredState | None: ...


class Planning(Protocol):
    """Store of the planner's last report."""

    async def word(self) -> dict[str, Any] | None: ...


class ClusterWatch(Collector):
    """A store that is None gives nothing. Events count from when this router began to look."""

    def __init__(
        self,
        links: Callable[[], Iterable[WorkerLink]],
        clock: Clock,
        price: PriceSection,
        *,
        events: Events | None = None,
        desired: DesiredSource | None = None,
        planning: Planning | None = None,
    ) -> None:
        self._links, self._clock, self._price = links, clock, price
        self._events, self._desired, self._planning = events, desired, planning
        self._place = ""
        self._happened: Counter[EventKind] = Counter()
        self._wanted: Mapping[RoleName, int] = {}
        self._advised: Mapping[RoleName, int] = {}
        self._cost = CostMeter()

    async def run(self) -> None:
        """Look every EVERY_S, until cancelled. What does not answer, or cannot be read, is as it was."""
        while True:
            try:
                await self.look()
            except Exception:  # noqa: BLE001 - a supervisor: no answer depends on it, and it looks again
                _log.exception("the cluster was not looked at")
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Look once."""
        self._cost.look(self._counts(), self._clock.now_s())
        try:
            await self._follow()
            state = await self._desired.load() if self._desired is not None else None
            self._wanted = _counts_of(state) if state is not None and not state.is_stopped else {}
            word = await self._planning.word() if self._planning is not None else None
            self._advised = split_of(str((word or {}).get("wanted", "")))
        except TandemError as error:
            event(_log, "cluster not looked at", logging.WARNING, why=error.message)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        happened = CounterMetricFamily(
            names.CLUSTER_EVENTS, names.CLUSTER_EVENTS.text, labels=names.CLUSTER_EVENTS.labels
        )
        for kind in EventKind:
            happened.add_metric([kind.value], self._happened[kind])
        yield happened
        yield _gauge(names.DESIRED_WORKERS, ((role.value, count) for role, count in self._wanted.items()))
        yield _gauge(names.PLANNED_WORKERS, ((role.value, count) for role, count in self._advised.items()))
        yield _gauge(names.COST, self._cost.per_million().items())

    async def _follow(self) -> None:
        """Count what happened since the last look; what happened before the first one is not counted."""
        if self._events is None:
            return
        if not self._place:
            latest = await self._events.last(1)
            self._place = latest[-1][0] if latest else "0"
            return
        while found := await self._events.after(self._place, _AT_ONCE):
            self._happened.update(one.kind for _, one in found)
            self._place = found[-1][0]

    def _counts(self) -> dict[WorkerId, WorkerCounts]:
        return {link.worker: _counts_at(link, self._price) for link in self._links() if link.facts is not None}


def split_of(text: str) -> dict[RoleName, int]:
    """Workers by role of what the planner writes, such as "5P:3D"; nothing of anything else."""
    return {_ROLES[role]: int(count) for count, role in _PART.findall(text)}


def _counts_of(state: DesiredState) -> dict[RoleName, int]:
    counts = Counter[RoleName]()
    for pool in state.pools:
        counts[pool.role] += pool.count
    return dict(counts)


def _counts_at(link: WorkerLink, price: PriceSection) -> WorkerCounts:
    assert link.facts is not None
    counters = link.load.counters
    return WorkerCounts(
        role=link.facts.role,
        price_per_h=link.facts.tp * float(getattr(price, link.facts.role.value)),
        step_s=counters.get("step_seconds", 0.0),
        prefill_step_s=counters.get("prefill_step_seconds", 0.0),
        prefill_tokens=counters.get("prefill_tokens", 0.0),
        decode_tokens=counters.get("decode_tokens", 0.0),
    )


def _gauge(metric: Metric, samples: Iterable[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric, metric.text, labels=metric.labels)
    for label, value in samples:
        family.add_metric([label], value)
    return family


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """Totals of a worker at one moment, and its price an hour. In seconds and tokens since it began."""

    role: RoleName
    price_per_h: float
    step_s: float
    prefill_step_s: float
    prefill_tokens: float
    decode_tokens: float


class CostMeter:
    """Costs of a million tokens of each phase over the last WINDOW_S. `look` at the workers now and then.

    A worker's price is split by the time of its steps: those that computed prompt tokens are prefill, also where others
    decoded beside them. Idle time counts for the phase of its role.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Mapping[WorkerId, WorkerCounts]]] = deque()

    def look(self, workers: Mapping[WorkerId, WorkerCounts], now_s: float) -> None:
        """These are connected now; prices hold for the time since the last look."""
        self._looks.append((now_s, workers))
        while len(self._looks) > 2 and self._looks[1][0] <= now_s - WINDOW_S:
            self._looks.popleft()

    def per_million(self) -> dict[str, float]:
        """Price of a million tokens by phase, in the unit of the prices; without a phase of which there were no tokens,
        or that has no price."""
        spent, tokens = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        for (before_s, before), (now_s, now) in itertools.pairwise(self._looks):
            for was, one in _both(before, now):
                share = _prefill_share(was, one)
                price = one.price_per_h * (now_s - before_s) / _HOUR_S
                spent["prefill"] += price * share
                spent["decode"] += price * (1.0 - share)
                tokens["prefill"] += one.prefill_tokens - was.prefill_tokens
                tokens["decode"] += one.decode_tokens - was.decode_tokens
        return {phase: 1e6 * spent[phase] / tokens[phase] for phase in PHASES if tokens[phase] > 0 < spent[phase]}


def _both(
    before: Mapping[WorkerId, WorkerCounts], now: Mapping[WorkerId, WorkerCounts]
) -> Iterable[tuple[WorkerCounts, WorkerCounts]]:
    """Workers that were there all the time, in one incarnation: counters of another one began again."""
    for worker, one in now.items():
        was = before.get(worker)
        if was is not None and was.role is one.role and was.step_s <= one.step_s:
            yield was, one


def _prefill_share(was: WorkerCounts, one: WorkerCounts) -> float:
    stepped_s, prefill_s = one.step_s - was.step_s, one.prefill_step_s - was.prefill_step_s
    return min(1.0, prefill_s / stepped_s) if stepped_s > 0 else _IDLE[one.role]


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
