"""Passes link measurements on: from the rank to Redis, and Redis' rows about this host to the rank."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from tandem.core.errors import UnavailableError
from tandem.core.link_speed import LinkSpeed
from tandem.core.logs import event
from tandem.core.proto_mapping import from_proto, to_proto
from tandem.rpc.v1 import engine_pb2 as e
from tandem.statestore.connection import Backoff
from tandem.statestore.stores.link_speeds import LinkSpeedStore

_log = logging.getLogger(__name__)
MAX_ROWS = 1000
"""Rows in one message to the rank, which has to fit the ring between them."""
MAX_WAITING = 1000
"""Measurements that wait during an outage of Redis; the oldest are dropped, and then known to this worker alone."""


class LinkShare:
    """Without Redis the rank measures the links it needs by itself."""

    def __init__(self, host: str, to_rank: Callable[[e.HostToRank], None]) -> None:
        self._host, self._to_rank = host, to_rank
        self._waiting: deque[tuple[LinkSpeed, float]] = deque(maxlen=MAX_WAITING)
        self._news = asyncio.Event()
        self._told: dict[tuple[str, str, str, str], LinkSpeed] = {}

    def measured(self, message: e.LinkMeasured) -> None:
        """Take in a new measurement of the rank."""
        now_s = asyncio.get_running_loop().time()
        self._waiting.append((from_proto(LinkSpeed, message), now_s - message.age_s))
        self._news.set()

    async def run(self, store: LinkSpeedStore) -> None:
        """Run until cancelled; outages are waited out."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(store.watch(self._tell))
            tasks.create_task(self._write(store))

    async def _write(self, store: LinkSpeedStore) -> None:
        backoff = Backoff()
        while True:
            await self._news.wait()
            self._news.clear()
            taken = list(self._waiting)
            self._waiting.clear()
            now_s = asyncio.get_running_loop().time()
            try:
                await store.write([_aged(speed, now_s - at_s) for speed, at_s in taken])
            except UnavailableError as error:
                event(_log, "link speeds not shared", logging.WARNING, error=error)
                newer = list(self._waiting)
                self._waiting.clear()
                self._waiting.extend([*taken, *newer])
                self._news.set()
                await backoff.pause()
            else:
                backoff.reset()

    def _tell(self, rows: list[LinkSpeed]) -> None:
        """Send the rank new rows of this host's links."""
        mine = {(*row.route, row.peer if row.failure else ""): row for row in rows if row.from_host == self._host}
        new = [row for key, row in mine.items() if key not in self._told or _is_newer(row, self._told[key])]
        self._told = mine
        for rows in (new[at : at + MAX_ROWS] for at in range(0, len(new), MAX_ROWS)):
            self._to_rank(e.HostToRank(link_speeds=e.LinkSpeeds(rows=[to_proto(e.LinkMeasured, row) for row in rows])))


def _aged(speed: LinkSpeed, age_s: float) -> LinkSpeed:
    return replace(speed, age_s=max(0.0, age_s))


def _is_newer(row: LinkSpeed, told: LinkSpeed) -> bool:
    """True for another measurement, not the same one grown older."""
    return row.age_s < told.age_s or replace(row, age_s=0.0) != replace(told, age_s=0.0)
