"""The directory that all routers of a cluster share: files by id, and a folder of work for each batch that runs.

<directory>/directory            an id that the cluster remembers: no router takes an empty disk for the shared one
            files/<file>         the bytes of a file; written under another name first
            batches/<batch>/     input (the file's bytes, by another name) and the segments of the journal
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tandem.core.errors import ConfigError
from tandem.core.files import sync

_ID = re.compile(r"(file|batch)[-_][A-Za-z0-9_]{1,64}")


class FilesFolder:
    """Paths and the few operations on them. Everything here blocks: call it in a thread. All raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files, self._batches = root / "files", root / "batches"

    def identity(self) -> str:
        """The id of this directory, which is made with its sub-folders if it is missing. Raises ConfigError."""
        try:
            for folder in (self.root, self._files, self._batches):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self.root / "directory"
            if not path.exists():
                temporary = self.root / f".directory.{secrets.token_hex(8)}"
                _write(temporary, secrets.token_hex(16).encode())
                with contextlib.suppress(FileExistsError):  # another router was as quick
                    os.link(temporary, path)
                temporary.unlink()
                sync(self.root)
            return path.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"cannot use the directory for files {self.root}",
                why=error.strerror or str(error),
                todo="correct store.dir, or its permissions",
            ) from error

    def free_bytes(self) -> int:
        """Room that is left on its disk for us."""
        disk = os.statvfs(self.root)
        return disk.f_bavail * disk.f_frsize

    def file(self, file: str) -> Path:
        """Path of the bytes of a file."""
        return self._files / checked(file)

    def writer(self, file: str) -> FileWriter:
        """Begin to write a file."""
        return FileWriter(self.file(file), self._files / f".{checked(file)}.{secrets.token_hex(4)}")

    @contextlib.contextmanager
    def writing(self, file: str) -> Iterator[FileWriter]:
        """Write a file; it is there, whole and on disk, once the context is left without an error."""
        writer = self.writer(file)
        try:
            yield writer
            writer.commit()
        finally:
            writer.abort()

    def remove_file(self, file: str) -> None:
        """Remove its bytes, and what an upload that broke off left of them."""
        self.file(file).unlink(missing_ok=True)
        for partial in self._files.glob(f".{checked(file)}.*"):
            partial.unlink(missing_ok=True)

    def work(self, batch: str) -> Path:
        """The folder of a batch."""
        return self._batches / checked(batch)

    def input(self, batch: str) -> Path:
        """The bytes of a batch's input, once `take_input` has run."""
        return self.work(batch) / "input"

    def take_input(self, batch: str, file: str) -> None:
        """Keep the bytes of `file` for `batch`, whatever becomes of the file. FileNotFoundError: they are gone."""
        work, kept = self.work(batch), self.input(batch)
        if kept.exists():
            return
        work.mkdir(exist_ok=True, mode=0o700)
        try:
            os.link(self.file(file), kept)
        except FileExistsError:
            return
        except FileNotFoundError:
            raise
        except OSError:  # no links on this file system
            temporary = work / f".input.{secrets.token_hex(4)}"
            shutil.copyfile(self.file(file), temporary)
            sync(temporary)
            temporary.replace(kept)
        sync(work)
        sync(self._batches)

    def has_lost_input(self, batch: str) -> bool:
        """True if the directory is here and the input of a batch is not."""
        return (self.root / "directory").exists() and not self.input(batch).exists()

    def remove_work(self, batch: str) -> None:
        """Remove the folder of a batch that is over."""
        shutil.rmtree(self.work(batch), ignore_errors=True)

    def changed_s(self, batch: str) -> float:
        """When something was last made or removed in the folder of a batch, in seconds since 1970."""
        return self.work(batch).stat().st_mtime

    def works(self) -> list[str]:
        """Ids of the batches that have a folder."""
        return [path.name for path in self._batches.iterdir() if _ID.fullmatch(path.name)]


class FileWriter:
    """A file that is there under its name once `commit` returned, whole and on disk, and not at all before.

    `abort` may come while another thread still writes.
    """

    def __init__(self, final: Path, partial: Path) -> None:
        self._final, self._partial = final, partial
        self._stream: BinaryIO | None = None
        self._is_over = False
        self._lock = threading.Lock()
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        with self._lock:
            self._opened().write(data)
            self.size_bytes += len(data)

    def commit(self) -> None:
        with self._lock:
            stream = self._opened()
            stream.flush()
            os.fsync(stream.fileno())
            self._close()
            self._partial.replace(self._final)
            sync(self._final.parent)

    def abort(self) -> None:
        """Leave nothing; does nothing after `commit`."""
        with self._lock:
            self._close()
            self._partial.unlink(missing_ok=True)

    def _opened(self) -> BinaryIO:
        if self._is_over:
            raise OSError("the file is closed")
        if self._stream is None:
            self._stream = self._partial.open("xb")
        return self._stream

    def _close(self) -> None:
        self._is_over = True
        if self._stream is not None:
            self._stream.close()


def is_id(text: str) -> bool:
    """True if `text` could be the id of a file or batch; ids of clients become names of files."""
    return _ID.fullmatch(text) is not None


def checked(text: str) -> str:
    if not is_id(text):
        raise ValueError(f"{text!r} is not an id")
    return text


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
