"""State machine of one transfer, the same at both ends. No sockets, no threads, no bytes.

    reserved ──▶ pushing ──▶ complete ──▶ verified ──▶ admitted
        └───────────┴───────────┴───────────┴──▶ failed | cancelled ──▶ fenced ──▶ released

Receiver: bytes arrive (pushing), coverage is complete, checksums hold (verified), the request is admitted. Sender:
bytes leave, all of them are handed over (complete), every rank verified them, its part is done (admitted).
`admitted` and `released` are terminal; a transfer reaches exactly one of them. `fenced` means that no byte of it can
move any more: the quiescence after which its memory may be released.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tandem.core.clock import Clock
from tandem.core.ids import TransferId
from tandem.kvtransfer.ticket import Ticket


class TransferPhase(StrEnum):
    """Where a transfer is."""

    RESERVED = "reserved"
    PUSHING = "pushing"
    COMPLETE = "complete"
    VERIFIED = "verified"
    ADMITTED = "admitted"
    FAILED = "failed"
    CANCELLED = "cancelled"
    FENCED = "fenced"
    RELEASED = "released"


_P = TransferPhase
_GIVEN_UP = frozenset({_P.FAILED, _P.CANCELLED})
NEXT: dict[TransferPhase, frozenset[TransferPhase]] = {
    _P.RESERVED: _GIVEN_UP | {_P.PUSHING},
    _P.PUSHING: _GIVEN_UP | {_P.COMPLETE},
    _P.COMPLETE: _GIVEN_UP | {_P.VERIFIED},
    _P.VERIFIED: _GIVEN_UP | {_P.ADMITTED},
    _P.ADMITTED: frozenset(),
    _P.FAILED: frozenset({_P.FENCED}),
    _P.CANCELLED: frozenset({_P.FENCED}),
    _P.FENCED: frozenset({_P.RELEASED}),
    _P.RELEASED: frozenset(),
}
"""Legal transitions; everything else is a bug."""


class IllegalTransitionError(RuntimeError):
    """A transition that the diagram does not have: a bug, never a peer's fault."""


class TransferState:
    """The phase of one transfer, why it was given up, and since when. Not thread-safe: its owner holds a lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.phase = TransferPhase.RESERVED
        self.reason = ""
        self.entered_s: dict[TransferPhase, float] = {TransferPhase.RESERVED: clock.now_s()}

    def to(self, phase: TransferPhase) -> None:
        """Move one step along the diagram; raises IllegalTransitionError."""
        if phase not in NEXT[self.phase]:
            raise IllegalTransitionError(f"a transfer cannot go from {self.phase} to {phase}")
        self.phase = phase
        self.entered_s[phase] = self._clock.now_s()

    def fail(self, reason: str) -> None:
        """Give up because something broke."""
        self.to(TransferPhase.FAILED)
        self.reason = reason

    def cancel(self, reason: str) -> None:
        """Give up because it is no longer wanted."""
        self.to(TransferPhase.CANCELLED)
        self.reason = reason

    @property
    def can_move_bytes(self) -> bool:
        """True if a byte of it may still be read or written."""
        return self.phase in (_P.RESERVED, _P.PUSHING)

    @property
    def can_be_given_up(self) -> bool:
        return _P.FAILED in NEXT[self.phase]

    @property
    def is_terminal(self) -> bool:
        return not NEXT[self.phase]

    def age_s(self) -> float:
        """Seconds since it was reserved."""
        return self._clock.now_s() - self.entered_s[TransferPhase.RESERVED]


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """Snapshot of a transfer that can still move bytes or waits to be taken over, for audits and leases.

    `bytes` went through this rank so far. Taken without the transfer's lock: each field is true, all of them together
    only for a transfer that stands still.
    """

    ticket: Ticket
    phase: TransferPhase
    age_s: float
    bytes: int

    @property
    def transfer(self) -> TransferId:
        return self.ticket.transfer
