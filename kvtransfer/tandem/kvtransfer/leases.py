"""Leases of transfers, renewed by the other end's reports. Pure bookkeeping on the owner's clock and thread.

Each end reports once a second its open transfers with a peer. A peer that reports, but does not name one for a lease,
has forgotten it (its role restarted, a message was lost): it will never end that transfer, so this end does. A peer
that sends no report at all is left to the control channel, which closes on silence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tandem.core.ids import Incarnation, TransferId, WorkerId
from tandem.core.lease_timing import LEASE_S

SAY_EVERY_S = 1.0

Peer = tuple[WorkerId, Incarnation]


@dataclass(slots=True)
class _TransferLease:
    peer: Peer
    missing_since_s: float | None = None
    is_overdue: bool = False


class TransferLeases:
    """The transfers open here with each peer. `say` returns due reports, `hear` takes in the peers' reports.

    When a transfer is opened its peer may not know of it yet, so a lease starts to run down with the peer's first
    report that omits it, and is renewed by the first that names it. It expires with a report that omits it a lease
    after the first: silence of the peer proves nothing.
    """

    def __init__(self, lease_s: float = LEASE_S, say_every_s: float = SAY_EVERY_S) -> None:
        self._lease_s, self._say_every_s = lease_s, say_every_s
        self._leases: dict[TransferId, _TransferLease] = {}
        self._said_s: dict[Peer, float] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, transfer: TransferId, peer: WorkerId, incarnation: Incarnation) -> None:
        """This end works on the transfer from now on."""
        self._leases[transfer] = _TransferLease((peer, incarnation))

    def close(self, transfer: TransferId) -> None:
        """Close the transfer at this end, however it ended; unknown ones are ignored."""
        lease = self._leases.pop(transfer, None)
        if lease is not None and not any(other.peer == lease.peer for other in self._leases.values()):
            self._said_s.pop(lease.peer, None)

    def open_with(self, peer: WorkerId, incarnation: Incarnation) -> list[TransferId]:
        """Transfers open at this end with that incarnation of the peer, oldest first."""
        return [transfer for transfer, lease in self._leases.items() if lease.peer == (peer, incarnation)]

    def say(self, now_s: float) -> dict[Peer, list[TransferId]]:
        """Return the reports that are due: per peer without a recent one, all open transfers with it."""
        due: dict[Peer, list[TransferId]] = {}
        for transfer, lease in self._leases.items():
            if lease.peer in due:
                due[lease.peer].append(transfer)
            elif now_s - self._said_s.get(lease.peer, -self._say_every_s) >= self._say_every_s:
                due[lease.peer] = [transfer]
                self._said_s[lease.peer] = now_s
        return due

    def hear(self, peer: WorkerId, incarnation: Incarnation, named: Iterable[int], now_s: float) -> None:
        """Take in a report: the peer, in this incarnation, named all transfers open with this end."""
        here: Collection[int] = frozenset(named)
        for transfer, lease in self._leases.items():
            if lease.peer != (peer, incarnation):
                continue
            if transfer in here:
                lease.missing_since_s, lease.is_overdue = None, False
            elif lease.missing_since_s is None:
                lease.missing_since_s = now_s
            elif now_s - lease.missing_since_s >= self._lease_s:
                lease.is_overdue = True

    def overdue(self) -> list[TransferId]:
        """Transfers that a reporting peer has not named for a whole lease."""
        return [transfer for transfer, lease in self._leases.items() if lease.is_overdue]
