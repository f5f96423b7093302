"""Journal of a batch's answers, on disk: a kill at any moment loses at most unfinished work.

A journal is a folder of *segments*. A segment is written by one owner, named for its turn and incarnation, and never by
another: an owner that lost its lease without noticing cannot damage its successor's segments. Segments are only
appended to, and an entry counts once it is on disk. Reading takes the segments in the order of their names and of
several answers to one request the first, so whatever was written twice stands once in the output.

An entry is one line: `number is_ok crc32 input cached output ` and the result, JSON without line breaks. A torn end
fails its checksum.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.core.files import sync
from tandem.core.ids import Incarnation
from tandem.router.storage.batches.state_machine import Tally

_NAME = re.compile(r"(\d{8})-(\d+)\.journal")
_HEAD = re.compile(rb"(\d+) ([01]) ([0-9a-f]{8}) (\d+) (\d+) (\d+) ")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """The answer to the request number `number` (from 0) and the tokens that it took."""

    number: int
    is_ok: bool
    result: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ResultLocation:
    """Position of an answer's result."""

    segment: Path
    offset: int
    size: int
    is_ok: bool


class Journal:
    """All answers of one batch, and the segment of one owner. Used by one event loop; disk work runs in threads."""

    def __init__(self, folder: Path, incarnation: Incarnation) -> None:
        self._folder, self._incarnation = folder, incarnation
        self.places: dict[int, ResultLocation] = {}
        """Of every answered request, by number."""
        self.tally = Tally()
        self._segment: _Segment | None = None
        self._unwritten: list[JournalEntry] = []
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Read everything that others wrote, and begin a segment. Raises OSError."""
        names = await asyncio.to_thread(_segments, self._folder)
        for path in names:
            for entry, place in await asyncio.to_thread(_read, path):
                self._note(entry, place)
        turn = int(names[-1].name[:8]) + 1 if names else 1
        path = self._folder / f"{turn:08d}-{self._incarnation}.journal"
        self._segment = _Segment(path)

    async def append(self, entry: JournalEntry) -> None:
        """Returns once the entry is on disk; many that wait share one write. Raises OSError, then this journal ends."""
        self._unwritten.append(entry)
        async with self._lock:
            if not any(waiting is entry for waiting in self._unwritten):
                return  # the task that held the lock wrote it
            entries, self._unwritten = self._unwritten, []
            segment = self._segment
            if segment is None:
                raise OSError("the journal is closed")
            starts = await asyncio.to_thread(segment.write, [encode(one) for one in entries])
            for one, start in zip(entries, starts, strict=True):
                self._note(one, ResultLocation(segment.path, start, len(one.result), one.is_ok))

    async def close(self) -> None:
        """No more entries; safe to call again, and while an entry is being written."""
        segment, self._segment = self._segment, None
        if segment is not None:
            await asyncio.to_thread(segment.close)

    def _note(self, entry: JournalEntry, place: ResultLocation) -> None:
        if entry.number in self.places:
            return
        self.places[entry.number] = place
        self.tally = Tally(
            completed=self.tally.completed + entry.is_ok,
            failed=self.tally.failed + (not entry.is_ok),
            input_tokens=self.tally.input_tokens + entry.input_tokens,
            cached_tokens=self.tally.cached_tokens + entry.cached_tokens,
            output_tokens=self.tally.output_tokens + entry.output_tokens,
        )


def encode(entry: JournalEntry) -> bytes:
    """The line of an entry, with its end."""
    counts = b"%d %d %d " % (entry.input_tokens, entry.cached_tokens, entry.output_tokens)
    return (
        b"%d %d %08x " % (entry.number, entry.is_ok, zlib.crc32(counts + entry.result)) + counts + entry.result + b"\n"
    )


def decode(line: bytes) -> tuple[JournalEntry, int] | None:
    """The entry of a whole line without its end, and where its result begins; None when it is torn or damaged."""
    head = _HEAD.match(line)
    if head is None or zlib.crc32(line[head.start(4) :]) != int(head[3], 16):
        return None
    entry = JournalEntry(
        number=int(head[1]),
        is_ok=head[2] == b"1",
        result=line[head.end() :],
        input_tokens=int(head[4]),
        cached_tokens=int(head[5]),
        output_tokens=int(head[6]),
    )
    return entry, head.end()


def read_segment(path: Path) -> Iterator[tuple[JournalEntry, ResultLocation]]:
    """The whole entries of a segment, in order, without their results, and where those lie."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return  # torn: its writer died, or is writing
            found = decode(line[:-1])
            if found is not None:
                entry, start = found
                yield replace(entry, result=b""), ResultLocation(path, offset + start, len(entry.result), entry.is_ok)
            offset += len(line)


def _segments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _read(path: Path) -> list[tuple[JournalEntry, ResultLocation]]:
    return list(read_segment(path))


class _Segment:
    """A file for one writer, made with its first entry. A close waits for a write that another thread is busy with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._is_over = False
        self._size = 0
        self._lock = threading.Lock()

    def write(self, lines: list[bytes]) -> list[int]:
        """Append and sync; returns where each line's result begins."""
        data = b"".join(lines)
        with self._lock:
            if self._is_over:
                raise OSError("the journal is closed")
            try:
                if self._fd < 0:
                    self._fd = os.open(self.path, _NEW, 0o600)
                    sync(self.path.parent)
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd, view) :]
                os.fdatasync(self._fd)
            except OSError:
                self._shut()  # what half stands there must stay the end
                raise
            starts = []
            for line in lines:
                head = _HEAD.match(line)
                assert head is not None
                starts.append(self._size + head.end())
                self._size += len(line)
        return starts

    def close(self) -> None:
        with self._lock:
            self._shut()

    def _shut(self) -> None:
        self._is_over = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
