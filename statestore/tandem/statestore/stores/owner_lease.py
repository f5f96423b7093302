"""One owner among all routers: a key that expires, renewed by its holder and taken by no other meanwhile."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from tandem.core.ids import Incarnation
from tandem.statestore.connection import raising_unavailable
from tandem.statestore.when_full import EMPTY_FIRST

_HOLD = f"""
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
if holder then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
else
  {EMPTY_FIRST}
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class OwnerLease:
    """A lease of `lease_s` seconds on `key`. Calls raise UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, key: str, lease_s: float) -> None:
        self.key, self.lease_s = key, lease_s
        self._hold: Any = redis.register_script(_HOLD)
        self._release: Any = redis.register_script(_RELEASE)

    async def hold(self, incarnation: Incarnation) -> bool:
        """Take it if it is free, or renew it; False = another router holds it."""
        with raising_unavailable():
            return bool(await self._hold(keys=[self.key], args=[incarnation, int(self.lease_s * 1000)]))

    async def release(self, incarnation: Incarnation) -> bool:
        """Give it up, so that another router can take it at once; False = it was lost before."""
        with raising_unavailable():
            return bool(await self._release(keys=[self.key], args=[incarnation]))
