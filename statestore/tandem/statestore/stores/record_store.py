"""Records of one kind that clients leave in the durable store: texts by id, ids by tenant and by when they are due.

The content of a text, and what is behind it, is the business of files and batches. An unreadable one, of another
version or foreign, is logged and left out: it must not block access to the others.

For each, its tenant is charged bytes of the directory for files: a charge is written in the same script as its file or
batch, and given back in the one that forgets it, so sums are exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from tandem.core.batch import BatchRecord, FileRecord
from tandem.core.errors import ConfigError
from tandem.statestore.connection import raising_unavailable

_log = logging.getLogger(__name__)
LEAST_CHARGE_BYTES: Final = 64 * 1024
"""Charge of a file, however short it is: its record takes memory of Redis, too."""
# A hash by id, "bytes tenant", and one by tenant with the sums.
USAGE_LUA: Final = """
local function discharge(charges, sums, id)
  local at = redis.call('HGET', charges, id)
  if not at then return end
  local size, tenant = string.match(at, '^(%d+) (.+)$')
  redis.call('HDEL', charges, id)
  if redis.call('HINCRBY', sums, tenant, -size) <= 0 then redis.call('HDEL', sums, tenant) end
end
local function charge(charges, sums, id, tenant, size)
  discharge(charges, sums, id)
  redis.call('HSET', charges, id, size .. ' ' .. tenant)
  redis.call('HINCRBY', sums, tenant, size)
end
local function used(sums, tenant) return tonumber(redis.call('HGET', sums, tenant) or '0') end
"""
_MAX_TOLD = 4096
# KEYS: records, due, charges, sums, and the tenant's list if that is known. ARGV: id.
_FORGET = f"""{USAGE_LUA}
if KEYS[5] then redis.call('ZREM', KEYS[5], ARGV[1]) end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[1], ARGV[1])
discharge(KEYS[3], KEYS[4], ARGV[1])
"""
R = TypeVar("R", BatchRecord, FileRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStore(Generic[R]):
    """`records`: key of the hash, id → text; `due`: of the set, id → second in which it may be forgotten; `listing`: of
    a tenant's set, id → second of creation; `parse`: decodes a text, ValueError if it cannot be read; `charges`,
    `charged`: the bytes that it counts as, see `charge_of`.

    Calls raise UnavailableError when Redis does not answer.
    """

    redis: Any
    """Its stubs mix plain and awaitable results."""
    records: str
    due: str
    listing: Callable[[str], str]
    parse: Callable[[bytes], R]
    charges: str
    charged: str
    _told: set[str] = field(default_factory=set)
    """Ids with a text that was found unreadable."""

    def read(self, one: str, text: bytes | None) -> R | None:
        """Decode the text stored under that id; None if there is none, or it cannot be read."""
        if text is None:
            return None
        try:
            record = self.parse(text)
            self.listing(record.tenant)  # raises for a name that none of ours has
            return record
        except (ValueError, ConfigError) as error:
            if one not in self._told and len(self._told) < _MAX_TOLD:
                self._told.add(one)
                _log.error("record not readable", extra={"fields": {"id": one, "why": str(error)}})
            return None

    async def load(self, one: str) -> R | None:
        """The record of that id; None if there is none, or it cannot be read."""
        with raising_unavailable():
            text = await self.redis.hget(self.records, one)
        return self.read(one, text)

    async def is_known(self, one: str) -> bool:
        """True if a text is stored under that id, readable or not."""
        with raising_unavailable():
            return bool(await self.redis.hexists(self.records, one))

    async def load_all(self, ids: Sequence[str]) -> list[R]:
        """Their records, in this order, without those that are not there or cannot be read."""
        if not ids:
            return []
        with raising_unavailable():
            texts = await self.redis.hmget(self.records, ids)
        records = [self.read(one, text) for one, text in zip(ids, texts, strict=True)]
        return [record for record in records if record is not None]

    async def due_by(self, now_s: float, limit: int = 100, skip: int = 0) -> Sequence[str]:
        """At most `limit` ids that may be forgotten by now, most overdue first, without the first `skip`."""
        with raising_unavailable():
            ids = await self.redis.zrangebyscore(self.due, "-inf", now_s, start=skip, num=limit)
        return [one.decode() for one in ids]

    async def forget(self, one: str) -> None:
        """Forget the id, and that it was due, in one step; an id that is not there is nothing to forget.

        One with an unreadable text stays in its tenant's list, where an id without a text is passed over.
        """
        record = await self.load(one)
        names = [self.records, self.due, self.charges, self.charged]
        if record is not None:
            names.append(self.listing(record.tenant))
        with raising_unavailable():
            await self.redis.register_script(_FORGET)(keys=names, args=[one])

    async def place_after(self, tenant: str, after: str | None, *, is_ascending: bool) -> int:
        """Start of the page behind `after` in a tenant's list; the list's start if that id is not in it."""
        if after is None:
            return 0
        listing = self.listing(tenant)
        with raising_unavailable():
            rank = await (self.redis.zrank if is_ascending else self.redis.zrevrank)(listing, after)
        return 0 if rank is None else int(rank) + 1


def charge_of(size_bytes: int) -> int:
    """Return the bytes that a file of that size counts as."""
    return max(LEAST_CHARGE_BYTES, size_bytes)
