"""One dialled connection: the transport's link, the thread that reads its replies, and PROBE frames to measure it."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.core.ids import Attempt, Incarnation, Rank, TransferId
from tandem.core.timeout_scale import patient
from tandem.kernels import kv_payload
from tandem.kvtransfer.device_payload import DeviceLink
from tandem.kvtransfer.frame import Checksum, Frame, FrameKind, FrameReply, ReplyKind
from tandem.kvtransfer.transports.base import Link, LinkClosedError

NO_TRANSFER = TransferId(0)
PINGS = 5
PING_BYTES = 64
FIRST_ROUND_BYTES = 64 << 10
MOST_BYTES = 16 << 20
MOST_S = 0.04
LAST_ROUNDS = 2
"""Last rounds, the largest, that count: small ones fit into caches, and one alone may hit a busy moment."""
ANSWER_TIMEOUT_S = patient(3.0)
_PATTERN = bytes(range(256)) * 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """`bytes_per_s` of the faster of the last rounds, `latency_s` is the median round trip of small frames."""

    bytes_per_s: float
    latency_s: float


class ProbedConnection:
    """Owns the link from `start` to `end`. `on_reply` and `on_end` are called on the reading thread, `on_reply` not for
    answers to probes, `on_end` once, with the reason, whichever side ended it. One thread sends."""

    def __init__(
        self,
        link: Link,
        *,
        on_reply: Callable[[FrameReply], None],
        on_end: Callable[[ProbedConnection, str], None],
        clock: Clock,
    ) -> None:
        self.link = link
        self._on_reply, self._on_end, self._clock = on_reply, on_end, clock
        self._heard = threading.Condition()  # guards the three below
        self._answers = self._sent = 0
        self._end_reason: str | None = None
        self._thread = threading.Thread(target=self._read, name="kv-out-replies", daemon=True)

    def start(self) -> None:
        """Raises RuntimeError if no thread is available; `end` gives everything back then too."""
        self._thread.start()

    def end(self) -> None:
        """Hang up, and give everything back once nothing uses it. Not from the reading thread."""
        self.link.close()
        if self._thread.ident is not None:  # else `start` found no thread
            self._thread.join()
        self.link.release()

    def measure(self, rank: Rank) -> Measured:
        """Send probes to that rank: small ones for the latency, then rounds of doubling size, each answered in full
        before the next, up to MOST_BYTES, or to MOST_S without the longest of them: a process that stands still for a
        moment reveals nothing about the link. Raises LinkClosedError, also if answers fail to come."""
        trips = [self._round(rank, PING_BYTES, PING_BYTES) for _ in range(PINGS)]
        latency_s = statistics.median(trips)
        most = self.link.max_payload_bytes
        if not isinstance(self.link, DeviceLink):
            most = min(most, len(_PATTERN))
        size, sent, rates = FIRST_ROUND_BYTES, 0, list[float]()
        all_s = longest_s = 0.0
        while sent + size <= MOST_BYTES and all_s - longest_s < MOST_S:
            took_s = self._round(rank, size, min(size, most))
            rates.append(size / max(took_s, 1e-9))
            sent, size = sent + size, size * 2
            all_s, longest_s = all_s + took_s, max(longest_s, took_s)
        return Measured(max(rates[-LAST_ROUNDS:]), latency_s)

    def _round(self, rank: Rank, size: int, frame_bytes: int) -> float:
        """Send `size` bytes in frames and wait for every answer; return the seconds taken."""
        began_s = self._clock.now_s()
        while size > 0:
            self._send(rank, min(size, frame_bytes))
            self._sent += 1
            size -= frame_bytes
        with self._heard:
            wanted = self._sent
            self._heard.wait_for(lambda: self._answers >= wanted or self._end_reason is not None, ANSWER_TIMEOUT_S)
            if self._end_reason is not None:
                raise LinkClosedError(self._end_reason)
            if self._answers < wanted:
                raise LinkClosedError(f"no answer to a probe within {ANSWER_TIMEOUT_S:g} s")
        return self._clock.now_s() - began_s

    def _send(self, rank: Rank, size: int) -> None:
        """One probe: of the pattern, or between devices of whatever lies there, which costs no way to the host."""
        if isinstance(self.link, DeviceLink):
            with self.link.reserve_on_device(size) as place:
                self.link.commit_on_device(_probe(rank, size, *place.checksum()), place)
            return
        with self.link.reserve(size) as room:
            room[:] = memoryview(_PATTERN)[:size]
            self.link.commit(_probe(rank, size, kv_payload.crc32(room)), room)

    def _read(self) -> None:
        reason = "its reader broke"
        try:
            for reply in self.link.replies():
                if reply.transfer != NO_TRANSFER:
                    self._on_reply(reply)
                    continue
                if reply.kind is ReplyKind.FAIL:
                    raise LinkClosedError(f"a probe was refused: {reply.reason}")
                with self._heard:
                    self._answers += 1
                    self._heard.notify_all()
        except LinkClosedError as error:
            reason = str(error)
        finally:  # also if the callback raised: a link without reader must not look alive
            with self._heard:
                self._end_reason = reason
                self._heard.notify_all()
            self._on_end(self, reason)


def _probe(rank: Rank, size: int, crc: int, kind: Checksum = Checksum.CRC32) -> Frame:
    return Frame(
        kind=FrameKind.PROBE, transfer=NO_TRANSFER, attempt=Attempt(0), source_incarnation=Incarnation(0),
        dest_incarnation=Incarnation(0), source_rank=Rank(0), source_ranks=1, dest_rank=rank,
        payload_bytes=size, payload_crc=crc, checksum=kind,
    )  # fmt: skip
