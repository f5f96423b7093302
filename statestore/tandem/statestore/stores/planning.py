"""Input and output of the planner, in Redis: every router's view of the last minutes, and the planner's last decision.

Both are soon old: rows carry the moment of the server's clock at which they were written, so that no common clock is
needed, and expire. Losing them costs the planner a few seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from redis.asyncio import Redis

from tandem.core.demand import Demand, RouterDemand
from tandem.core.ids import RouterId
from tandem.statestore.connection import raising_unavailable
from tandem.statestore.keys import Keys

_log = logging.getLogger(__name__)
STALE_S: Final = 20.0
"""A router without a report for so long is none any more."""
EXPIRE_S: Final = 3600
MAX_ROUTERS: Final = 512
"""Limit on processes of all routers together; reports of further ones are not written."""
MAX_WORD_BYTES: Final = 256 * 1024

# ARGV: router, bound on rows, expiry in seconds, text.
_WRITE = """
local now = redis.call('TIME')
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now[1] * 1000000 + now[2], ARGV[4]))
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""
# ARGV: router, its row, and so on; a row that its router has written anew meanwhile stays.
_FORGET = """
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then redis.call('HDEL', KEYS[1], ARGV[i]) end
end
"""


class PlanningStore:
    """Reads and writes both. All raise UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._demand, self._word = keys.demand, keys.planner
        self._write: Any = redis.register_script(_WRITE)
        self._forget: Any = redis.register_script(_FORGET)

    async def tell(self, router: RouterId, demand: Demand) -> bool:
        """Store the router's report, in place of the one before; False = too many routers report."""
        with raising_unavailable():
            args = [router, MAX_ROUTERS, EXPIRE_S, demand.to_json()]
            return bool(await self._write(keys=[self._demand], args=args))

    async def heard(self) -> list[RouterDemand]:
        """Return every router's report within STALE_S, by name; older ones are forgotten, unreadable ones left out."""
        with raising_unavailable():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.hgetall(self._demand)
                pipeline.time()
                rows, (seconds, micros) = await pipeline.execute()
            now_s = int(seconds) + int(micros) / 1e6
            found = {router: _heard(router, rows[router], now_s) for router in sorted(rows)}
            if old := [part for router, one in found.items() if one is None for part in (router, rows[router])]:
                await self._forget(keys=[self._demand], args=old)
        return [one for one in found.values() if one is not None]

    async def say(self, word: Mapping[str, Any], *, for_s: float) -> None:
        """Store the planner's decision, a JSON object; it holds for so long."""
        with raising_unavailable():
            await self._redis.set(self._word, json.dumps(word, separators=(",", ":")), px=max(1, int(for_s * 1000)))

    async def word(self) -> dict[str, Any] | None:
        """Return the planner's last decision; None = nothing that still holds, or nothing that can be read."""
        with raising_unavailable():
            text = await self._redis.get(self._word)
        try:
            found = json.loads(text) if text is not None and len(text) <= MAX_WORD_BYTES else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


def _heard(router: bytes, value: bytes, now_s: float) -> RouterDemand | None:
    """None if it is old, or cannot be read."""
    try:
        micros, _, text = value.partition(b" ")
        age_s = max(0.0, now_s - int(micros) / 1e6)
        if age_s > STALE_S:
            return None
        return RouterDemand(router=RouterId(router.decode()), age_s=age_s, demand=Demand.from_json(text))
    except ValueError as error:
        _log.warning("what a router saw is not readable", extra={"fields": {"why": str(error)[:200]}})
        return None
