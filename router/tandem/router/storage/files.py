"""Files of clients: the shared directory as this router sees it, and the removal of files that are due."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.core.batch import FileRecord
from tandem.core.errors import CapacityError, ConfigError, NotFoundError, QuotaError, UnavailableError
from tandem.core.logs import event
from tandem.router.error_quoting import quoted
from tandem.router.storage.batches.file_store import FilesFolder, is_id
from tandem.statestore.stores.batches import BatchStore
from tandem.statestore.stores.files import FileStore

_log = logging.getLogger(__name__)
ORPHAN_S = 86400.0
"""A folder that belongs to no batch stays for so long: the batch may be about to be written down."""
KEPT_S = 60.0
"""A batch's work stays for so long after its end: the store may forget its last second when it is killed."""


def new_id(prefix: str, now_s: float) -> str:
    """A fresh id such as `file-…` or `batch_…`. Ids sort by age, which orders lists within a second."""
    return f"{prefix}{int(now_s * 1e6):014x}{secrets.token_hex(6)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLimits:
    """Limits on kept data, as `[store]` has them."""

    max_file_bytes: int
    max_tenant_file_bytes: int
    max_tenant_open_batches: int
    min_free_bytes: int


class Files:
    """Files of all tenants. `expiry_s` is how long those are kept that ask for nothing else."""

    def __init__(
        self, store: FileStore, folder: FilesFolder, expiry_s: float, wall_s: Callable[[], float], limits: KeptLimits
    ) -> None:
        self.store, self.folder, self.expiry_s, self.wall_s, self.limits = store, folder, expiry_s, wall_s, limits
        self._is_checked = False

    async def check_room(self, size_bytes: int = 0) -> None:
        """CapacityError when less than `min_free_bytes` of the disk would be left: Redis and the journals of batches
        write there, too. Raises OSError."""
        least = self.limits.min_free_bytes
        if least and await asyncio.to_thread(self.folder.free_bytes) - size_bytes < least:
            why = f"less than min_free_bytes, {least}, would be free on the disk"
            raise CapacityError("there is no room for files and batches", why=why, todo="try again later")

    def full(self, kept_bytes: int) -> QuotaError:
        """The error for a tenant that keeps as much as it may."""
        why = f"max_tenant_file_bytes is {self.limits.max_tenant_file_bytes}, and {kept_bytes} are kept"
        return QuotaError("no more files can be kept", why=why, todo="delete files, or wait for batches to end")

    async def check(self) -> None:
        """UnavailableError unless the directory is the one that all routers of the cluster share."""
        if self._is_checked:
            return
        try:
            here = await asyncio.to_thread(self.folder.identity)
        except ConfigError as error:
            raise UnavailableError(error.what, why=error.why, todo=error.todo) from error
        if await self.store.adopt(here) != here:
            raise UnavailableError(
                f"{self.folder.root} is not the directory for files of this cluster",
                why="the cluster began with another one",
                todo="mount the same directory on every router and name it in store.dir",
            )
        self._is_checked = True

    async def load(self, tenant: str, file: str) -> FileRecord:
        """A whole file; NotFoundError when there is none, or its time is over."""
        record = await self.store.load(tenant, file) if is_id(file) else None
        if record is None or (record.expires_s is not None and record.expires_s <= self.wall_s()):
            why = "it expired, was deleted, or was never uploaded"
            raise NotFoundError(f"there is no file {quoted(file)}", why=why, param="file_id")
        return record

    async def remove(self, file: str) -> None:
        """Remove its bytes, then what is known of it: interrupted between, it is done again when it is due."""
        await asyncio.to_thread(self.folder.remove_file, file)
        await self.store.forget(file)


async def sweep(files: Files, batches: BatchStore) -> None:
    """Remove what is due: expired files, uploads that broke off, the work of batches that are over or never came to be.
    One router does. What cannot be removed or read is left, and keeps nothing else."""
    now_s = files.wall_s()
    left = 0  # what could not be removed is passed over until the next time
    while due := await files.store.due(now_s, left):
        for file in due:
            left += 1
            with _left(file):
                await files.remove(file)
                left -= 1
                event(_log, "file removed", file=file)
    await batches.forget_due(now_s)
    for batch in await asyncio.to_thread(files.folder.works):
        with _left(batch):
            if await _is_due(files, batches, batch, now_s):
                await asyncio.to_thread(files.folder.remove_work, batch)


async def _is_due(files: Files, batches: BatchStore, batch: str, now_s: float) -> bool:
    record = await batches.load(batch)
    if record is None:  # its input was taken, and Redis or the router went before it was written down
        if await batches.is_known(batch):  # of another release: it cannot be read here
            return False
        return now_s > await asyncio.to_thread(files.folder.changed_s, batch) + ORPHAN_S
    return record.status.is_over and now_s > record.ended_s + KEPT_S


@contextmanager
def _left(name: str) -> Iterator[None]:
    """Go on without it, unless Redis is away."""
    try:
        yield
    except UnavailableError:
        raise
    except Exception:  # noqa: BLE001 - whatever is wrong with one entry, the others are swept
        _log.exception("not swept", extra={"fields": {"id": name}})
