"""One page of shared memory a rank: the rank's pulse, and the lease that the host holds for it.

The rank writes when it last ticked, how many steps it has begun and which of them is in progress. The host writes
until when the rank may push, publish and send, and as which incarnation. Each field is one aligned 8-byte store, so a
reader never sees half.
"""

from __future__ import annotations

import mmap
import os
import struct

_DOUBLE = struct.Struct("d")  # native: one store, where another byte order would be packed byte by byte
_U64 = struct.Struct("Q")
_TICK, _STEPS, _STEP, _LEASE, _INCARNATION = 0, 8, 16, 64, 72
PAGE_BYTES = 4096


class Pulse:
    """Both ends map the same memfd. All times are CLOCK_MONOTONIC seconds."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, PAGE_BYTES)

    @classmethod
    def create(cls, name: str) -> Pulse:
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, PAGE_BYTES)
        return cls(descriptor)

    def tick(self, now_s: float) -> None:
        """The rank is alive (written by a thread that runs beside long steps)."""
        _DOUBLE.pack_into(self._map, _TICK, now_s)

    def begin_step(self) -> None:
        step: int = _U64.unpack_from(self._map, _STEPS)[0] + 1
        _U64.pack_into(self._map, _STEPS, step)
        _U64.pack_into(self._map, _STEP, step)

    def end_step(self) -> None:
        _U64.pack_into(self._map, _STEP, 0)

    def grant(self, until_s: float, incarnation: int = 0) -> None:
        """The host holds the lease until then, as this incarnation."""
        _U64.pack_into(self._map, _INCARNATION, incarnation)  # first: nobody takes the new lease for the old one's
        _DOUBLE.pack_into(self._map, _LEASE, until_s)

    def has_lease(self, now_s: float, incarnation: int) -> bool:
        """Whether the rank may push, publish and send now as `incarnation`; before the first grant it may.

        A lease that the host got as another incarnation is not for what was begun before.
        """
        until_s = self.lease_until_s  # before the incarnation, which was written first
        is_mine = self.incarnation in (0, incarnation)
        return until_s == 0.0 or (is_mine and now_s < until_s)

    @property
    def ticked_s(self) -> float:
        return self._double(_TICK)

    @property
    def step(self) -> int:
        """The number, from 1, of the step in progress; 0 between steps."""
        number: int = _U64.unpack_from(self._map, _STEP)[0]
        return number

    @property
    def lease_until_s(self) -> float:
        return self._double(_LEASE)

    @property
    def incarnation(self) -> int:
        """Whose lease it is; 0 before the first."""
        number: int = _U64.unpack_from(self._map, _INCARNATION)[0]
        return number

    def close(self) -> None:
        self._map.close()
        os.close(self.descriptor)

    def _double(self, at: int) -> float:
        value: float = _DOUBLE.unpack_from(self._map, at)[0]
        return value
