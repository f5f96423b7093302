"""Queue of ticket requests: attempts announced by a router, matched with prefill workers' asks. Reserves nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.core import kv_compatibility
from tandem.core.errors import TandemError, TransferError, from_code
from tandem.core.ids import Attempt, Incarnation, RequestId, WorkerId
from tandem.core.kv_compatibility import WireForm
from tandem.core.timeout_scale import patient
from tandem.kvtransfer.wire import profile_from_wire
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.requests import Tracked, request_key
from tandem.workercore.role_interface import RoleContext

ANNOUNCEMENT_WAIT_S = patient(5.0)
"""How long a ticket request may be ahead of its announcement."""


@dataclass(slots=True)
class QueuedTicketRequest:
    """A prefill worker's request for a ticket, and the form in which its blocks would come."""

    peer: WorkerId
    message: w.TicketRequest
    asked_s: float
    form: WireForm
    told_position: int | None = None
    """The position in the queue that was sent to the peer, if any."""


class TicketQueue:
    """Announcements and ticket requests by request key; a ticket is due when both are here, in the order of asking."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._announced: dict[str, Tracked] = {}
        self._asked: OrderedDict[str, QueuedTicketRequest] = OrderedDict()
        self._wait_per_place_s = 0.0  # smoothed, from tickets that had to wait; 0 = none has yet

    def __bool__(self) -> bool:
        return bool(self._announced or self._asked)

    def announce(self, tracked: Tracked) -> None:
        """Record an attempt that a router announced: a prefill worker will ask for its ticket."""
        self._announced[tracked.key] = tracked

    def announced(self, key: str) -> Tracked | None:
        return self._announced.get(key)

    def ask(self, peer: WorkerId, message: w.TicketRequest) -> None:
        """Queue a prefill worker's request, or refuse it at once."""
        key = request_key(message.request, message.attempt)
        try:
            asked = QueuedTicketRequest(peer, message, self._context.clock.now_s(), self._agree(message))
        except TandemError as error:
            self._refuse(peer, message, error)
            return
        if key in self._announced or self._context.requests.get(key) is None:
            self._asked[key] = asked
        else:  # it has its ticket already
            self._context.count("ticket_requests_dropped")

    def due(self) -> Iterator[tuple[str, QueuedTicketRequest, Tracked]]:
        """Yield tickets both asked for and announced, oldest first; the queue may be changed meanwhile."""
        for key, asked in list(self._asked.items()):
            tracked = self._announced.get(key)
            if tracked is not None:
                yield key, asked, tracked

    def granted(self, key: str) -> None:
        """Remove a granted ticket; if it had to wait, its wait updates the estimate for the next ones."""
        asked = self._asked.get(key)
        if asked is not None and asked.told_position is not None:
            place_s = (self._context.clock.now_s() - asked.asked_s) / (asked.told_position + 1)
            known_s = self._wait_per_place_s
            self._wait_per_place_s = known_s + (place_s - known_s) / 4 if known_s else place_s
        self.remove(key)

    def tell_waiting(self) -> None:
        """Send every waiting peer, once, its position in the queue and an estimate of the wait."""
        for position, (_, asked, _) in enumerate(self.due()):
            if asked.told_position is not None:
                continue
            asked.told_position = position
            message = asked.message
            queued = w.TicketQueued(
                request=message.request,
                attempt=message.attempt,
                position=position,
                estimate_s=(position + 1) * self._wait_per_place_s,
            )
            incarnation = Incarnation(message.sender_incarnation)
            self._context.outbox.to_peer(asked.peer, incarnation, w.PeerMessage(queued=queued))
            self._context.count("tickets_queued")

    def remove(self, key: str) -> None:
        """Remove a ticket that the peer gave up, or that is granted."""
        self._announced.pop(key, None)
        self._asked.pop(key, None)

    def forget(self, key: str) -> None:
        """Remove an ended attempt; a peer that asked for it receives a refusal."""
        self._announced.pop(key, None)
        asked = self._asked.pop(key, None)
        if asked is not None:
            self._refuse(asked.peer, asked.message, from_code("cancelled", "the request was cancelled."))

    def peer_gone(self, peer: WorkerId, incarnation: Incarnation) -> None:
        """Drop the ticket requests of a peer that is gone; `incarnation` 0 stands for all of them."""
        for key, asked in list(self._asked.items()):
            if asked.peer == peer and incarnation in (0, asked.message.sender_incarnation):
                del self._asked[key]

    def tick(self, now_s: float) -> None:
        """Refuse ticket requests that were not announced in time."""
        for key, asked in list(self._asked.items()):
            if key not in self._announced and now_s - asked.asked_s > ANNOUNCEMENT_WAIT_S:
                del self._asked[key]
                error = TransferError("no router announced this request", todo="try again")
                self._refuse(asked.peer, asked.message, error)

    def _agree(self, asked: w.TicketRequest) -> WireForm:
        """Return the wire form; raises the error with which the request is refused."""
        if asked.receiver_incarnation != self._context.incarnation:
            raise TransferError("this decode worker restarted", why="its incarnation is a new one", todo="try again")
        if self._context.requests.is_buried(RequestId(asked.request), Attempt(asked.attempt)):
            raise from_code("cancelled", "this attempt is over")
        return kv_compatibility.agree(
            profile_from_wire(asked.profile), self._context.profile, offered=tuple(asked.codecs)
        )

    def _refuse(self, peer: WorkerId, message: w.TicketRequest, error: TandemError) -> None:
        refused = w.TicketRefused(
            request=message.request, attempt=message.attempt, code=error.code, message=error.message
        )
        incarnation = Incarnation(message.sender_incarnation)
        self._context.outbox.to_peer(peer, incarnation, w.PeerMessage(ticket_refused=refused))
        self._context.count("tickets_refused")
