"""Measures the throughput of one link while it is busy, and compares it with the expected one. Pure.

Busy: a job is being written (which waits while the window is full), or all of a transfer was written and the receiver
has not answered yet. Time in which a prompt is computed and nothing is in flight does not count.
"""

from __future__ import annotations

import threading

from tandem.core.clock import Clock
from tandem.core.ids import TransferId

FAR = 4.0
"""Transfers that take this many times as long as measured, or this part of it, make the measurement suspicious …"""
ENOUGH_BYTES, ENOUGH_TRANSFERS = 64 << 20, 32
"""… once so much went over it, or so many …"""
LEAST_BUSY_S = 0.25
"""… and it was busy for so long: less than that reflects the machine's scheduler more than the link."""

TELLING_BYTES = 1 << 20
"""A smaller transfer has no meaningful rate: its time is round trips."""


class LinkMeter:
    """Meters one link: the link's thread writes, its reply thread answers, any thread reads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._is_writing = False
        self._unanswered: set[TransferId] = set()
        self._since_s: float | None = None  # busy since then
        self._busy_s = 0.0
        self._bytes = self._waits = self._transfers = 0
        self._last_rate = 0.0

    @property
    def is_busy(self) -> bool:
        with self._lock:
            return self._since_s is not None

    def begin(self) -> None:
        """A job is being written."""
        with self._lock:
            self._is_writing = True
            self._waits += 1
            self._settle()

    def wrote(self, size: int) -> None:
        """The job is written, `size` bytes of payload."""
        with self._lock:
            self._is_writing = False
            self._bytes += size
            self._settle()

    def finishing(self, transfer: TransferId) -> None:
        """The end of a transfer is about to be written; the receiver answers when it has all of it."""
        with self._lock:
            self._unanswered.add(transfer)
            self._settle()

    def answered(self, transfer: TransferId) -> None:
        """The receiver answered, or will not be asked."""
        with self._lock:
            if transfer in self._unanswered:
                self._unanswered.remove(transfer)
                self._transfers += 1
                self._settle()

    def achieved_bytes_per_s(self) -> float:
        """Since the last `restart`, or before it if less than TELLING_BYTES went over it since; 0 = too little yet."""
        with self._lock:
            return self._rate_now() or self._last_rate

    def is_far_above(self, bytes_per_s: float) -> bool:
        """True if it carried FAR times as much as a link of that speed would have while busy."""
        with self._lock:
            busy_s = self._busy_now_s()
            return self._bytes >= ENOUGH_BYTES and 0 < FAR * busy_s * bytes_per_s < self._bytes

    def is_far_below(self, bytes_per_s: float, latency_s: float) -> bool:
        """True if it was busy FAR times as long as a link with these figures would have been."""
        with self._lock:
            busy_s = self._busy_now_s()
            is_enough = self._bytes >= ENOUGH_BYTES or self._transfers >= ENOUGH_TRANSFERS
            if not is_enough or busy_s < LEAST_BUSY_S or bytes_per_s <= 0:
                return False
            return busy_s > FAR * (self._bytes / bytes_per_s + (self._waits + self._transfers) * latency_s)

    def restart(self) -> None:
        """Count anew from now on."""
        with self._lock:
            now_s = self._clock.now_s()
            self._last_rate = self._rate_now() or self._last_rate
            self._busy_s, self._bytes, self._waits, self._transfers = 0.0, 0, 0, 0
            self._since_s = now_s if self._since_s is not None else None

    def _settle(self) -> None:
        is_busy = self._is_writing or bool(self._unanswered)
        now_s = self._clock.now_s()
        if is_busy and self._since_s is None:
            self._since_s = now_s
        elif not is_busy and self._since_s is not None:
            self._busy_s += now_s - self._since_s
            self._since_s = None

    def _rate_now(self) -> float:
        busy_s = self._busy_now_s()
        return self._bytes / busy_s if self._bytes >= TELLING_BYTES and busy_s > 0 else 0.0

    def _busy_now_s(self) -> float:
        return self._busy_s + (0.0 if self._since_s is None else self._clock.now_s() - self._since_s)
