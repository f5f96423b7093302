"""Workers' books laid against each other and against the router's own: which holds of KV blocks are explained. Pure.

    request     an attempt that the worker's engine runs, and that a router knows
    reserved    a reservation of D's role, open in D's receiver, matched at P by a hand-over or an open transfer
                with the same transfer id, attempt and both incarnations
    pushing     a transfer open in P's sender that P's role works on, or waits for the end of; or a hand-over of P's
                role that D still has a reservation for

Books are not taken at one moment: what is not explained is only *suspect* until it is seen again, a lease later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

AttemptKey = tuple[str, int]
"""(request id, attempt)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """All blocks of one holder in one KV group of a worker; `since_s` on the worker's clock distinguishes it from a
    later one of the same name."""

    group: int
    kind: str
    key: str
    subject: str
    """The attempt's key in the worker's tables."""
    request: str
    attempt: int
    transfer: int
    since_s: float
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A request in a worker's table."""

    request: str
    attempt: int
    router: str
    is_in_engine: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """A transfer open in a worker's sender or receiver."""

    transfer: int
    request: str
    attempt: int
    sender: str
    sender_incarnation: int
    receiver: str
    receiver_incarnation: int
    phase: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A transfer that a worker's role works on: "reservation", "handover" or "quiescing"."""

    kind: str
    key: str
    transfer: int
    peer: str
    peer_incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Records of one worker. Transfers and claims by transfer id, requests by the attempt's key; last, how many blocks
    its prefix caches hold, and the digest over them in hex."""

    worker: str
    incarnation: int
    role: str
    now_s: float
    totals: tuple[Mapping[str, int], ...]
    holds: tuple[Hold, ...]
    requests: Mapping[str, Known]
    sending: Mapping[int, Moving]
    receiving: Mapping[int, Moving]
    claims: Mapping[int, Claimed]
    cached_blocks: int = 0
    cached_digest: str = ""


class HoldVerdict(StrEnum):
    EXPLAINED = "explained"
    SUSPECT = "suspect"
    UNKNOWN = "unknown"
    """A worker or router that could explain it did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One hold, and why it is there. `peer` is the worker at the other end of its transfer, as far as known."""

    books: Books
    hold: Hold
    verdict: HoldVerdict
    why: str
    peer: str = ""
    peer_incarnation: int = 0

    @property
    def is_fenced(self) -> bool:
        """True if no byte can move for it and the worker has no other record of it. As far as the books show; the
        worker checks."""
        hold, books = self.hold, self.books
        moving = [*books.sending.values(), *books.receiving.values()]
        return (
            hold.subject not in books.requests
            and hold.transfer not in books.claims
            and not any(claim.key == hold.subject for claim in books.claims.values())
            and not any(m.transfer == hold.transfer or _attempt(m) == (hold.request, hold.attempt) for m in moving)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Auditor:
    """One look: all books, the workers that did not answer, and this router's requests in flight."""

    router: str
    flights: Collection[AttemptKey]
    books: Sequence[Books]
    unanswered: Collection[str] = field(default_factory=tuple)

    def judge(self) -> list[Judged]:
        """Every hold of every worker that answered."""
        return [self._judge(books, hold) for books in self.books for hold in books.holds]

    def _judge(self, books: Books, hold: Hold) -> Judged:
        if hold.kind == "request":
            verdict, why = self._request(books, hold)
            return Judged(books=books, hold=hold, verdict=verdict, why=why)
        side = self._reserved if hold.kind == "reserved" else self._pushing
        verdict, why = side(books, hold)
        peer, incarnation = _peer(books, hold)
        return Judged(books=books, hold=hold, verdict=verdict, why=why, peer=peer, peer_incarnation=incarnation)

    def _request(self, books: Books, hold: Hold) -> tuple[HoldVerdict, str]:
        known = books.requests.get(hold.subject)
        if known is None:
            return HoldVerdict.SUSPECT, "the worker knows no such request"
        if not known.is_in_engine:
            return HoldVerdict.SUSPECT, "its request is not in the engine"
        if known.router != self.router:
            return HoldVerdict.EXPLAINED, f"a request of router {known.router}"
        if (known.request, known.attempt) not in self.flights:
            return HoldVerdict.SUSPECT, f"router {self.router} no longer has this attempt in flight"
        return HoldVerdict.EXPLAINED, "a request in flight"

    def _reserved(self, books: Books, hold: Hold) -> tuple[HoldVerdict, str]:
        claim, moving = books.claims.get(hold.transfer), books.receiving.get(hold.transfer)
        if claim is None or claim.key != hold.subject:
            return HoldVerdict.SUSPECT, "the role has no such reservation"
        if moving is None or _attempt(moving) != (hold.request, hold.attempt):
            return HoldVerdict.SUSPECT, "its transfer is not open in the receiver"
        peer = self._find(claim.peer)
        if peer is None:
            return self._absent(claim.peer)
        if peer.incarnation != claim.peer_incarnation:
            return HoldVerdict.SUSPECT, f"{claim.peer} is now another incarnation"
        theirs = peer.sending.get(hold.transfer)
        if theirs is not None and _is_same(theirs, moving):
            return HoldVerdict.EXPLAINED, f"{claim.peer} pushes to it ({theirs.phase})"
        handover = peer.claims.get(hold.transfer)
        if handover is not None and _is_between(handover, "handover", hold, books):
            return HoldVerdict.EXPLAINED, f"a hand-over of {claim.peer}"
        return HoldVerdict.SUSPECT, f"{claim.peer} knows nothing of this transfer"

    def _pushing(self, books: Books, hold: Hold) -> tuple[HoldVerdict, str]:
        moving, claim = books.sending.get(hold.transfer), books.claims.get(hold.transfer)
        is_known = claim is not None and claim.key == hold.subject
        if moving is not None and _attempt(moving) == (hold.request, hold.attempt):
            if not is_known:
                return HoldVerdict.SUSPECT, "its transfer is open in the sender, but the role would not hear of its end"
            return HoldVerdict.EXPLAINED, f"a transfer to {moving.receiver} ({moving.phase})"
        if claim is None or not is_known or claim.kind != "handover":
            return HoldVerdict.SUSPECT, "its transfer is not open in the sender, and the role has no such hand-over"
        peer = self._find(claim.peer)
        if peer is None:
            return self._absent(claim.peer)
        if peer.incarnation != claim.peer_incarnation:
            return HoldVerdict.SUSPECT, f"{claim.peer} is now another incarnation"
        reservation = peer.claims.get(hold.transfer)
        if reservation is not None and _is_between(reservation, "reservation", hold, books):
            return HoldVerdict.EXPLAINED, f"pushed; {claim.peer} has it reserved"
        return HoldVerdict.SUSPECT, f"{claim.peer} knows nothing of this transfer"

    def _find(self, worker: str) -> Books | None:
        return next((books for books in self.books if books.worker == worker), None)

    def _absent(self, worker: str) -> tuple[HoldVerdict, str]:
        if worker in self.unanswered:
            return HoldVerdict.UNKNOWN, f"{worker} did not answer"
        return HoldVerdict.SUSPECT, f"its peer {worker} is not here"


def _attempt(moving: Moving) -> AttemptKey:
    return (moving.request, moving.attempt)


def _is_same(theirs: Moving, ours: Moving) -> bool:
    return (_attempt(theirs), theirs.sender_incarnation, theirs.receiver_incarnation) == (
        _attempt(ours), ours.sender_incarnation, ours.receiver_incarnation
    )  # fmt: skip


def _is_between(claim: Claimed, kind: str, hold: Hold, books: Books) -> bool:
    """True if the peer's claim is the other half: the same attempt, with this incarnation of this worker."""
    wanted = (kind, hold.subject, books.worker, books.incarnation)
    return (claim.kind, claim.key, claim.peer, claim.peer_incarnation) == wanted


def _peer(books: Books, hold: Hold) -> tuple[str, int]:
    claim = books.claims.get(hold.transfer)
    if claim is not None and claim.peer:
        return claim.peer, claim.peer_incarnation
    sending, receiving = books.sending.get(hold.transfer), books.receiving.get(hold.transfer)
    if sending is not None:
        return sending.receiver, sending.receiver_incarnation
    if receiving is not None:
        return receiving.sender, receiving.sender_incarnation
    return "", 0
