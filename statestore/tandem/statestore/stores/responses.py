"""Stored responses in the durable store: one hash each, which expires; a conversation is a chain of them.

A response knows all that came before it (`chain`, oldest first), so that a conversation is read in two round trips
however long it is. Reading it for its next turn renews the expiry of every turn: what is in use stays whole.

A sorted set a tenant has the size of each by when it expires, and a counter their sum: what expired is taken off before
the sum is looked at. Both expire with the last response, so they need no sweep.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

from tandem.statestore.connection import raising_unavailable
from tandem.statestore.keys import Keys

_FIELDS: Final = ("tenant", "body", "items", "turn", "chain")
OVERHEAD_BYTES: Final = 1024
"""Approximate bytes that a response takes in Redis beside its texts."""
_SWEPT: Final = 1000

# Of every script KEYS[1] and KEYS[2] are a tenant's sorted set ("id:bytes" by ms) and counter. Redis refuses a script
# for want of memory at its first write alone, so what takes memory comes first in _SAVE.
_BOOKS: Final = f"""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function bytes_of(member) return tonumber(string.match(member, ':(%d+)$')) end
local function name_of(key, id)
  local bytes = {OVERHEAD_BYTES}
  for _, field in ipairs({{'{"', '".join(_FIELDS)}'}}) do bytes = bytes + redis.call('HSTRLEN', key, field) end
  return id .. ':' .. bytes
end
local function take_off(member)
  if redis.call('ZREM', KEYS[1], member) == 1 then redis.call('DECRBY', KEYS[2], bytes_of(member)) end
end
local function add(member, expires)
  if redis.call('ZADD', KEYS[1], expires, member) == 1 then redis.call('INCRBY', KEYS[2], bytes_of(member)) end
  local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
  for i = 1, 2 do redis.call('PEXPIREAT', KEYS[i], last) end -- together: neither outlives the other
end
local expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. now, 'LIMIT', 0, {_SWEPT})
local function sweep() for _, member in ipairs(expired) do take_off(member) end end
"""
# KEYS[3]: the response. ARGV: id, ms that it is kept, most bytes, then fields and values.
_SAVE: Final = f"""{_BOOKS}
local before = redis.call('EXISTS', KEYS[3]) == 1 and name_of(KEYS[3], ARGV[1])
local bytes = {OVERHEAD_BYTES}
for i = 5, #ARGV, 2 do bytes = bytes + #ARGV[i] end
local sum = tonumber(redis.call('GET', KEYS[2]) or '0') + bytes
for _, member in ipairs(expired) do sum = sum - bytes_of(member) end
if before and redis.call('ZSCORE', KEYS[1], before) then sum = sum - bytes_of(before) end
if sum > tonumber(ARGV[3]) then
  sweep()
  return 0
end
local expires = now + ARGV[2]
redis.call('HSET', KEYS[3], unpack(ARGV, 4))
redis.call('PEXPIREAT', KEYS[3], expires)
sweep()
if before then take_off(before) end
add(name_of(KEYS[3], ARGV[1]), expires)
return 1
"""
# KEYS from the third on: responses of the tenant. ARGV: ms that they are kept, then their ids.
_RENEW: Final = f"""{_BOOKS}
local expires = now + ARGV[1]
for i = 3, #KEYS do
  if redis.call('PEXPIREAT', KEYS[i], expires) == 1 then add(name_of(KEYS[i], ARGV[i - 1]), expires) end
end
"""
# KEYS[3]: the response. ARGV: its id.
_DELETE: Final = f"""{_BOOKS}
local member = redis.call('EXISTS', KEYS[3]) == 1 and name_of(KEYS[3], ARGV[1])
redis.call('DEL', KEYS[3])
if member then take_off(member) end
"""
_KEPT: Final = f"""{_BOOKS}
sweep()
return tonumber(redis.call('GET', KEYS[2]) or '0')
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """`body` is the response object, `items` its own input items, `turn` its messages with the answer: JSON, all three.

    `chain` names the responses that it continues, oldest first.
    """

    id: str
    tenant: str
    body: bytes
    items: bytes
    turn: bytes
    chain: tuple[str, ...] = ()

    @property
    def fields(self) -> dict[str, str | bytes]:
        """Fields in the store's form."""
        chain = json.dumps(self.chain)
        return {"tenant": self.tenant, "body": self.body, "items": self.items, "turn": self.turn, "chain": chain}

    @property
    def size_bytes(self) -> int:
        """Bytes that it counts as."""
        tenant = len(self.tenant) + len(json.dumps(self.chain))
        return OVERHEAD_BYTES + tenant + len(self.body) + len(self.items) + len(self.turn)


class ResponseStore:
    """Reads and writes responses. Every call raises UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys, expiry_s: float, most_bytes: int) -> None:
        """`most_bytes`: limit for all responses of one tenant."""
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._keys, self._expiry_ms, self.most_bytes = keys, int(expiry_s * 1000), most_bytes
        self._save: Any = redis.register_script(_SAVE)
        self._renew: Any = redis.register_script(_RENEW)
        self._delete: Any = redis.register_script(_DELETE)
        self._kept: Any = redis.register_script(_KEPT)

    async def save(self, response: StoredResponse) -> bool:
        """Write it whole; it expires `expiry_s` seconds after it was last written or continued. False, and nothing
        written: its tenant would keep more than `most_bytes`."""
        texts = [text for field in response.fields.items() for text in field]
        names = [*self._books(response.tenant), self._keys.response(response.id)]
        with raising_unavailable():
            return bool(await self._save(keys=names, args=[response.id, self._expiry_ms, self.most_bytes, *texts]))

    async def kept_bytes(self, tenant: str) -> int:
        """Bytes that the stored responses of a tenant count as."""
        with raising_unavailable():
            return int(await self._kept(keys=self._books(tenant), args=[]))

    async def load(self, tenant: str, response: str) -> StoredResponse | None:
        """The response, or None when there is none of that id, it expired, or it is another tenant's."""
        with raising_unavailable():
            values = await self._redis.hmget(self._keys.response(response), _FIELDS)
        if any(value is None for value in values) or values[0] != tenant.encode():
            return None
        _, body, items, turn, chain = values
        return StoredResponse(
            id=response, tenant=tenant, body=body, items=items, turn=turn, chain=tuple(json.loads(chain))
        )

    async def turns(self, tenant: str, responses: Sequence[str]) -> list[bytes | None]:
        """Return the content of each of these responses of a tenant, None for those that are gone; renews the expiry of
        all."""
        if not responses:
            return []
        keys = [self._keys.response(response) for response in responses]
        with raising_unavailable():
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.hget(key, "turn")
                names = [*self._books(tenant), *keys]
                await self._renew(keys=names, args=[self._expiry_ms, *responses], client=pipeline)
                answers: list[Any] = await pipeline.execute()
        return answers[:-1]

    async def delete(self, tenant: str, response: str) -> None:
        """Forget it; responses that continue it can no longer be continued."""
        with raising_unavailable():
            await self._delete(keys=[*self._books(tenant), self._keys.response(response)], args=[response])

    def _books(self, tenant: str) -> list[str]:
        return [self._keys.tenant_responses(tenant), self._keys.tenant_response_bytes(tenant)]
