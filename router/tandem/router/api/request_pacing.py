"""Back-pressure: lets new requests in, one in a few turns of the event loop, so that an overloaded router goes on with
those that it has begun.

A new request takes as much of the loop as a hundred tokens. In a turn of the loop everything that arrived is dealt
with, so the more streams there are, the longer a turn and the fewer requests are let in: as many as there is time for.
Those that wait have cost no more than reading their heads. Tenants take turns. An idle loop turns in microseconds.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tandem.core.errors import CapacityError, TandemError
from tandem.router.admission.fair_queue import FairQueue, Waiting

MAX_WAITING = 1024
"""About six seconds of a router on a slow core. Each holds its connection, and at most 128 KB of its body."""
TURNS = 4
"""From one to the next. A message of a worker takes three to be read; with one, requests came in faster than workers'
messages about those before, until answers lagged by seconds."""
BURST = 4
"""So many are let in at once where none waits, and one more for each EACH_S since."""
EACH_S = 0.005
_RETRY_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Newcomer(Waiting):
    let_in: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RequestPacer:
    """Belongs to one event loop. `limit`: so many wait; beyond, the tenant with most of them loses its last one."""

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._queue: FairQueue[_Newcomer] = FairQueue(quantum=1, limit=limit)
        self._credit, self._credited_s = float(BURST), 0.0
        self._is_counting = False
        """Turns of the loop, until the next one is let in."""

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def turn(self, tenant: str) -> None:
        """Return when a request of `tenant` is let in; CapacityError if too many wait."""
        if not len(self._queue) and self._is_in_credit():
            return
        if not self._is_counting:
            self._is_counting = True
            self._pass(TURNS)
        newcomer = _Newcomer(tenant=tenant, cost=1, due_s=0.0, gone_s=0.0)
        loser = self._queue.add(newcomer)
        if loser is newcomer:
            raise self._full()
        if loser is not None and not loser.let_in.done():
            loser.let_in.set_exception(self._full())
        try:
            await newcomer.let_in
        except asyncio.CancelledError:
            self._queue.remove(newcomer)
            raise

    def _is_in_credit(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        self._credit = min(BURST, self._credit + (now_s - self._credited_s) / EACH_S)
        self._credited_s = now_s
        is_enough = self._credit >= 1
        self._credit -= is_enough
        return is_enough

    def _next(self) -> None:
        first = self._queue.first()
        if first is not None:
            self._queue.take(first)
            if not first.let_in.done():
                first.let_in.set_result(None)
        self._is_counting = len(self._queue) > 0
        if self._is_counting:
            self._pass(TURNS)
        else:
            self._credit, self._credited_s = 0.0, asyncio.get_running_loop().time()

    def _pass(self, turns: int) -> None:
        """Let in the next one so many turns of the loop from now."""
        asyncio.get_running_loop().call_soon(*((self._pass, turns - 1) if turns > 1 else (self._next,)))

    def _full(self) -> TandemError:
        why = f"a router lets {self._limit} wait until it has read them, and this tenant has most"
        return CapacityError("too many requests wait", why=why, todo="send it again later", retry_after_s=_RETRY_S)
