"""The logs of a cluster's processes, read as records: those there are, and what is appended."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import merge
from pathlib import Path

from tandem.core import logs

_RECORD = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<level>[A-Z]+) +(?P<component>\S+) (?P<text>.*)", re.DOTALL
)
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRecord:
    """One record, with the lines that follow it. Output of a process without a time has the time of the output before
    it, "" if there was none, and no level."""

    member: str
    time: str
    level: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Filter of records: from `since` (ISO, UTC) on, of `level` or worse, that name `request` or the request of one of
    its prompts (`request`-0, -1 …); "" = all."""

    since: str = ""
    level: str = ""
    request: str = ""

    def takes(self, record: ParsedRecord) -> bool:
        if self.since and record.time < self.since:
            return False
        if self.level and _severity(record.level) < _severity(self.level):
            return False
        named = rf"(?<![\w-]){re.escape(self.request)}(-\d+)?(?![\w-])"
        return not self.request or bool(re.search(named, record.text))


def members(folder: Path) -> list[str]:
    """Return the members that have logs."""
    return sorted({path.name.partition(".log")[0] for path in folder.glob("*.log*")})


def records(folder: Path, who: Collection[str]) -> Iterator[ParsedRecord]:
    """Yield all records of these members, in the order of time."""
    return merge(*(_of_member(folder, member) for member in who), key=lambda record: record.time)


@dataclass(slots=True)
class Tail:
    """Reads the records appended to one log after its end now, also after log rotation."""

    path: Path
    _inode: int = 0
    _position: int = 0
    _time: str = ""
    _rest: bytes = b""

    def skip(self) -> None:
        """Begin at the end."""
        if self.path.is_file():
            found = self.path.stat()
            self._inode, self._position = found.st_ino, found.st_size

    def read(self) -> list[ParsedRecord]:
        """Return the records completed by whole lines since the last call."""
        try:
            found = self.path.stat()
        except OSError:
            return []
        if found.st_ino != self._inode or found.st_size < self._position:
            self._inode, self._position, self._rest = found.st_ino, 0, b""
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = self._rest + file.read()
            self._position = file.tell()
        whole, _, self._rest = data.rpartition(b"\n")
        lines = whole.decode(errors="replace").split("\n") if whole else []
        made = list(_parsed(self.path.name.partition(".log")[0], lines, self._time))
        self._time = made[-1].time if made else self._time
        return made


def _of_member(folder: Path, member: str) -> Iterator[ParsedRecord]:
    return _parsed(member, _lines(folder / f"{member}.log.1", folder / f"{member}.log"), "")


def _lines(*paths: Path) -> Iterator[str]:
    for path in paths:
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    yield line.rstrip("\n")


def _parsed(member: str, lines: Iterable[str], time: str) -> Iterator[ParsedRecord]:
    """Lines that begin with blanks belong to the record before them."""
    last: ParsedRecord | None = None
    for line in lines:
        if last is not None and line[:1].isspace():
            last = replace(last, text=f"{last.text}\n{line}")
            continue
        if last is not None:
            yield last
        match = _RECORD.fullmatch(line)
        found = (match["time"], match["level"], match["text"]) if match else logs.read(line)
        time, level, text = found or (time, "", line)
        last = ParsedRecord(member=member, time=time, level=level, text=text)
    if last is not None:
        yield last


def _severity(level: str) -> int:
    """Rank of the level; 0 for a record without one."""
    return logging.getLevelNamesMapping().get(level, 0)
