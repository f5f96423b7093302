"""Messages between two workers about the transfers they work on: `holding`, once a second, and its answer.

There is one set of leases a worker, `RoleContext.leases`, for all owners of transfers: a peer takes one list of names
for all of them. The owner of an overdue one fences it and gives its blocks back.
"""

from __future__ import annotations

from tandem.core.ids import Incarnation, TransferId, WorkerId
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.role_interface import RoleContext

FORGOTTEN = "it no longer names this transfer among those it works on"


def take_holding(context: RoleContext, peer: WorkerId, message: w.Holding) -> None:
    """Take in what the peer works on. A peer that names transfers, but has none left here, gets an empty answer."""
    if message.peer_incarnation != context.incarnation:
        return
    incarnation = Incarnation(message.incarnation)
    context.leases.hear(peer, incarnation, message.transfers, context.clock.now_s())
    if message.transfers and not context.leases.open_with(peer, incarnation):
        _send(context, peer, incarnation, [])


def send_holdings(context: RoleContext) -> None:
    """Name what is open to every peer that has not been sent it for a second."""
    for (peer, incarnation), transfers in context.leases.say(context.clock.now_s()).items():
        _send(context, peer, incarnation, transfers)


def _send(context: RoleContext, peer: WorkerId, incarnation: Incarnation, transfers: list[TransferId]) -> None:
    holding = w.Holding(incarnation=context.incarnation, peer_incarnation=incarnation, transfers=map(int, transfers))
    context.outbox.to_peer(peer, incarnation, w.PeerMessage(holding=holding))
