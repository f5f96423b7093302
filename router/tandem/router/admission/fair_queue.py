"""Requests that wait for their turn, and how fast they leave: fair between tenants, by due time within one.

Pure: times are passed in.

Deficit round robin: tenants take turns; with every turn one gets `quantum` more to spend, and sends what that covers.
Among tenants that always have something waiting, the costs that were sent never differ by more than a quantum and the
largest single cost. No tenant starves: with every round each one can spend a quantum more.

A tenant that has nothing waiting saves what its turns would have brought, up to a bound. Coming back with savings, it
is next: one that sends less than its share has its bursts served at once, not one request a round. Shares differ by the
most that may be saved, and a tenant waits longer for others only until they have spent that besides their turns.

While there is no room for the one in turn, another tenant's may pass it that is due before it, on credit.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Generic, TypeVar


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """One request. `cost`: what it takes, in tokens. `due_s` orders a tenant's own. From `gone_s` on it is too late."""

    tenant: str
    cost: int
    due_s: float
    gone_s: float
    number: int = field(default=0, init=False)
    """Its place among those that are due at the same time."""

    def __lt__(self, other: Waiting) -> bool:
        return (self.due_s, self.number) < (other.due_s, other.number)


W = TypeVar("W", bound=Waiting)
_AWAY = 4096
"""Number of tenants without waiting requests, those that left last, for which spending is remembered."""


@dataclass(slots=True)
class _Line(Generic[W]):
    """One tenant's, in order. `deficit`: what it may still spend, less than a quantum and its first one's cost; below 0
    after turns were spent before they came."""

    waiting: list[W] = field(default_factory=list)
    cost: int = 0
    deficit: int = 0
    has_turn: bool = False


class FairQueue(Generic[W]):
    """At most `limit` requests; beyond, the tenant with the most waiting loses its last one. `credit`: how much a
    tenant may send before its turns come. `savings`: how much it may keep of turns that it did not need, which is also
    what one has that was not seen before."""

    def __init__(self, *, quantum: int, limit: int, credit: int = 0, savings: int = 0) -> None:
        self._quantum, self._limit, self._credit, self._savings = quantum, limit, credit, savings
        self._lines: OrderedDict[str, _Line[W]] = OrderedDict()  # the one in turn comes first
        self._away: OrderedDict[str, float] = OrderedDict()
        """Of those with nothing waiting that have not saved all they may: how much, less `_brought` at that time."""
        self._brought = 0.0
        """The total that turns have brought each tenant so far."""
        self._count = self._numbered = 0
        self._gone_s = math.inf
        """Before this time none of them is too late."""

    def __len__(self) -> int:
        return self._count

    @property
    def cost(self) -> int:
        """Total cost of all that wait."""
        return sum(line.cost for line in self._lines.values())

    def __iter__(self) -> Iterator[W]:
        for line in self._lines.values():
            yield from line.waiting

    def add(self, one: W) -> W | None:
        """Let it wait. Returns the one that has to go for it, which may be itself."""
        line = self._lines.get(one.tenant) or self._come(one)
        self._numbered += 1
        one.number = self._numbered
        insort(line.waiting, one)
        line.cost += one.cost
        self._gone_s = min(self._gone_s, one.gone_s)
        self._count += 1
        if self._count <= self._limit:
            return None
        longest = max(self._lines.values(), key=lambda each: each.cost)
        last = longest.waiting[-1]
        self.remove(last)
        return last

    def remove(self, one: W) -> bool:
        """It waits no more; False if it did not."""
        line = self._lines.get(one.tenant)
        at = bisect_left(line.waiting, one) if line is not None else 0
        if line is None or at == len(line.waiting) or line.waiting[at] is not one:
            return False
        del line.waiting[at]
        line.cost -= one.cost
        self._count -= 1
        if not line.waiting:
            del self._lines[one.tenant]
            self._go(one.tenant, line.deficit)
        return True

    def forget(self) -> None:
        """Treat tenants with nothing waiting as new: no request has waited for so long that what they sent costs others
        nothing now."""
        self._away.clear()

    def first(self) -> W | None:
        """The one in turn; the same one until it is taken or gone, its tenant has one that is due before it, or a
        tenant comes back with savings."""
        while self._lines:
            for _ in range(len(self._lines)):
                tenant, line = next(iter(self._lines.items()))
                if not line.has_turn:
                    line.has_turn = True
                    line.deficit += self._quantum
                    self._brought += self._quantum / len(self._lines)
                if line.waiting[0].cost <= line.deficit:
                    return line.waiting[0]
                line.has_turn = False
                self._lines.move_to_end(tenant)
            self._skip_rounds()
        return None

    def passing(self, limit: int) -> list[W]:
        """Those that may go before `first` if there is no room for that: at most `limit`, by due time."""
        first = self.first()
        if first is None:
            return []
        heads = (
            line.waiting[0]
            for line in self._lines.values()
            if line.waiting[0] < first and line.waiting[0].cost <= line.deficit + self._credit
        )
        return nsmallest(limit, heads)

    def take(self, one: W) -> None:
        """`first`, or one of those that may pass it, is sent off."""
        self._lines[one.tenant].deficit -= one.cost
        self.remove(one)

    def expired(self, now_s: float) -> list[W]:
        """Those that need not begin any more; they wait until they are removed."""
        if now_s < self._gone_s:
            return []
        self._gone_s = min((one.gone_s for one in self), default=math.inf)
        return [one for one in self if one.gone_s <= now_s]

    def cost_before(self, tenant: str, due_s: float) -> int:
        """About how much is sent before a new one of `tenant` that is due at `due_s`: its tenant's that are due by
        then, and of each other tenant no more than what turns bring meanwhile and what it has to spend."""
        line = self._lines.get(tenant)
        own = 0
        if line is not None:  # a new one is nearly always due last
            is_last = line.waiting[-1].due_s <= due_s
            own = line.cost if is_last else sum(one.cost for one in line.waiting if one.due_s <= due_s)
        saved = line.deficit if line is not None else self._saved(tenant)
        share = max(0, own - saved) + self._quantum
        others = (each for name, each in self._lines.items() if name != tenant)
        return own + sum(min(each.cost, max(0, share + each.deficit)) for each in others)

    def check(self) -> None:
        """Raises RuntimeError when the books are wrong; for tests."""
        for tenant, line in self._lines.items():
            right = line.waiting == sorted(line.waiting) and all(one.tenant == tenant for one in line.waiting)
            right &= bool(line.waiting) and line.deficit >= -self._credit and tenant not in self._away
            if not right or line.cost != sum(one.cost for one in line.waiting):
                raise RuntimeError(f"the line of {tenant} is wrong")
        if self._count != sum(len(line.waiting) for line in self._lines.values()) or self._count > self._limit:
            raise RuntimeError("the count is wrong")

    def _come(self, one: W) -> _Line[W]:
        """A line for the first that waits of its tenant: next of all if what was saved covers it."""
        line = self._lines[one.tenant] = _Line(deficit=self._saved(one.tenant))
        self._away.pop(one.tenant, None)
        if line.deficit >= one.cost:
            line.has_turn = True
            self._lines.move_to_end(one.tenant, last=False)
        return line

    def _go(self, tenant: str, deficit: int) -> None:
        """Nothing of it waits any more; it keeps what it has to spend, and what it owes."""
        self._away[tenant] = deficit - self._brought
        if len(self._away) > _AWAY:
            self._away.popitem(last=False)

    def _saved(self, tenant: str) -> int:
        kept = self._away.get(tenant)
        return self._savings if kept is None else min(self._savings, int(kept + self._brought))

    def _skip_rounds(self) -> None:
        """Give each tenant at once what the rounds bring in which none could send anything."""
        missing = min(line.waiting[0].cost - line.deficit for line in self._lines.values())
        rounds = -(-missing // self._quantum) - 1
        for line in self._lines.values():
            line.deficit += max(0, rounds) * self._quantum
        self._brought += max(0, rounds) * self._quantum


MEMORY_S = 5.0
"""Older measurements count ever less, and nothing after so long a time without a waiting request."""
KNOWN_AFTER_S, KNOWN_AFTER_SENT = 0.5, 8
"""Waiting and departures that have to be seen before the rate is believed: one small request that left a cluster that
has just started is no evidence for the next hundred."""
UNKNOWN_AT_MOST_S = MEMORY_S / 2
"""Waiting that is remembered, after which a queue that fewer have left is as slow as it seems."""


class DrainRate:
    """Cost that leaves a queue for the workers in a second, over the time in which anything waited."""

    def __init__(self) -> None:
        self._cost = self._time_s = self._sent = 0.0
        self._since_s: float | None = None
        self._idle_from_s = -math.inf

    def idle_s(self, now_s: float) -> float:
        """Return for how long no request has waited."""
        return 0.0 if self._since_s is not None else now_s - self._idle_from_s

    def watch(self, now_s: float, *, is_busy: bool) -> None:
        """From now on requests wait, or none does: then time passes uncounted."""
        if self._since_s is not None:
            passed_s = max(0.0, now_s - self._since_s)
            kept = math.exp(-passed_s / MEMORY_S)
            self._cost *= kept
            self._sent *= kept
            self._time_s = self._time_s * kept + MEMORY_S * (1 - kept)
        elif is_busy and self.idle_s(now_s) > MEMORY_S:
            self._cost = self._time_s = self._sent = 0.0
        if self._since_s is not None and not is_busy:
            self._idle_from_s = now_s
        self._since_s = now_s if is_busy else None

    def sent(self, cost: float) -> None:
        """A request left the queue, which cost so much."""
        self._cost += cost
        self._sent += 1.0

    @property
    def per_s(self) -> float | None:
        """None = not known yet."""
        is_known = self._time_s >= KNOWN_AFTER_S and self._sent >= KNOWN_AFTER_SENT
        return self._cost / self._time_s if self._cost > 0 and (is_known or self._time_s >= UNKNOWN_AT_MOST_S) else None
