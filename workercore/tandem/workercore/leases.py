"""Messages between two workers about the transfers they work on: `holding`, once a second, and its answer."""

from __future__ import annotations

from tandem.core.ids import Incarnation, TransferId, WorkerId
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.role import RoleContext

FORGOTTEN = "it no longer names this transfer among those it works on"


class PeerLeases:
    """The worker's leases, exchanged over its control channels. Belongs to the step loop's thread.

    There is one set of leases a worker, for all owners of transfers: a peer takes one list of names for all of them.
    """

    def __init__(self, context: RoleContext) -> None:
        self._context, self._leases = context, context.leases

    def open(self, transfer: TransferId, peer: WorkerId, incarnation: Incarnation) -> None:
        """Open a lease: this worker works on the transfer from now on, and expects its peer to."""
        self._leases.open(transfer, peer, incarnation)

    def close(self, transfer: TransferId) -> None:
        """Close it: nothing more is expected of the peer for it."""
        self._leases.close(transfer)

    def heard(self, peer: WorkerId, message: w.Holding) -> None:
        """Take in what the peer works on. A peer that names transfers, but has none left here, gets an empty answer."""
        if message.peer_incarnation != self._context.incarnation:
            return
        incarnation = Incarnation(message.incarnation)
        self._leases.hear(peer, incarnation, message.transfers, self._context.clock.now_s())
        if message.transfers and not self._leases.open_with(peer, incarnation):
            self._say(peer, incarnation, [])

    def say(self) -> None:
        """Name what is open to every peer that has not been sent it for a second."""
        for (peer, incarnation), transfers in self._leases.say(self._context.clock.now_s()).items():
            self._say(peer, incarnation, transfers)

    def overdue(self) -> list[TransferId]:
        """Return transfers that peers have forgotten, of any owner here: the owner fences them and gives their blocks
        back."""
        return self._leases.overdue()

    def _say(self, peer: WorkerId, incarnation: Incarnation, transfers: list[TransferId]) -> None:
        holding = w.Holding(
            incarnation=self._context.incarnation, peer_incarnation=incarnation, transfers=map(int, transfers)
        )
        self._context.outbox.to_peer(peer, incarnation, w.PeerMessage(holding=holding))
