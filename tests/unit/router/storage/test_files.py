"""Sweeping of the directory of files: one bad entry keeps nothing else."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tandem.core.batch import BatchRecord, BatchStatus
from tandem.core.errors import UnavailableError
from tandem.router.storage.batches.file_store import FilesFolder
from tandem.router.storage.files import KEPT_S, ORPHAN_S, Files, KeptLimits, sweep

NOW_S = 2_000_000_000.0
LIMITS = KeptLimits(max_file_bytes=1, max_tenant_file_bytes=1, max_tenant_open_batches=1, min_free_bytes=0)


class FileStore:
    def __init__(self) -> None:
        self.files: list[str] = []

    async def due(self, now_s: float, skip: int = 0) -> Sequence[str]:
        return self.files[skip : skip + 100]

    async def forget(self, file: str) -> None:
        self.files.remove(file)


class BatchStore:
    """Raises what stands in place of a record; one that is None cannot be read."""

    def __init__(self) -> None:
        self.records: dict[str, BatchRecord | Exception | None] = {}

    async def load(self, batch: str) -> BatchRecord | None:
        record = self.records.get(batch)
        if isinstance(record, Exception):
            raise record
        return record

    async def is_known(self, batch: str) -> bool:
        return batch in self.records

    async def forget_due(self, now_s: float) -> None:
        return


class Case:
    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.batches = FilesFolder(folder), FileStore(), BatchStore()
        self.folder.identity()

    def work(self, batch: str, age_s: float, status: BatchStatus | None) -> None:
        """A batch's folder that was last changed so long ago; with `status`, its record, which ended then."""
        work = self.folder.work(batch)
        work.mkdir()
        (work / "input").write_bytes(b"{}")
        os.utime(work, (NOW_S - age_s, NOW_S - age_s))
        if status is not None:
            self.batches.records[batch] = BatchRecord(
                id=batch, tenant="a", endpoint="/v1/completions", input_file="file-1", created_s=0, expires_s=1,
                status=status, completed_s=int(NOW_S - age_s),
            )  # fmt: skip

    def sweep(self) -> list[str]:
        """Returns which batches' folders are left."""
        files = Files(cast(Any, self.files), self.folder, 60.0, lambda: NOW_S, LIMITS)
        asyncio.run(sweep(files, cast(Any, self.batches)))
        return sorted(self.folder.works())


def test_folders_of_batches_that_are_over_or_never_came_to_be_are_removed(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.work("batch_over", KEPT_S + 2, BatchStatus.COMPLETED)
    case.work("batch_open", ORPHAN_S + 2, BatchStatus.IN_PROGRESS)
    case.work("batch_orphan", ORPHAN_S + 2, None)
    case.work("batch_young", ORPHAN_S - 2, None)
    assert case.sweep() == ["batch_open", "batch_young"]


def test_a_record_that_cannot_be_read_keeps_nothing_else(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.work("batch_0", ORPHAN_S + 2, None)
    case.batches.records["batch_0"] = ValueError("'later' is not a valid BatchStatus")
    case.work("batch_1", ORPHAN_S + 2, None)
    case.files.files = ["no id", "file-1"]
    case.folder.file("file-1").write_bytes(b"x")
    assert case.sweep() == ["batch_0"]
    assert case.files.files == ["no id"]
    assert not case.folder.file("file-1").exists()


def test_any_number_that_is_due_is_removed_and_what_fails_stops_none(tmp_path: Path) -> None:
    case = Case(tmp_path)
    wrong = [f"no id {number}" for number in range(150)]
    case.files.files = [*wrong, *(f"file-{number}" for number in range(350))]
    case.sweep()
    assert case.files.files == wrong


def test_an_input_is_on_disk_before_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without links, too."""

    def link(source: Path, target: Path) -> None:
        raise OSError("no links here")

    synced: list[int] = []
    sync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        sync(fd)

    folder = FilesFolder(tmp_path)
    folder.identity()
    folder.file("file-1").write_bytes(b"x")
    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "fsync", note)
    folder.take_input("batch_1", "file-1")
    assert folder.input("batch_1").stat().st_ino == synced[0]


def test_what_is_behind_a_record_of_another_release_stays(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.work("batch_0", ORPHAN_S + 2, None)
    case.batches.records["batch_0"] = None
    assert case.sweep() == ["batch_0"]


def test_without_redis_nothing_is_removed(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.work("batch_0", ORPHAN_S + 2, None)
    case.batches.records["batch_0"] = UnavailableError("Redis is away")
    with pytest.raises(UnavailableError):
        case.sweep()
    assert case.folder.works() == ["batch_0"]
