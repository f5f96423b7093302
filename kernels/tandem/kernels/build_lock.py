"""Locks and notices for compiling C code: compiler runs, one maker per library, and draft files.

A draft is made while its maker holds a shared lock on the cache's directory. An exclusive lock proves that no process
or container of this machine is making one: drafts that are there were left by makers that were killed.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DRAFTS = ".*.so-*"


class CompilerWatch:
    """Reports when compilers run in this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._tell: Callable[[bool], None] = lambda _: None

    @contextmanager
    def told(self, tell: Callable[[bool], None]) -> Iterator[None]:
        """Report compiler runs during the block. `tell(True)` is called before the first of those that run side by
        side, and `tell(False)` after the last one, by the threads that wait for them, one at a time."""
        with self._lock:
            before, self._tell = self._tell, tell
        try:
            yield
        finally:
            with self._lock:
                self._tell = before

    @contextmanager
    def running(self) -> Iterator[None]:
        """A compiler runs during the block."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            was_running, self._running = self._running > 0, self._running + more
            if was_running != (self._running > 0):
                self._tell(not was_running)


WATCH = CompilerWatch()
"""The watch of this process."""


@contextmanager
def one_maker(library: Path) -> Iterator[None]:
    """No other process of this machine makes `library` during the block; it waits for one that does. Raises OSError."""
    descriptor = os.open(library.with_name(f".{library.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # a file system without such locks: each makes its own
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def draft_of(library: Path) -> Iterator[Path]:
    """A new file beside `library` to build it into. What is still there behind the block is removed. Raises OSError."""
    with _held(library.parent, fcntl.LOCK_SH):
        descriptor, name = tempfile.mkstemp(prefix=f".{library.name}-", dir=library.parent)
        os.close(descriptor)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)


def remove_stale_drafts(directory: Path) -> None:
    """Remove drafts without a living maker. While one is being made, or where directories cannot be locked, none is
    looked at; the next start does it."""
    with suppress(OSError), _held(directory, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_held:
        for draft in directory.glob(_DRAFTS) if is_held else ():
            draft.unlink(missing_ok=True)


@contextmanager
def _held(directory: Path, how: int) -> Iterator[bool]:
    """Lock `directory` during the block; yield False if it could not be. A process that ends releases the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_held = True
        try:
            fcntl.flock(descriptor, how)
        except OSError:  # locked by another process, or a file system without such locks
            is_held = False
        yield is_held
    finally:
        os.close(descriptor)
