"""Outcome of a transfer over all ranks of one end: pure bookkeeping, no rings and no transports.

Every rank reports one event a transfer; the role gets one. Both tallies may be called from any thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tandem.core.ids import Rank, TransferId
from tandem.kvtransfer.events import Failed, Quiesced, ReceiverEvent, SendCompleted, SenderEvent, SendFailed, Verified


@dataclass(frozen=True, slots=True)
class AggregatedOutcome:
    """Result of one rank's event: the event for the role, if it is time, and if the others are to be cancelled."""

    report: ReceiverEvent | SenderEvent | None = None
    cancels_others: bool = False


@dataclass(slots=True)
class _Receiving:
    waiting: set[Rank]
    unexpecting: set[Rank]
    is_failed: bool = False
    last: Verified | None = None
    bytes: int = 0


class ReceiveAggregator:
    """Verified when every rank has verified; the first failure is the transfer's, and is reported at once."""

    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        self._ranks = ranks
        self._transfers: dict[TransferId, _Receiving] = {}
        self._news = threading.Condition()  # guards the above

    def expect(self, transfer: TransferId) -> None:
        """Call before the ranks are commanded."""
        with self._news:
            self._transfers[transfer] = _Receiving(set(self._ranks), set(self._ranks))

    def expected(self, rank: Rank, transfer: TransferId) -> None:
        """Note that `rank` takes its frames from now on."""
        with self._news:
            receiving = self._transfers.get(transfer)
            if receiving is not None:
                receiving.unexpecting.discard(rank)
                self._news.notify_all()

    def wait_expected(self, transfer: TransferId, timeout_s: float) -> bool:
        """Wait until every rank takes its frames, or one failed; False after `timeout_s`."""

        def is_settled() -> bool:
            receiving = self._transfers.get(transfer)
            return receiving is None or receiving.is_failed or not receiving.unexpecting

        with self._news:
            return self._news.wait_for(is_settled, timeout_s)

    def note(self, rank: Rank, event: ReceiverEvent) -> AggregatedOutcome:
        """Take in a rank's outcome. Those of transfers that ended here, and of failed ones, are ignored."""
        with self._news:
            receiving = self._transfers.get(event.transfer)
            if receiving is None or receiving.is_failed or rank not in receiving.waiting:
                return AggregatedOutcome()
            if isinstance(event, Failed):
                receiving.is_failed = True
                self._news.notify_all()
                return AggregatedOutcome(event, cancels_others=True)
            receiving.waiting.discard(rank)
            receiving.bytes += event.bytes
            if receiving.last is None or event.verified_at_s >= receiving.last.verified_at_s:
                receiving.last = event
            if receiving.waiting:
                return AggregatedOutcome()
            last = receiving.last
            return AggregatedOutcome(
                Verified(
                    transfer=event.transfer, last_wire_s=last.last_wire_s, verified_at_s=last.verified_at_s,
                    bytes=receiving.bytes,
                )
            )  # fmt: skip

    def forget(self, transfer: TransferId) -> None:
        """Forget an admitted or cancelled transfer: later reports about it are late."""
        with self._news:
            self._transfers.pop(transfer, None)
            self._news.notify_all()


@dataclass(slots=True)
class _Sending:
    reading: set[Rank]
    bytes: int = 0
    failure: SendFailed | None = None
    is_cancelled: bool = False


class SendTally:
    """Reports one event when the last rank no longer reads the source: Sent if all sent, else the first failure, else
    Quiesced."""

    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        self._ranks = ranks
        self._transfers: dict[TransferId, _Sending] = {}
        self._lock = threading.Lock()  # guards the above

    def open(self, transfer: TransferId) -> None:
        """Call before the ranks are commanded. Raises ValueError if it is open already."""
        with self._lock:
            if transfer in self._transfers:
                raise ValueError(f"transfer {transfer} is open already")
            self._transfers[transfer] = _Sending(set(self._ranks))

    def is_open(self, transfer: TransferId) -> bool:
        """True if some rank may still read the source."""
        with self._lock:
            return transfer in self._transfers

    def note(self, rank: Rank, event: SenderEvent) -> AggregatedOutcome:
        """Take in a rank's outcome; repeated ones and those of unknown transfers are ignored."""
        with self._lock:
            sending = self._transfers.get(event.transfer)
            if sending is None or rank not in sending.reading:
                return AggregatedOutcome()
            sending.reading.discard(rank)
            cancels = isinstance(event, SendFailed) and sending.failure is None and not sending.is_cancelled
            if isinstance(event, SendCompleted):
                sending.bytes += event.bytes
            elif isinstance(event, SendFailed):
                sending.failure = sending.failure or event
            else:
                sending.is_cancelled = True
            if sending.reading:
                return AggregatedOutcome(cancels_others=cancels)
            del self._transfers[event.transfer]
            return AggregatedOutcome(_sender_event(event.transfer, sending))

    def forget(self, transfer: TransferId) -> None:
        """Forget a transfer that never began."""
        with self._lock:
            self._transfers.pop(transfer, None)


def _sender_event(transfer: TransferId, sending: _Sending) -> SenderEvent:
    if sending.failure is not None:
        return sending.failure
    if sending.is_cancelled:
        return Quiesced(transfer=transfer)
    return SendCompleted(transfer=transfer, bytes=sending.bytes)
