"""Blocks between workers besides hand-overs: both ends of fetches, and the leases of all transfers of the worker.

The step loop shows it every message of a peer and every event of a transfer before the role sees it.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.ids import Incarnation, WorkerId
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.leases import send_holdings, take_holding
from tandem.workercore.prefix_client import PrefixClient
from tandem.workercore.prefix_server import PrefixServer
from tandem.workercore.requests import Tracked, is_fetch
from tandem.workercore.role_interface import Claim, RoleContext


class PrefixExchange:
    """Belongs to the step loop's thread. `run` gets every request that waited for a fetch, once."""

    def __init__(self, context: RoleContext, run: Callable[[Tracked, w.Submit], None]) -> None:
        self._context = context
        self._fetching, self._supplying = PrefixClient(context, run), PrefixServer(context)

    def begin(self, tracked: Tracked, message: w.Submit) -> bool:
        """True if the request waits for blocks that others hold; see PrefixClient."""
        return self._fetching.begin(tracked, message)

    def cancel(self, tracked: Tracked) -> None:
        self._fetching.cancel(tracked)

    def peer_message(self, peer: WorkerId, message: w.PeerMessage) -> bool:
        """True if the message was about fetches or leases; the role gets all others."""
        kind = message.WhichOneof("kind")
        if kind == "holding":
            take_holding(self._context, peer, message.holding)
        elif kind == "fetch_request":
            self._supplying.asked(peer, message.fetch_request)
        elif kind == "fetch_offer":
            self._fetching.offered(peer, message.fetch_offer)
        elif kind == "ticket" and is_fetch(message.ticket.request):
            self._supplying.ticket(peer, message.ticket)
        elif kind == "failed" and is_fetch(message.failed.request):
            self._fetching.failed(peer, message.failed)
            self._supplying.failed(peer, message.failed)
        else:
            return False
        return True

    def peer_gone(self, peer: WorkerId, incarnation: Incarnation, reason: str) -> None:
        self._supplying.peer_gone(peer, incarnation)
        self._fetching.peer_gone(peer, incarnation, reason)

    def new_incarnation(self) -> None:
        """Requests were cancelled before; the fetches of others from here are over."""
        self._supplying.new_incarnation()

    def transfer_event(self, event: object) -> bool:
        return self._fetching.transfer_event(event) or self._supplying.transfer_event(event)

    def tick(self, now_s: float) -> None:
        send_holdings(self._context)
        self._supplying.tick()
        self._fetching.tick(now_s)

    def claims(self) -> list[Claim]:
        return [*self._fetching.claims(), *self._supplying.claims()]

    def is_idle(self) -> bool:
        return self._fetching.is_idle() and self._supplying.is_idle()
