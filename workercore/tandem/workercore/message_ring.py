"""A single-producer, single-consumer ring of byte messages in shared memory, between two processes of a worker.

    0        8        64       72       128
    ┌────────┬───┄────┬────────┬───┄────┬──────────────────────────────┐
    │ head   │        │ tail   │        │ [u32 length][payload] …      │
    └────────┴───┄────┴────────┴───┄────┴──────────────────────────────┘
      written by the producer   by the consumer; both only ever grow

A length of 0xFFFFFFFF sends the reader back to offset 0. Positions are published before the eventfd is written and read
after it, so the system call orders them on every architecture. One thread a side.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
from dataclasses import dataclass

_DATA = 128
_HEAD, _TAIL = 0, 64
_U64 = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_WRAP = 0xFFFFFFFF
DEFAULT_BYTES = 8 * 1024 * 1024
REPORT_BYTES = 1024 * 1024


class MessageTooLargeError(ValueError):
    """No ring of this size can ever hold the message."""


@dataclass(frozen=True, slots=True)
class RingHandle:
    """The three descriptors that a child process inherits to open one ring."""

    memory: int
    filled: int
    drained: int

    @classmethod
    def create(cls, name: str, size: int = DEFAULT_BYTES) -> RingHandle:
        """New shared memory of `size` data bytes and its two eventfds; the caller owns the descriptors."""
        memory = os.memfd_create(name)
        os.ftruncate(memory, _DATA + size)
        return cls(memory, os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK))

    @classmethod
    def parse(cls, text: str) -> RingHandle:
        memory, filled, drained = map(int, text.split(","))
        return cls(memory, filled, drained)

    def __str__(self) -> str:
        return f"{self.memory},{self.filled},{self.drained}"

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return (self.memory, self.filled, self.drained)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class RingPair:
    """Both directions between two ranks of one worker: commands to the follower, and its reports."""

    commands: RingHandle
    reports: RingHandle

    @classmethod
    def create(cls, name: str) -> RingPair:
        return cls(RingHandle.create(f"{name}-commands"), RingHandle.create(f"{name}-reports", REPORT_BYTES))

    @classmethod
    def parse(cls, text: str) -> RingPair:
        commands, reports = text.split(":")
        return cls(RingHandle.parse(commands), RingHandle.parse(reports))

    def __str__(self) -> str:
        return f"{self.commands}:{self.reports}"

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (*self.commands.descriptors, *self.reports.descriptors)

    def close(self) -> None:
        self.commands.close()
        self.reports.close()


class _Ring:
    def __init__(self, handle: RingHandle) -> None:
        self.handle = handle
        self._map = mmap.mmap(handle.memory, 0)
        self._size = len(self._map) - _DATA

    def _position(self, at: int) -> int:
        position: int = _U64.unpack_from(self._map, at)[0]
        return position

    def close(self) -> None:
        """Unmap; the descriptors stay the creator's."""
        self._map.close()


class RingWriter(_Ring):
    """The producing end."""

    @property
    def max_message_bytes(self) -> int:
        """The longest message that always fits an empty ring."""
        return self._size // 2 - 8

    def try_write(self, message: bytes) -> bool:
        """Append one message and wake the reader; False if there is no room now. Raises MessageTooLargeError."""
        need = 4 + len(message)
        if len(message) > self.max_message_bytes:
            raise MessageTooLargeError(f"{len(message)} bytes do not fit a ring of {self._size}")
        head, tail = self._position(_HEAD), self._position(_TAIL)
        offset = head % self._size
        to_end = self._size - offset
        skip = to_end if need > to_end else 0
        if head + skip + need - tail > self._size:
            return False
        if skip:
            if to_end >= 4:
                _LENGTH.pack_into(self._map, _DATA + offset, _WRAP)
            offset = 0
        _LENGTH.pack_into(self._map, _DATA + offset, len(message))
        self._map[_DATA + offset + 4 : _DATA + offset + need] = message
        _U64.pack_into(self._map, _HEAD, head + skip + need)
        os.eventfd_write(self.handle.filled, 1)
        return True

    def write(self, message: bytes, timeout_s: float) -> None:
        """Append one message, waiting for room up to `timeout_s`. Raises TimeoutError when the reader is stuck, and
        MessageTooLargeError."""
        while not self.try_write(message):
            ready, _, _ = select.select([self.handle.drained], [], [], timeout_s)
            if not ready:
                raise TimeoutError(f"the reader of the ring read nothing for {timeout_s} s")
            _clear(self.handle.drained)


class RingReader(_Ring):
    """The consuming end. Wait on `filled` (an eventfd), then call `read_all`."""

    @property
    def filled(self) -> int:
        return self.handle.filled

    def read_all(self, limit: int = 256) -> list[bytes]:
        """Take up to `limit` messages; leaves `filled` set if more are there."""
        _clear(self.handle.filled)
        head, tail = self._position(_HEAD), self._position(_TAIL)
        messages: list[bytes] = []
        while tail < head and len(messages) < limit:
            offset = tail % self._size
            to_end = self._size - offset
            length = _LENGTH.unpack_from(self._map, _DATA + offset)[0] if to_end >= 4 else _WRAP
            if length == _WRAP:
                tail += to_end
                continue
            start = _DATA + offset + 4
            messages.append(self._map[start : start + length])
            tail += 4 + length
        if messages:
            _U64.pack_into(self._map, _TAIL, tail)
            os.eventfd_write(self.handle.drained, 1)
        if tail < head:
            os.eventfd_write(self.handle.filled, 1)
        return messages


def _clear(descriptor: int) -> None:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        return
