"""One batch, from where it stands to its end, by the owner of the directory. Killed anywhere, it goes on from disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from tandem.core.batch import BatchRecord, BatchStatus, FileRecord, LineError
from tandem.core.clock import Clock
from tandem.core.errors import PermissionDeniedError, TandemError, UnavailableError
from tandem.core.ids import Incarnation
from tandem.core.logs import event
from tandem.router.storage.batches import result_mapping, state_machine
from tandem.router.storage.batches.asgi_client import AsgiResponse
from tandem.router.storage.batches.concurrency import RevokedError, Slots
from tandem.router.storage.batches.file_store import FilesFolder
from tandem.router.storage.batches.input_file import (
    Input,
    Limits,
    body_of,
    custom_id_of,
    index_input,
    line_at,
    read_input,
)
from tandem.router.storage.batches.journal import Journal
from tandem.router.storage.batches.result_mapping import Outputs
from tandem.router.storage.batches.state_machine import BatchStep, Tally
from tandem.router.storage.files import new_id
from tandem.statestore.stores.batches import BatchStore, Saved
from tandem.statestore.stores.files import FileStore

_log = logging.getLogger(__name__)
AT_ONCE = 16
"""So many requests of one batch are begun and not answered: those that hold a place, wait for one, or rest."""
LOOK_S = 0.5
SAVE_S = 1.0
"""Progress is written down no more often."""

_GONE = LineError(code="input_file_not_found", message="The input file is gone.", param="input_file_id")


class LeaseLostError(Exception):
    """Another router owns the directory now."""


class Calls(Protocol):
    """Client for the requests of batches."""

    async def post(self, path: str, body: bytes, tenant: str) -> AsgiResponse: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """Shared by all batches of one owner. `models` gives the names that are served, `serves` returns True if a tenant
    may ask for anything; `check_room` raises CapacityError or OSError where answers would find no room on the disk."""

    incarnation: Incarnation
    batches: BatchStore
    files: FileStore
    folder: FilesFolder
    slots: Slots
    calls: Calls
    clock: Clock
    wall_s: Callable[[], float]
    models: Callable[[], frozenset[str]]
    limits: Limits
    file_expiry_s: float
    check_room: Callable[[], Awaitable[None]]
    serves: Callable[[str], bool]


class BatchRun:
    """Runs once; raises LeaseLostError, OSError and UnavailableError, after which another run can go on."""

    def __init__(self, shop: BatchContext, record: BatchRecord) -> None:
        self._shop, self._record = shop, record
        self._path = shop.folder.input(record.id)
        self._input: Input | None = None
        self._journal: Journal | None = None
        self._saved_s = float("-inf")
        self._is_leaving = False
        self._idle: set[asyncio.Task[None]] = set()
        """Those of the requests begun that hold no place."""

    def leave(self) -> None:
        """End soon: what holds a place is answered, and nothing else begun. Another run goes on from there."""
        self._is_leaving = True
        for task in self._idle:
            task.cancel()

    async def run(self) -> None:
        """Until the batch is over, or it has to leave."""
        steps = {BatchStep.VALIDATE: self._validate, BatchStep.EXECUTE: self._execute, BatchStep.PUBLISH: self._publish}
        try:
            while (action := state_machine.action(self._record, self._shop.wall_s())) is not BatchStep.NOTHING:
                if action is BatchStep.EXECUTE and self._is_leaving:
                    return
                try:
                    await steps[action]()
                except FileNotFoundError:
                    if not await asyncio.to_thread(self._shop.folder.has_lost_input, self._record.id):
                        raise
                    await self._save(lambda now_s: state_machine.broken(self._record, now_s, _GONE))
        finally:
            if self._journal is not None:
                await self._journal.close()
        record = self._record
        event(_log, "batch over", batch=record.id, status=record.status, completed=record.completed, of=record.total)

    # ---- the three things that are done about a batch ----------------------------------------------------------------

    async def _validate(self) -> None:
        shop, record = self._shop, self._record
        await asyncio.to_thread(shop.folder.take_input, record.id, record.input_file)
        found = await read_input(self._path, record.endpoint, shop.models(), shop.limits)
        if found.errors:
            await self._save(lambda now_s: state_machine.refused(self._record, now_s, found.errors))
        elif await self._save(lambda now_s: state_machine.validated(self._record, now_s, found.total, found.model)):
            self._input = found

    async def _execute(self) -> None:
        """Answer everything, but stop as soon as the batch is cancelled or past its window. Without room or a key
        nothing is computed, and what is being computed ends."""
        await self._check()
        found, journal = await self._opened()
        work = asyncio.create_task(self._answer_all(found, journal))
        try:
            while True:
                await asyncio.wait([work], timeout=LOOK_S)
                if work.done():
                    break
                with suppress(UnavailableError):  # the lease decides if Redis is away for too long
                    await self._look(journal)
                if state_machine.action(self._record, self._shop.wall_s()) is not BatchStep.EXECUTE:
                    return
                try:
                    await self._check()
                except (OSError, TandemError):
                    self.leave()
        finally:
            await _end(work)
        work.result()
        if len(journal.places) == found.total:
            await self._save(lambda now_s: state_machine.all_answered(self._record, now_s, journal.tally))
        else:  # it leaves
            self._saved_s = float("-inf")
            await self._look(journal)
            await self._check()

    async def _check(self) -> None:
        """CapacityError or OSError: no room for answers. PermissionDeniedError: its tenant lost its last key."""
        if not self._shop.serves(self._record.tenant):
            raise PermissionDeniedError("the batch is paused", why="its tenant no longer has a valid API key")
        await self._shop.check_room()

    async def _publish(self) -> None:
        """Write both files, then end the batch and list them in one step."""
        shop, record = self._shop, self._record
        if record.status is BatchStatus.CANCELLING and not record.total:
            # Cancelled before it was read: nothing was promised to the client about its requests.
            await self._save(lambda now_s: state_machine.published(self._record, now_s, Tally(), None, None))
            return
        found, journal = await self._opened()
        output, errors = self._new_file("output"), self._new_file("errors")
        for file in (output, errors):
            await shop.files.begin(file)  # should this be all that ever happens to it, it is removed in a day
        writer = Outputs(shop.folder, record, journal.places)
        sizes = await asyncio.to_thread(writer.write, found, output.id, errors.id)
        made = [
            replace(file, size_bytes=size, is_uploaded=True)
            for file, size in zip((output, errors), sizes, strict=True)
            if size
        ]
        names = [file.id if size else None for file, size in zip((output, errors), sizes, strict=True)]
        tally = replace(journal.tally, failed=record.total - journal.tally.completed)
        is_saved = await self._save(lambda now_s: state_machine.published(self._record, now_s, tally, *names), made)
        for file, size in zip((output, errors), sizes, strict=True):
            if not (is_saved and size):
                await asyncio.to_thread(shop.folder.remove_file, file.id)
                await shop.files.forget(file.id)

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def _answer_all(self, found: Input, journal: Journal) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                begun = asyncio.Semaphore(AT_ONCE)
                for number in range(found.total):
                    if number in journal.places:
                        continue
                    await begun.acquire()
                    if self._is_leaving:
                        break
                    task = group.create_task(self._answer(found, journal, number))
                    task.add_done_callback(lambda _: begun.release())
        except BaseExceptionGroup as failures:
            raise _first(failures) from None

    async def _answer(self, found: Input, journal: Journal, number: int) -> None:
        """Until it is answered, or the run leaves. It holds a place only while it is sent: one that waits keeps none
        from others."""
        slots, tenant = self._shop.slots, self._record.tenant
        waits = failures = 0
        while not self._is_leaving:
            with self._idling():
                slot = await slots.take(tenant, found.cost(number))
            try:
                line = await line_at(self._path, found, number)
                reply = await slot.run(self._reply(line, number))
                if result_mapping.is_waiting(reply):
                    waits += 1
                else:
                    failures += 1
                pause_s = result_mapping.pause_before_retry(reply, waits, failures)
                if pause_s is None:
                    await journal.append(result_mapping.entry(number, self._record.id, custom_id_of(line), reply))
                    return
            except RevokedError:
                continue
            finally:
                slots.give_back(slot)
            with self._idling():
                await asyncio.sleep(pause_s)

    @contextmanager
    def _idling(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._idle.add(task)
        try:
            yield
        finally:
            self._idle.discard(task)

    async def _reply(self, line: bytes, number: int) -> AsgiResponse:
        """Whatever breaks on one request is its reply, and nothing to the others."""
        record = self._record
        try:
            return await self._shop.calls.post(record.endpoint, body_of(line), record.tenant)
        except Exception:  # noqa: BLE001 - logged, and after some tries the request's answer
            _log.exception("request of a batch failed", extra={"fields": {"batch": record.id, "number": number}})
            return result_mapping.broken()

    # ---- what is kept ------------------------------------------------------------------------------------------------

    async def _opened(self) -> tuple[Input, Journal]:
        """The input's places and everything that was answered before, read once."""
        if self._input is None:
            self._input = await index_input(self._path)
        if self._journal is None:
            self._journal = Journal(self._shop.folder.work(self._record.id), self._shop.incarnation)
            await self._journal.open()
        return self._input, self._journal

    async def _look(self, journal: Journal) -> None:
        """Write progress down, or read changes by others."""
        now_s = self._shop.clock.now_s()
        has_news = journal.tally.completed + journal.tally.failed > self._record.completed + self._record.failed
        if has_news and now_s - self._saved_s >= SAVE_S:
            self._saved_s = now_s
            await self._save(lambda _: state_machine.progressed(self._record, journal.tally))
        else:
            await self._reload()

    async def _save(self, change: Callable[[float], BatchRecord], files: Sequence[FileRecord] = ()) -> bool:
        """False: the batch was changed meanwhile; it was read again, so look what is to be done now."""
        record = change(self._shop.wall_s())
        saved = await self._shop.batches.save(record, self._shop.incarnation, files)
        if saved is Saved.LOST:
            raise LeaseLostError
        if saved is Saved.DONE:
            self._record = record
            return True
        await self._reload()
        return False

    async def _reload(self) -> None:
        record = await self._shop.batches.load(self._record.id)
        if record is None:
            raise LeaseLostError  # the store lost it: start from what it has
        self._record = record

    def _new_file(self, what: str) -> FileRecord:
        record, now_s = self._record, self._shop.wall_s()
        expiry_s = record.output_expires_after_s or self._shop.file_expiry_s
        return FileRecord(
            id=new_id("file-", now_s),
            tenant=record.tenant,
            purpose="batch_output",
            name=f"{record.id}_{what}.jsonl",
            created_s=int(now_s),
            expires_s=int(now_s + expiry_s),
        )


async def _end(work: asyncio.Task[None]) -> None:
    work.cancel()
    await asyncio.wait([work])
    if not work.cancelled():
        work.exception()  # seen: it is raised again only for a caller that asks for the result


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
