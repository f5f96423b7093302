"""One page of shared memory a rank: the rank's pulse, and the lease that the host holds for it.

The rank writes the time of its last tick, the number of steps begun and the step in progress. The host writes until
when the rank may push, publish and send, as which incarnation, and the number of its requests for stacks of threads.
Each field is one aligned 8-byte store, so a reader never sees half: through a view of words, as `struct` clears its
target first.
"""

from __future__ import annotations

import mmap
import os

_TICK, _STEPS, _STEP, _LEASE, _INCARNATION, _STACKS = 0, 1, 2, 8, 9, 10
"""Indexes of words; those that the host writes are in a cache line of their own."""
PAGE_BYTES = 4096


class Pulse:
    """Both ends map the same memfd. All times are seconds of `MonotonicClock`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self._numbers, self._seconds = memoryview(self._map).cast("Q"), memoryview(self._map).cast("d")

    @classmethod
    def create(cls, name: str) -> Pulse:
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, PAGE_BYTES)
        return cls(descriptor)

    def tick(self, now_s: float) -> None:
        """Mark the rank as alive (called by a thread that runs beside long steps)."""
        self._seconds[_TICK] = now_s

    def begin_step(self) -> None:
        step = self._numbers[_STEPS] + 1
        self._numbers[_STEPS] = step
        self._numbers[_STEP] = step

    def end_step(self) -> None:
        self._numbers[_STEP] = 0

    def grant(self, until_s: float, incarnation: int = 0) -> None:
        """Set the lease that the host holds: until then, as this incarnation."""
        self._numbers[_INCARNATION] = incarnation  # first: the new lease is never taken for the old one's
        self._seconds[_LEASE] = until_s

    def ask_stacks(self) -> None:
        """Request that the rank logs the stacks of its threads."""
        self._numbers[_STACKS] += 1

    def has_lease(self, now_s: float, incarnation: int) -> bool:
        """True if the rank may push, publish and send now as `incarnation`; before the first grant it may.

        A lease that the host got as another incarnation is not for what was begun before.
        """
        until_s = self.lease_until_s  # before the incarnation, which was written first
        is_mine = self.incarnation in (0, incarnation)
        return until_s == 0.0 or (is_mine and now_s < until_s)

    @property
    def ticked_s(self) -> float:
        return self._seconds[_TICK]

    @property
    def step(self) -> int:
        """The number, from 1, of the step in progress; 0 between steps."""
        return self._numbers[_STEP]

    @property
    def lease_until_s(self) -> float:
        return self._seconds[_LEASE]

    @property
    def incarnation(self) -> int:
        """The incarnation that has the lease; 0 before the first."""
        return self._numbers[_INCARNATION]

    @property
    def stacks_asked(self) -> int:
        """Number of the host's requests for stacks."""
        return self._numbers[_STACKS]

    def close(self) -> None:
        self._numbers.release()
        self._seconds.release()
        self._map.close()
        os.close(self.descriptor)
