"""Batches in the durable store: whoever changes one names the version that it read, and its owner proves its lease.

The end of a batch and the files that it leaves are written in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from redis.asyncio import Redis

from tandem.core.batch import BatchRecord, FileRecord, batch_from_json, to_json
from tandem.core.ids import Incarnation
from tandem.prefixindex.connection import OUTAGE, no_answer
from tandem.prefixindex.keys import Keys
from tandem.prefixindex.stores.shelf import Shelf

_AT_ONCE: Final = 100
KEPT_S: Final = 30 * 86_400
"""How long a batch that is over can be looked at."""

# KEYS: batches, open, the tenant's batches, due, owner, files, files due, the tenant's files.
# ARGV: id, version that must stand there (0 = none), "version JSON", incarnation of the owner or "", second of
# creation, 1 if it is open, second in which it is forgotten; then id, JSON, second of creation, due or "" of each file.
# A call repeated because its answer got lost finds its own text and succeeds again.
_SAVE = """
local at = redis.call('HGET', KEYS[1], ARGV[1])
if at == ARGV[3] then return 1 end
if ARGV[4] ~= '' and redis.call('GET', KEYS[5]) ~= ARGV[4] then return 2 end
if (at and string.match(at, '^(%d+) ') or '0') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[3], ARGV[5], ARGV[1])
if ARGV[6] == '1' then
  redis.call('ZADD', KEYS[2], ARGV[5], ARGV[1])
else
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('ZADD', KEYS[4], ARGV[7], ARGV[1])
end
for i = 8, #ARGV, 4 do
  redis.call('HSET', KEYS[6], ARGV[i], ARGV[i + 1])
  redis.call('ZADD', KEYS[8], ARGV[i + 2], ARGV[i])
  if ARGV[i + 3] ~= '' then redis.call('ZADD', KEYS[7], ARGV[i + 3], ARGV[i]) end
end
return 1
"""


class Saved(Enum):
    """What became of a change."""

    CHANGED = 0
    """Not written: somebody changed it before; read it again."""
    DONE = 1
    LOST = 2
    """Not written: the lease is somebody else's now."""


class BatchStore:
    """Reads and writes them. Calls raise UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._keys = keys
        self._shelf = Shelf(
            redis=redis,
            records=keys.batches,
            due=keys.batches_due,
            listing=keys.tenant_batches,
            parse=lambda text: batch_from_json(text.partition(b" ")[2]),
        )
        self._script: Any = redis.register_script(_SAVE)

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
        ]
        arguments: list[object] = [record.id, record.version - 1, f"{record.version} {to_json(record)}"]
        arguments += ["" if owner is None else owner, record.created_s, int(not record.status.is_over)]
        arguments.append(max(record.created_s, record.expires_s) + KEPT_S)
        for file in files:
            arguments += [file.id, to_json(file), file.created_s, "" if file.expires_s is None else file.expires_s]
        try:
            saved = Saved(await self._script(keys=names, args=arguments))
            if saved is Saved.DONE and owner is None:
                await self._redis.publish(keys.batches_channel, record.id)
        except OUTAGE as error:
            raise no_answer(error) from error
        return saved

    async def load(self, batch: str) -> BatchRecord | None:
        """The batch, or None when there is none of that id that can be read."""
        return await self._shelf.load(batch)

    async def is_known(self, batch: str) -> bool:
        """Whether there is a batch of that id, even one that cannot be read."""
        return await self._shelf.is_known(batch)

    async def list(self, tenant: str, *, after: str | None, limit: int) -> tuple[Sequence[BatchRecord], bool]:
        """At most `limit` batches after the one of id `after`, newest first; and whether there are more."""
        found: list[BatchRecord] = []
        listing = self._keys.tenant_batches(tenant)
        start = await self._shelf.place_after(tenant, after, is_ascending=False)
        try:
            while len(found) <= limit:
                ids = await self._redis.zrange(listing, start, start + limit, desc=True)
                if not ids:
                    break
                found += await self._shelf.load_all([batch.decode() for batch in ids])
                start += len(ids)
        except OUTAGE as error:
            raise no_answer(error) from error
        return found[:limit], len(found) > limit

    async def open(self) -> Sequence[str]:
        """Ids of the batches that are not over, oldest first."""
        try:
            ids = await self._redis.zrange(self._keys.open_batches, 0, -1)
        except OUTAGE as error:
            raise no_answer(error) from error
        return [batch.decode() for batch in ids]

    async def load_all(self, batches: Sequence[str]) -> Sequence[BatchRecord]:
        """Those that can be read of batches of these ids, in this order."""
        found: list[BatchRecord] = []
        for start in range(0, len(batches), _AT_ONCE):
            found += await self._shelf.load_all(batches[start : start + _AT_ONCE])
        return found

    async def forget_due(self, now_s: float) -> None:
        """Forget batches that are over for long."""
        for batch in await self._shelf.due_by(now_s):
            await self._shelf.forget(batch)
