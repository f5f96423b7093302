"""Events that a transfer's two ends report to the roles. Delivered from transport threads, or from the thread of the
call that caused them; the callback must not block. A transfer has exactly one outcome at each end, except that its
owner may still cancel a verified one."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Receiver: every byte of the ticket for this rank arrived and its checksums hold; a step may read the blocks.

    `last_wire_s`: from the moment when the last frame's send began (when it arrived, if the sender is on another
    machine and clocks cannot be compared) to `verified_at_s` on the receiver's clock. `bytes` were received.
    """

    transfer: TransferId
    last_wire_s: float
    verified_at_s: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Receiver: this attempt is over; nothing of it is written any more. The owner still calls `cancel`."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCompleted:
    """Sender: every receiving rank has verified its part; the source is no longer read."""

    transfer: TransferId
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """Sender: this attempt is over; the source is no longer read."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiesced:
    """Sender: cancelled; the source is no longer read."""

    transfer: TransferId


ReceiverEvent = Verified | Failed
SenderEvent = SendCompleted | SendFailed | Quiesced
