"""Batches in the durable store: the writer of a change names the version that it read, and its owner proves its lease.

The end of a batch and the files that it leaves are written in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from redis.asyncio import Redis

from tandem.core.batch import BatchRecord, FileRecord, batch_from_json, to_json
from tandem.core.ids import Incarnation
from tandem.statestore.connection import raising_unavailable
from tandem.statestore.keys import Keys
from tandem.statestore.stores.record_store import USAGE_LUA, RecordStore, charge_of

_AT_ONCE: Final = 100
KEPT_BATCHES: Final = 10_000
"""Limit of a tenant; beyond, the oldest that are over are forgotten before their time."""
_TRIMMED: Final = 16
KEPT_S: Final = 30 * 86_400
"""Time for which a batch that is over is kept."""

# KEYS: batches, open, the tenant's batches, due, owner, files, files due, the tenant's files, the tenant's open
# batches, charges, sums.
# ARGV: id, version that must stand there (0 = none), "version JSON", incarnation of the owner or "", second of
# creation, 1 if it is open, second in which it is forgotten, tenant; then of each file id, JSON, second of creation,
# due or "", bytes.
# A call repeated because its answer got lost finds its own text and succeeds again.
_SAVE = f"""{USAGE_LUA}
local at = redis.call('HGET', KEYS[1], ARGV[1])
if at == ARGV[3] then return 1 end
if ARGV[4] ~= '' and redis.call('GET', KEYS[5]) ~= ARGV[4] then return 2 end
if (at and string.match(at, '^(%d+) ') or '0') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[3], ARGV[5], ARGV[1])
if ARGV[6] == '1' then
  redis.call('ZADD', KEYS[2], ARGV[5], ARGV[1])
  redis.call('ZADD', KEYS[9], ARGV[5], ARGV[1])
else
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('ZREM', KEYS[9], ARGV[1])
  redis.call('ZADD', KEYS[4], ARGV[7], ARGV[1])
  discharge(KEYS[10], KEYS[11], ARGV[1])
end
for i = 9, #ARGV, 5 do
  redis.call('HSET', KEYS[6], ARGV[i], ARGV[i + 1])
  redis.call('ZADD', KEYS[8], ARGV[i + 2], ARGV[i])
  if ARGV[i + 3] ~= '' then redis.call('ZADD', KEYS[7], ARGV[i + 3], ARGV[i]) end
  charge(KEYS[10], KEYS[11], ARGV[i], ARGV[8], ARGV[i + 4])
end
return 1
"""

# KEYS: batches, open, the tenant's batches, due, the tenant's open batches, charges, sums. ARGV: id, "1 JSON", second
# of creation, tenant, bytes of its input, most open batches and bytes of the tenant, how many batches of it are kept.
# Entries in the set of its open batches that are not open were ended by a router of an older release.
_OPEN = f"""{USAGE_LUA}
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then return 1 end
local stale, count = {{}}, 0
for _, one in ipairs(redis.call('ZRANGE', KEYS[5], 0, -1)) do
  if redis.call('ZSCORE', KEYS[2], one) then count = count + 1 else table.insert(stale, one) end
end
if count >= tonumber(ARGV[6]) then return 2 end
if used(KEYS[7], ARGV[4]) + ARGV[5] > tonumber(ARGV[7]) then return 3 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
for _, set in ipairs({{KEYS[2], KEYS[3], KEYS[5]}}) do redis.call('ZADD', set, ARGV[3], ARGV[1]) end
for _, one in ipairs(stale) do redis.call('ZREM', KEYS[5], one) end
charge(KEYS[6], KEYS[7], ARGV[1], ARGV[4], ARGV[5])
local over = math.min(redis.call('ZCARD', KEYS[3]) - ARGV[8], {_TRIMMED})
if over <= 0 then return 1 end
for _, one in ipairs(redis.call('ZRANGE', KEYS[3], 0, over - 1)) do
  if not redis.call('ZSCORE', KEYS[2], one) then
    redis.call('ZREM', KEYS[3], one)
    redis.call('ZREM', KEYS[4], one)
    redis.call('HDEL', KEYS[1], one)
  end
end
return 1
"""


class Saved(Enum):
    """Result of a change."""

    CHANGED = 0
    """Not written: another writer changed it before; read it again."""
    DONE = 1
    LOST = 2
    """Not written: the lease has another owner now."""


class Opened(Enum):
    """Result of opening a new batch."""

    DONE = 1
    TOO_MANY = 2
    """Not written: its tenant has as many open as it may."""
    TOO_LARGE = 3
    """Not written: with its input its tenant would keep more bytes than it may."""


class BatchStore:
    """Reads and writes batches. Calls raise UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._keys = keys
        self._shelf = RecordStore(
            redis=redis,
            records=keys.batches,
            due=keys.batches_due,
            listing=keys.tenant_batches,
            parse=lambda text: batch_from_json(text.partition(b" ")[2]),
            charges=keys.charges,
            charged=keys.charged,
        )
        self._script: Any = redis.register_script(_SAVE)
        self._open: Any = redis.register_script(_OPEN)

    async def open_new(
        self, record: BatchRecord, *, input_bytes: int, most_open: int, most_bytes: int, most_kept: int = KEPT_BATCHES
    ) -> Opened:
        """Write a new batch, unless its tenant has `most_open` or would keep more than `most_bytes` with its input."""
        keys, tenant = self._keys, record.tenant
        names = [keys.batches, keys.open_batches, keys.tenant_batches(tenant), keys.batches_due]
        names += [keys.tenant_open_batches(tenant), keys.charges, keys.charged]
        arguments = [record.id, f"{record.version} {to_json(record)}", record.created_s, tenant, charge_of(input_bytes)]
        with raising_unavailable():
            opened = Opened(await self._open(keys=names, args=[*arguments, most_open, most_bytes, most_kept]))
            if opened is Opened.DONE:
                await self._redis.publish(keys.batches_channel, record.id)
        return opened

    async def save(
        self, record: BatchRecord, owner: Incarnation | None = None, files: Sequence[FileRecord] = ()
    ) -> Saved:
        """Write `record` if the version before it stands there (none for version 1), and the files that it made.

        With `owner`, only while that incarnation holds the lease.
        """
        keys = self._keys
        names = [
            keys.batches,
            keys.open_batches,
            keys.tenant_batches(record.tenant),
            keys.batches_due,
            keys.batch_owner,
            keys.files,
            keys.files_due,
            keys.tenant_files(record.tenant),
            keys.tenant_open_batches(record.tenant),
            keys.charges,
            keys.charged,
        ]
        arguments: list[object] = [record.id, record.version - 1, f"{record.version} {to_json(record)}"]
        arguments += ["" if owner is None else owner, record.created_s, int(not record.status.is_over)]
        arguments += [max(record.created_s, record.expires_s) + KEPT_S, record.tenant]
        for file in files:
            arguments += [file.id, to_json(file), file.created_s, "" if file.expires_s is None else file.expires_s]
            arguments.append(charge_of(file.size_bytes))
        with raising_unavailable():
            saved = Saved(await self._script(keys=names, args=arguments))
            if saved is Saved.DONE and owner is None:
                await self._redis.publish(keys.batches_channel, record.id)
        return saved

    async def load(self, batch: str) -> BatchRecord | None:
        """The batch, or None when there is none of that id that can be read."""
        return await self._shelf.load(batch)

    async def is_known(self, batch: str) -> bool:
        """True if there is a batch of that id, even one that cannot be read."""
        return await self._shelf.is_known(batch)

    async def list(self, tenant: str, *, after: str | None, limit: int) -> tuple[Sequence[BatchRecord], bool]:
        """At most `limit` batches after the one of id `after`, newest first; and whether there are more."""
        found: list[BatchRecord] = []
        listing = self._keys.tenant_batches(tenant)
        start = await self._shelf.place_after(tenant, after, is_ascending=False)
        with raising_unavailable():
            while len(found) <= limit:
                ids = await self._redis.zrange(listing, start, start + limit, desc=True)
                if not ids:
                    break
                found += await self._shelf.load_all([batch.decode() for batch in ids])
                start += len(ids)
        return found[:limit], len(found) > limit

    async def open(self) -> Sequence[str]:
        """Ids of the batches that are not over, oldest first."""
        with raising_unavailable():
            ids = await self._redis.zrange(self._keys.open_batches, 0, -1)
        return [batch.decode() for batch in ids]

    async def load_all(self, batches: Sequence[str]) -> Sequence[BatchRecord]:
        """The readable ones of the batches of these ids, in this order."""
        found: list[BatchRecord] = []
        for start in range(0, len(batches), _AT_ONCE):
            found += await self._shelf.load_all(batches[start : start + _AT_ONCE])
        return found

    async def forget_due(self, now_s: float) -> None:
        """Forget batches that have been over for KEPT_S."""
        while due := await self._shelf.due_by(now_s):
            for batch in due:
                await self._shelf.forget(batch)
