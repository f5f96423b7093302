"""A batch is killed, taken over, cancelled and expires at any moment: every request stands once in the output.

A kill is a copy of directory and store at some moment, from which the next owner goes on; nothing of what the killed
owner would have tidied up on its way out is in it. Or the owner is not dead but late, and works on beside the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.batch import BatchRecord, BatchStatus, FileRecord
from tandem.core.clock import MonotonicClock
from tandem.core.errors import CapacityError, PermissionDeniedError, UnavailableError
from tandem.core.ids import Incarnation
from tandem.router.storage.batches import executor, result_mapping, state_machine
from tandem.router.storage.batches.asgi_client import AsgiResponse
from tandem.router.storage.batches.concurrency import Slots
from tandem.router.storage.batches.executor import BatchContext, BatchRun, LeaseLostError
from tandem.router.storage.batches.file_store import FilesFolder
from tandem.router.storage.batches.input_file import Limits
from tandem.statestore.stores.batches import Saved

TOTAL = 12
NAME = "batch_1"
URL = "/v1/completions"


class Store:
    """Batches and files in memory, by the rules of the real ones."""

    def __init__(self) -> None:
        self.batches: dict[str, BatchRecord] = {}
        self.whole: dict[str, FileRecord] = {}
        self.begun: set[str] = set()
        self.owner: int | None = None
        self.is_away = False

    async def save(
        self, record: BatchRecord, owner: Incarnation | None = None, files: Sequence[FileRecord] = ()
    ) -> Saved:
        await self._trip()
        if owner is not None and owner != self.owner:
            return Saved.LOST
        if self.batches[record.id].version != record.version - 1:
            return Saved.CHANGED
        self.batches[record.id] = record
        self.whole |= {file.id: file for file in files}
        await self._trip()
        return Saved.DONE

    async def load(self, batch: str) -> BatchRecord | None:
        await self._trip()
        return self.batches.get(batch)

    async def begin(self, record: FileRecord) -> None:
        await self._trip()
        self.begun.add(record.id)

    async def forget(self, file: str) -> None:
        await self._trip()
        self.begun.discard(file)
        self.whole.pop(file, None)

    async def _trip(self) -> None:
        await asyncio.sleep(0)
        if self.is_away:
            raise UnavailableError("Redis does not answer")


class Callee:
    """Answers, refuses, and has no room at first, by the number in the prompt."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()

    async def post(self, path: str, body: bytes, tenant: str) -> AsgiResponse:
        number = json.loads(body)["prompt"]
        self.calls[number] += 1
        for _ in range(number % 4):
            await asyncio.sleep(0)
        if number % 5 == 1 and self.calls[number] == 1:
            return AsgiResponse(status=503, body=b'{"error":{}}')
        if number % 5 == 2:
            return AsgiResponse(status=400, body=b'{"error":{}}')
        usage = {"prompt_tokens": 2, "completion_tokens": 1}
        return AsgiResponse(status=200, body=json.dumps({"said": number, "usage": usage}).encode())


class World:
    """One directory and store; several owners, one after the other or beside each other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store()
        self.callee = Callee()
        self.now_s = 1000.0
        self._owners = 0
        self.has_room = self.serves = True

    async def check_room(self) -> None:
        if not self.has_room:
            raise CapacityError("there is no room")

    def begin(self) -> None:
        folder = self.folder()
        folder.identity()
        lines = [
            json.dumps({"custom_id": f"id-{n}", "method": "POST", "url": URL, "body": {"model": "m", "prompt": n}})
            for n in range(TOTAL)
        ]
        with folder.writing("file-1") as writer:
            writer.write("\n".join(lines).encode())
        self.store.batches[NAME] = BatchRecord(
            id=NAME,
            tenant="t",
            endpoint=URL,
            input_file="file-1",
            created_s=1000,
            expires_s=1000 + state_machine.WINDOW_S,
        )

    def folder(self) -> FilesFolder:
        return FilesFolder(self.root / "files")

    def killed(self) -> World:
        """Return its remains after a kill at this moment."""
        left = World(Path(tempfile.mkdtemp(dir=self.root.parent)))
        with contextlib.suppress(shutil.Error):  # a thread renamed or removed what was about to be copied
            shutil.copytree(self.root, left.root, dirs_exist_ok=True)
        left.store = copy.deepcopy(self.store)
        left.now_s, left._owners = self.now_s, self._owners
        return left

    def owner(self, slots: Slots | None = None) -> BatchRun:
        """Return the next owner; the one before has lost ownership, and may not know."""
        self._owners += 1
        incarnation = Incarnation(self._owners * 1009 % 97)
        self.store.owner = incarnation
        if slots is None:
            slots = Slots()
            slots.allow(3)
        shop = BatchContext(
            incarnation=incarnation,
            batches=cast(Any, self.store),
            files=cast(Any, self.store),
            folder=self.folder(),
            slots=slots,
            calls=self.callee,
            clock=MonotonicClock(),
            wall_s=lambda: self.now_s,
            models=lambda: frozenset({"m"}),
            limits=Limits(max_requests=100, max_line_bytes=1000),
            file_expiry_s=3600.0,
            check_room=self.check_room,
            serves=lambda tenant: self.serves,
        )
        return BatchRun(shop, self.store.batches[NAME])

    def check(self) -> BatchRecord:
        """Every request stands once; the counts, the files and what is known of them agree."""
        record = self.store.batches[NAME]
        assert record.status.is_over
        good, bad = self._lines(record.output_file), self._lines(record.error_file)
        assert Counter(line["custom_id"] for line in good + bad) == Counter(f"id-{n}" for n in range(TOTAL))
        assert len({line["id"] for line in good + bad}) == TOTAL
        for line in good:
            assert line["custom_id"] == f"id-{line['response']['body']['said']}"
        assert (record.total, record.completed, record.failed) == (TOTAL, len(good), len(bad))
        assert record.output_tokens == len(good)
        named = {name for name in (record.output_file, record.error_file) if name}
        assert set(self.store.whole) == named
        return record

    def _lines(self, file: str | None) -> list[dict[str, Any]]:
        if file is None:
            return []
        data = self.folder().file(file).read_bytes()
        assert self.store.whole[file].size_bytes == len(data) > 0
        assert self.store.whole[file].is_uploaded
        return [json.loads(line) for line in data.splitlines()]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "LOOK_S", 0.0005)
    monkeypatch.setattr(executor, "SAVE_S", 0.0)
    monkeypatch.setattr(result_mapping, "FIRST_PAUSE_S", 0.0)


async def steps(task: asyncio.Task[None], count: int) -> None:
    """Let the event loop turn at most `count` times."""
    for _ in range(count):
        if task.done():
            return
        await asyncio.sleep(0.0002)


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, LeaseLostError):
        await task


@contextlib.contextmanager
def world() -> Any:
    with tempfile.TemporaryDirectory() as name:
        first = World(Path(name) / "first")
        first.begin()
        yield first


def test_undisturbed() -> None:
    with world() as here:
        asyncio.run(here.owner().run())
        record = here.check()
        assert record.status is BatchStatus.COMPLETED
        assert record.failed == len([n for n in range(TOTAL) if n % 5 == 2])
        assert sum(here.callee.calls.values()) == TOTAL + len([n for n in range(TOTAL) if n % 5 == 1])
        assert here.store.begun == set(here.store.whole)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=5))
def test_killed_at_any_moment(moments: list[int]) -> None:
    async def scenario(here: World) -> None:
        for moment in moments:
            task = asyncio.create_task(here.owner().run())
            await steps(task, moment)
            left = here.killed()
            await end(task)
            here = left
        await here.owner().run()
        assert here.check().status is BatchStatus.COMPLETED

    with world() as first:
        asyncio.run(scenario(first))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=4))
def test_late_owners_work_on_beside_the_next(moments: list[int]) -> None:
    async def scenario(here: World) -> None:
        late = []
        for moment in moments:
            late.append(asyncio.create_task(here.owner().run()))
            await steps(late[-1], moment)
        await here.owner().run()
        record = here.check()
        assert record.status is BatchStatus.COMPLETED
        await asyncio.gather(*late, return_exceptions=True)
        assert here.check() == record

    with world() as here:
        asyncio.run(scenario(here))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.booleans())
def test_cancelled_or_expired_at_any_moment(moment: int, kill: int, is_cancelled: bool) -> None:
    async def scenario(here: World) -> None:
        task = asyncio.create_task(here.owner().run())
        await steps(task, moment)
        if is_cancelled:
            with contextlib.suppress(Exception):  # it may be too late
                here.store.batches[NAME] = state_machine.cancel_asked(here.store.batches[NAME], 1001)
        else:
            here.now_s += state_machine.WINDOW_S
        await steps(task, kill)
        left = here.killed()
        await end(task)
        await left.owner().run()
        record = left.store.batches[NAME]
        assert record.status in (BatchStatus.COMPLETED, BatchStatus.CANCELLED, BatchStatus.EXPIRED)
        if record.total:  # else it was cancelled before its input was read
            left.check()

    with world() as here:
        asyncio.run(scenario(here))


def test_an_outage_of_the_store_while_it_runs_is_waited_out() -> None:
    async def scenario(here: World) -> None:
        task = asyncio.create_task(here.owner().run())
        while here.store.batches[NAME].status is not BatchStatus.IN_PROGRESS:
            await asyncio.sleep(0)
        here.store.is_away = True
        await steps(task, 20)
        here.store.is_away = False
        with contextlib.suppress(UnavailableError):  # or it ended in the outage
            await task
        await here.owner().run()
        assert here.check().status is BatchStatus.COMPLETED

    with world() as here:
        asyncio.run(scenario(here))


def test_work_that_is_gone_fails_the_batch_unless_the_directory_is_gone_too() -> None:
    async def scenario(here: World) -> None:
        record = replace(here.store.batches[NAME], status=BatchStatus.IN_PROGRESS, total=TOTAL)
        here.store.batches[NAME] = record
        (here.root / "files" / "directory").rename(here.root / "elsewhere")
        with pytest.raises(FileNotFoundError):
            await here.owner().run()
        assert here.store.batches[NAME] == record
        (here.root / "elsewhere").rename(here.root / "files" / "directory")
        await here.owner().run()
        assert [error.code for error in here.store.batches[NAME].errors] == ["input_file_not_found"]

    with world() as here:
        asyncio.run(scenario(here))


class Breaking(Callee):
    """One request raises, another one's body came from a release that let any depth pass."""

    async def post(self, path: str, body: bytes, tenant: str) -> AsgiResponse:
        if json.loads(body)["prompt"] == 3:
            raise RuntimeError("a fault of ours")
        return await super().post(path, body, tenant)


def test_what_breaks_on_one_request_is_its_answer() -> None:
    with world() as here:
        here.callee = Breaking()
        deep = json.dumps({"custom_id": "id-4", "method": "POST", "url": URL, "body": {"model": "m", "prompt": 0}})
        deep = deep.replace('"prompt": 0', f'"prompt": {"[" * 300}{"]" * 300}')
        path = here.folder().file("file-1")
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:4], deep, *lines[5:]]))
        here.store.batches[NAME] = replace(here.store.batches[NAME], status=BatchStatus.IN_PROGRESS, total=TOTAL)
        here.folder().take_input(NAME, "file-1")
        asyncio.run(here.owner().run())
        record = here.check()
        assert record.status is BatchStatus.COMPLETED
        bad = {line["custom_id"]: line["response"] for line in here._lines(record.error_file)}
        for name in ("id-3", "id-4"):
            assert (bad[name]["status_code"], bad[name]["body"]["error"]["code"]) == (500, "internal")


class Full(Callee):
    """Has no room, ever."""

    async def post(self, path: str, body: bytes, tenant: str) -> AsgiResponse:
        self.calls[json.loads(body)["prompt"]] += 1
        return AsgiResponse(status=503)


def test_who_waits_keeps_no_place_and_leaves_when_it_is_told() -> None:
    async def scenario(here: World) -> None:
        here.callee, slots = Full(), Slots()
        slots.allow(1)
        owner = here.owner(slots)
        task = asyncio.create_task(owner.run())
        async with asyncio.timeout(20):
            while len(here.callee.calls) < TOTAL:  # all of them are sent through one place
                await asyncio.sleep(0.001)
            slots.give_back(await slots.take("another", 1))
            owner.leave()
            await task
        assert slots.running == 0
        assert here.store.batches[NAME].status is BatchStatus.IN_PROGRESS
        here.callee = Callee()
        await here.owner().run()
        assert here.check().status is BatchStatus.COMPLETED

    with world() as here:
        asyncio.run(scenario(here))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=5))
def test_told_to_leave_at_any_moment(moments: list[int]) -> None:
    """Requests sent are answered, once, and the next run goes on."""

    async def scenario(here: World) -> None:
        for moment in moments:
            owner = here.owner()
            task = asyncio.create_task(owner.run())
            await steps(task, moment)
            owner.leave()
            await task
        await here.owner().run()
        assert here.check().status is BatchStatus.COMPLETED
        assert sum(here.callee.calls.values()) == TOTAL + len([n for n in range(TOTAL) if n % 5 == 1])

    with world() as here:
        asyncio.run(scenario(here))


@pytest.mark.parametrize("lost", ["has_room", "serves"])
def test_without_room_or_a_key_nothing_is_computed(lost: str) -> None:
    async def scenario(here: World) -> None:
        setattr(here, lost, False)
        with pytest.raises((CapacityError, PermissionDeniedError)):
            await here.owner().run()
        assert not here.callee.calls
        setattr(here, lost, True)
        task = asyncio.create_task(here.owner().run())
        while not here.callee.calls:
            await asyncio.sleep(0)
        setattr(here, lost, False)  # while it runs: what was sent is answered, and it ends, unless all was sent
        with contextlib.suppress(CapacityError, PermissionDeniedError):
            await task
        setattr(here, lost, True)
        if not here.store.batches[NAME].status.is_over:
            await here.owner().run()
        assert here.check().status is BatchStatus.COMPLETED

    with world() as here:
        asyncio.run(scenario(here))


def test_a_batch_ends_at_the_end_of_its_window_without_room_too() -> None:
    async def scenario(here: World) -> None:
        await here.owner().run()
        assert here.store.batches[NAME].status is BatchStatus.EXPIRED

    with world() as here:
        here.store.batches[NAME] = replace(here.store.batches[NAME], status=BatchStatus.IN_PROGRESS, total=TOTAL)
        here.folder().take_input(NAME, "file-1")
        here.has_room = False
        here.now_s += state_machine.WINDOW_S
        asyncio.run(scenario(here))
