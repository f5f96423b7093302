"""A transfer end's open transfers as values, for audits and leases. Taken without a transfer's lock: each field is
true, all of them together only for a transfer that stands still."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import Attempt, Incarnation, RequestId, TransferId, WorkerId
from tandem.kvtransfer.state import TransferPhase, TransferState
from tandem.kvtransfer.ticket import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransfer:
    """A transfer that can still move bytes or waits to be taken over. `bytes` went through this rank so far."""

    transfer: TransferId
    request: RequestId
    attempt: Attempt
    sender: WorkerId
    sender_incarnation: Incarnation
    receiver: WorkerId
    receiver_incarnation: Incarnation
    phase: TransferPhase
    age_s: float
    bytes: int


def open_transfer(ticket: Ticket, state: TransferState, moved_bytes: int) -> OpenTransfer:
    """Return the snapshot of one end."""
    return snapshot_of(ticket, state.phase, state.age_s(), moved_bytes)


def snapshot_of(ticket: Ticket, phase: TransferPhase, age_s: float, moved_bytes: int) -> OpenTransfer:
    """Return a snapshot with the ticket's fields and the transfer's progress."""
    return OpenTransfer(
        transfer=ticket.transfer,
        request=ticket.request,
        attempt=ticket.attempt,
        sender=ticket.sender,
        sender_incarnation=ticket.sender_incarnation,
        receiver=ticket.receiver,
        receiver_incarnation=ticket.receiver_incarnation,
        phase=phase,
        age_s=age_s,
        bytes=moved_bytes,
    )
