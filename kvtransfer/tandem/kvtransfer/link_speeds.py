"""Known speeds and failures of the links from this host, measured here or learned from others. No sockets.

A speed belongs to a pair of hosts and a transport, whichever workers measured it. A failure belongs to one receiving
worker too: one unreachable worker implies nothing about its neighbours.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.core.clock import Clock
from tandem.core.link_speed import LinkSpeed, Route

FRESH_S = 600.0
"""Younger measurements are believed; older ones are taken again when a link is made."""
FORGET_S = 3600.0
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 600.0
MARGIN = 1.25
"""A transport that stands later in the order must be faster by this factor: measurements are brief, and so noisy."""
MAX_ROWS = 10_000
SAME_S = 1.0
"""A failure learned from others, this close to a known one, is the same by another clock."""
TURN_S = 2.0
"""Longest wait for a turn: a longer measurement talks to a worker that stands still, and moves no byte meanwhile."""
_TURN_POLL_S = 0.1


@dataclass(slots=True)
class _Row:
    speed: LinkSpeed
    at_s: float
    failures: int = 0


class LinkSpeeds:
    """Thread-safe. Rows added by `note` are news for others too; rows added by `learn` are not."""

    def __init__(self, clock: Clock, *, fresh_s: float = FRESH_S, first_retry_s: float = FIRST_RETRY_S) -> None:
        self._clock, self._fresh_s, self._first_retry_s = clock, fresh_s, first_retry_s
        self._lock = threading.Lock()
        self._speeds: dict[Route, _Row] = {}
        self._failures: dict[tuple[Route, str], _Row] = {}
        self._news: list[tuple[LinkSpeed, float]] = []
        self._turns: dict[tuple[str, str], threading.Lock] = {}

    def note(self, speed: LinkSpeed) -> None:
        """Record a speed just measured here, or a failure."""
        with self._lock:
            now_s = self._clock.now_s()
            self._put(speed, now_s)
            self._forget(now_s)
            self._news.append((speed, now_s))
            del self._news[:-MAX_ROWS]

    def learn(self, rows: Iterable[LinkSpeed]) -> None:
        """Take in rows that others measured `age_s` ago; of two for one route the younger counts."""
        with self._lock:
            now_s = self._clock.now_s()
            for row in rows:
                self._put(row, now_s - row.age_s, same_s=SAME_S)
            self._forget(now_s)

    def take_news(self) -> list[LinkSpeed]:
        """Return the rows noted since the last call."""
        with self._lock:
            news, self._news = self._news, []
            now_s = self._clock.now_s()
        return [replace(speed, age_s=now_s - at_s) for speed, at_s in news]

    def rows(self) -> list[LinkSpeed]:
        """Everything known, with its age."""
        with self._lock:
            now_s = self._clock.now_s()
            every = [*self._speeds.values(), *self._failures.values()]
            return [replace(row.speed, age_s=now_s - row.at_s) for row in every]

    def latest(self, route: Route) -> LinkSpeed | None:
        """The last measurement, however old."""
        with self._lock:
            row = self._speeds.get(route)
            return None if row is None else replace(row.speed, age_s=self._clock.now_s() - row.at_s)

    def fresh(self, route: Route) -> LinkSpeed | None:
        """The last measurement, if it is young enough to be believed."""
        known = self.latest(route)
        return known if known is not None and known.age_s <= self._fresh_s else None

    def failure(self, route: Route, peer: str) -> str:
        """Why this transport to that worker failed when it was last tried; "" if it did not."""
        with self._lock:
            row = self._failures.get((route, peer))
            return "" if row is None else row.speed.failure

    def is_barred(self, route: Route, peer: str) -> bool:
        """True if it failed too recently for another try: pauses double up to LAST_RETRY_S."""
        with self._lock:
            row = self._failures.get((route, peer))
            if row is None:
                return False
            pause_s = min(LAST_RETRY_S, self._first_retry_s * 2.0 ** min(20, row.failures - 1))
            return self._clock.now_s() - row.at_s < pause_s

    def fastest_to(self, peer: str, from_host: str) -> float | None:
        """Bytes a second of the fastest transport to a worker, as measured on `from_host`."""
        with self._lock:
            hosts = {row.speed.to_host for row in self._speeds.values() if row.speed.peer == peer}
            found = [
                row.speed.bytes_per_s
                for (sender, receiver, _), row in self._speeds.items()
                if sender == from_host and receiver in hosts
            ]
        return max(found, default=None)

    @contextlib.contextmanager
    def turn(self, from_host: str, to_host: str, is_wanted: Callable[[], bool]) -> Iterator[bool]:
        """Give one measurement at a time between two hosts its turn, after TURN_S at the latest; yield False if it is
        no longer wanted."""
        with self._lock:
            turn = self._turns.setdefault((from_host, to_host), threading.Lock())
        for _ in range(round(TURN_S / _TURN_POLL_S)):
            if not is_wanted():
                break
            if turn.acquire(timeout=_TURN_POLL_S):
                try:
                    yield is_wanted()
                finally:
                    turn.release()
                return
        yield is_wanted()

    def _put(self, speed: LinkSpeed, at_s: float, same_s: float = 0.0) -> None:
        key = (speed.route, speed.peer)
        failed = self._failures.get(key)
        if speed.failure:
            if failed is None or failed.at_s + same_s < at_s:
                self._failures[key] = _Row(speed, at_s, 1 if failed is None else failed.failures + 1)
            return
        if failed is not None and failed.at_s <= at_s:
            del self._failures[key]
        known = self._speeds.get(speed.route)
        if known is None or known.at_s < at_s:
            self._speeds[speed.route] = _Row(speed, at_s)

    def _forget(self, now_s: float) -> None:
        oldest_s = now_s - FORGET_S
        self._speeds = {key: row for key, row in self._speeds.items() if row.at_s > oldest_s}
        self._failures = {key: row for key, row in self._failures.items() if row.at_s > oldest_s}


def fastest(speeds: Sequence[float]) -> int:
    """Index of the transport to take, given speeds in the default order: the first one near the best."""
    best = 0
    for place, speed in enumerate(speeds):
        if speed > speeds[best] * MARGIN:
            best = place
    return best
