"""Schedules open batches: tenants take turns, whatever one of them left here. Pure: times are passed in.

Of several tenants that wait each gets the next place in turn (deficit round robin, as requests of clients). A tenant's
own batches run oldest first; those on which something broke rest, and come after the others.

A run goes on until its batch is over, unless a tenant with fewer places waits: then it ends after a turn.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.router.admission.fair_queue import FairQueue, Waiting

TURN_S = 60.0
REST_S = 2.0
LONGEST_REST_S = 300.0
"""A batch rests twice as long with every trouble in a row; outages of Redis do not add up."""
_AFTER_OTHERS_S = 1e12


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch's data for its turn. `created_s`: seconds since 1970."""

    tenant: str
    created_s: int


@dataclass(slots=True, kw_only=True, eq=False)
class _OpenBatch(Waiting):
    batch: str


@dataclass(slots=True)
class _Trouble:
    """`times` in a row, the last one at `at_s`; it is tried again from `until_s` on."""

    times: int
    at_s: float
    until_s: float


class Turns:
    """At most `places` batches run; one that was ordered to leave counts no more."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._queue: FairQueue[_OpenBatch] = FairQueue(quantum=1, limit=sys.maxsize)
        self._waiting: dict[str, _OpenBatch] = {}
        self._running: dict[str, tuple[str, float]] = {}
        """Tenant, and since when."""
        self._leaving: set[str] = set()
        self._trouble: dict[str, _Trouble] = {}

    def begin(self, opened: Mapping[str, OpenBatch], now_s: float) -> list[str]:
        """Choose the batches to run from now on. `opened`: every batch that is open, by id."""
        for batch in self._waiting.keys() - opened.keys():
            self._queue.remove(self._waiting.pop(batch))
        self._trouble = {batch: trouble for batch, trouble in self._trouble.items() if batch in opened}
        for batch, one in opened.items():
            trouble = self._trouble.get(batch)
            if not self._is_busy(batch) and (trouble is None or now_s >= trouble.until_s):
                due_s = one.created_s if trouble is None else _AFTER_OTHERS_S + trouble.at_s
                waiting = _OpenBatch(tenant=one.tenant, cost=1, due_s=due_s, gone_s=math.inf, batch=batch)
                self._waiting[batch] = waiting
                self._queue.add(waiting)
        begun = []
        while len(self._running) < self._places and (first := self._queue.first()) is not None:
            self._queue.take(first)
            del self._waiting[first.batch]
            self._running[first.batch] = (first.tenant, now_s)
            begun.append(first.batch)
        return begun

    def leave(self, now_s: float) -> list[str]:
        """Choose the runs to end, as others have fewer places and wait: the longest turns of the tenant with most
        places."""
        before = Counter(tenant for tenant, _ in self._running.values())
        held = before.copy()
        over = [batch for batch, (_, since_s) in self._running.items() if now_s - since_s >= TURN_S]
        left = []
        for tenant in dict.fromkeys(one.tenant for one in self._waiting.values()):
            over.sort(key=lambda batch: (-held[self._running[batch][0]], self._running[batch][1]))
            if not over or held[self._running[over[0]][0]] <= before[tenant]:
                continue
            batch = over.pop(0)
            held[self._running.pop(batch)[0]] -= 1
            self._leaving.add(batch)
            left.append(batch)
        return left

    def ended(self, batch: str) -> None:
        """It left, or is over."""
        self._end(batch)
        self._trouble.pop(batch, None)

    def cut_off(self, batch: str, now_s: float) -> None:
        """An outage ended it."""
        self._rest(batch, now_s, REST_S, 0)

    def failed(self, batch: str, now_s: float) -> float:
        """Something else did; returns for how many seconds it rests."""
        before = self._trouble.get(batch)
        times = before.times if before is not None else 0
        rest_s = min(LONGEST_REST_S, REST_S * 2.0 ** min(times, 10))
        self._rest(batch, now_s, rest_s, 1)
        return rest_s

    def _rest(self, batch: str, now_s: float, rest_s: float, times: int) -> None:
        self._end(batch)
        before = self._trouble.get(batch)
        times += before.times if before is not None else 0
        self._trouble[batch] = _Trouble(times, now_s, now_s + rest_s)

    def _end(self, batch: str) -> None:
        self._running.pop(batch, None)
        self._leaving.discard(batch)

    def _is_busy(self, batch: str) -> bool:
        return batch in self._waiting or batch in self._running or batch in self._leaving
