"""Records of uploaded files, in the durable store. Their bytes lie in a directory, which is not this module's.

A file is recorded before its first byte is written, unlisted and due for removal in a day, and listed once it is whole:
what a crash leaves behind is found again by its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from redis.asyncio import Redis

from tandem.core.batch import FileRecord, file_from_json, to_json
from tandem.statestore.connection import raising_unavailable
from tandem.statestore.keys import Keys
from tandem.statestore.stores.record_store import USAGE_LUA, RecordStore, charge_of

UPLOAD_S: Final = 86_400
"""An upload that is not whole after so long is given up."""
_PAGE: Final = 200
_FOR_EVER: Final = "+inf"

# KEYS: files, due, the tenant's files, charges, sums. ARGV: id, JSON, due or +inf, second of creation if it is listed
# or "", tenant, bytes, most bytes of the tenant or "".
_WRITE = f"""{USAGE_LUA}
if ARGV[7] ~= '' and used(KEYS[5], ARGV[5]) + ARGV[6] > tonumber(ARGV[7]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if ARGV[3] == '{_FOR_EVER}' then redis.call('ZREM', KEYS[2], ARGV[1])
else redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1]) end
if ARGV[4] ~= '' then redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1]) end
charge(KEYS[4], KEYS[5], ARGV[1], ARGV[5], ARGV[6])
return 1
"""


class FileStore:
    """Reads and writes the records. Calls raise UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._keys = keys
        self._shelf = RecordStore(
            redis=redis,
            records=keys.files,
            due=keys.files_due,
            listing=keys.tenant_files,
            parse=file_from_json,
            charges=keys.charges,
            charged=keys.charged,
        )
        self._script: Any = redis.register_script(_WRITE)

    async def adopt(self, directory: str) -> str:
        """Make `directory` (an id) this cluster's if it has none yet; returns the cluster's."""
        with raising_unavailable():
            await self._redis.set(self._keys.files_dir, directory, nx=True)
            return str((await self._redis.get(self._keys.files_dir)).decode())

    async def begin(self, record: FileRecord, most_bytes: int | None = None) -> bool:
        """Record a file before its bytes come, at most `record.size_bytes`. False, and nothing written: with them its
        tenant would keep more than `most_bytes`; None = whatever it keeps."""
        due = record.created_s + UPLOAD_S
        record = replace(record, is_uploaded=False)
        return await self._write(record, due, is_listed=False, most_bytes=most_bytes)

    async def finish(self, record: FileRecord) -> None:
        """Record that a file's bytes are complete."""
        due = _FOR_EVER if record.expires_s is None else record.expires_s
        await self._write(replace(record, is_uploaded=True), due, is_listed=True, most_bytes=None)

    async def kept_bytes(self, tenant: str) -> int:
        """Bytes that the files and the inputs of the open batches of a tenant count as."""
        with raising_unavailable():
            return int(await self._redis.hget(self._keys.charged, tenant) or 0)

    async def load(self, tenant: str, file: str) -> FileRecord | None:
        """The file, or None when there is none of that id that can be read, it is not whole, or it is another
        tenant's."""
        record = await self._shelf.load(file)
        return record if record is not None and record.is_uploaded and record.tenant == tenant else None

    async def list(
        self, tenant: str, *, after: str | None, limit: int, is_ascending: bool, purpose: str | None = None
    ) -> tuple[Sequence[FileRecord], bool]:
        """At most `limit` files after the one of id `after`, by age; and whether there are more."""
        found: list[FileRecord] = []
        listing = self._keys.tenant_files(tenant)
        start = await self._shelf.place_after(tenant, after, is_ascending=is_ascending)
        with raising_unavailable():
            while len(found) <= limit:
                ids = await self._redis.zrange(listing, start, start + _PAGE - 1, desc=not is_ascending)
                if not ids:
                    break
                records = await self._shelf.load_all([one.decode() for one in ids])
                found += [record for record in records if purpose in (None, record.purpose)]
                start += len(ids)
        return found[:limit], len(found) > limit

    async def due(self, now_s: float, skip: int = 0) -> Sequence[str]:
        """Ids of files that have expired, or were never uploaded whole; some of them, without the first `skip`."""
        return await self._shelf.due_by(now_s, skip=skip)

    async def forget(self, file: str) -> None:
        """Forget a file after its bytes are gone."""
        await self._shelf.forget(file)

    async def _write(self, record: FileRecord, due: float | str, *, is_listed: bool, most_bytes: int | None) -> bool:
        keys = self._keys
        names = [keys.files, keys.files_due, keys.tenant_files(record.tenant), keys.charges, keys.charged]
        arguments = [record.id, to_json(record), due, record.created_s if is_listed else ""]
        arguments += [record.tenant, charge_of(record.size_bytes), "" if most_bytes is None else most_bytes]
        with raising_unavailable():
            return bool(await self._script(keys=names, args=arguments))
