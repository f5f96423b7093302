"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from tandem.core.files import write_private


def test_it_replaces_in_one_step_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_lends_it_neither_mode_nor_target(tmp_path: Path) -> None:
    """It may have the name of this process: process ids are used again."""
    path, left, elsewhere = tmp_path / "file", tmp_path / f".file.{os.getpid()}", tmp_path / "elsewhere"
    left.write_bytes(b"left")
    left.chmod(0o644)
    write_private(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    left.unlink(missing_ok=True)
    left.symlink_to(elsewhere)
    write_private(path, b"newer")
    assert (path.read_bytes(), path.is_symlink(), elsewhere.exists()) == (b"newer", False, False)


def test_the_folder_is_synced_behind_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def note(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_private(tmp_path / "file", b"new")
    assert synced == [(False, False), (True, True)]
