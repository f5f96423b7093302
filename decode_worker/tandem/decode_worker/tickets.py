"""Who waits for a ticket: attempts that a router announced, and prefill workers that asked. Reserves nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.core.errors import TandemError, TransferError, from_code
from tandem.core.ids import Attempt, Incarnation, RequestId, WorkerId
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.requests import Tracked, request_key
from tandem.workerhost.role import Shell

ANNOUNCEMENT_WAIT_S = 5.0
"""How long a ticket request may be ahead of its announcement."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prefill worker's request for a ticket."""

    peer: WorkerId
    message: w.TicketRequest
    asked_s: float


class TicketQueue:
    """Both halves of a ticket, by request key; it is due when both are here, in the order of asking."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._announced: dict[str, Tracked] = {}
        self._asked: OrderedDict[str, Asked] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._announced or self._asked)

    def announce(self, tracked: Tracked) -> None:
        """A router said that somebody will ask for this attempt."""
        self._announced[tracked.key] = tracked

    def announced(self, key: str) -> Tracked | None:
        return self._announced.get(key)

    def ask(self, peer: WorkerId, message: w.TicketRequest) -> None:
        """Queue a prefill worker's request, or refuse it at once."""
        asked = Asked(peer, message, self._shell.clock.now_s())
        key = request_key(message.request, message.attempt)
        refusal = self._refusal(message)
        if refusal is not None:
            self._refuse(asked, refusal)
        elif key in self._announced or self._shell.requests.get(key) is None:
            self._asked[key] = asked
        else:  # it has its ticket already
            self._shell.count("ticket_requests_dropped")

    def due(self) -> Iterator[tuple[str, Asked, Tracked]]:
        """Asked for and announced, oldest first; the queue may be changed meanwhile."""
        for key, asked in list(self._asked.items()):
            tracked = self._announced.get(key)
            if tracked is not None:
                yield key, asked, tracked

    def remove(self, key: str) -> None:
        """Its ticket is granted, or the peer gave it up."""
        self._announced.pop(key, None)
        self._asked.pop(key, None)

    def forget(self, key: str) -> None:
        """The attempt is over here: whoever asked for it is told."""
        self._announced.pop(key, None)
        asked = self._asked.pop(key, None)
        if asked is not None:
            self._refuse(asked, from_code("cancelled", "the request was cancelled."))

    def peer_gone(self, peer: WorkerId, incarnation: Incarnation) -> None:
        """Nobody is there any more to take its tickets; `incarnation` 0 stands for all of them."""
        for key, asked in list(self._asked.items()):
            if asked.peer == peer and incarnation in (0, asked.message.sender_incarnation):
                del self._asked[key]

    def tick(self, now_s: float) -> None:
        """Refuse what was not announced in time."""
        for key, asked in list(self._asked.items()):
            if key not in self._announced and now_s - asked.asked_s > ANNOUNCEMENT_WAIT_S:
                del self._asked[key]
                self._refuse(asked, TransferError("no router announced this request", todo="try again"))

    def _refusal(self, asked: w.TicketRequest) -> TandemError | None:
        layout = self._shell.engine.layout
        if asked.receiver_incarnation != self._shell.incarnation:
            return TransferError("this decode worker restarted", why="its incarnation is a new one", todo="try again")
        if self._shell.requests.is_buried(RequestId(asked.request), Attempt(asked.attempt)):
            return from_code("cancelled", "this attempt is over")
        mine = (self._shell.fingerprint, layout.groups[0].block_tokens, layout.groups[0].dtype, layout.tp)
        theirs = (asked.fingerprint, asked.block_tokens, asked.kv_dtype, asked.tp)
        if mine != theirs:
            return TransferError("prefill and decode worker do not match", why=f"{theirs} against {mine}")
        return None

    def _refuse(self, asked: Asked, error: TandemError) -> None:
        message = asked.message
        refused = w.TicketRefused(
            request=message.request, attempt=message.attempt, code=error.code, message=error.message
        )
        incarnation = Incarnation(message.sender_incarnation)
        self._shell.outbox.to_peer(asked.peer, incarnation, w.PeerMessage(ticket_refused=refused))
        self._shell.count("tickets_refused")
