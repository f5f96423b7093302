"""The receiving end of one rank: transports that listen, and the intake that judges and places what they bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tandem.core.clock import Clock
from tandem.core.errors import ConfigError
from tandem.core.ids import GroupId, Incarnation, Rank, TransferId, WorkerId
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.events import ReceiverEvent
from tandem.kvtransfer.intake import Intake
from tandem.kvtransfer.pool import PoolAccess
from tandem.kvtransfer.ticket import Endpoint, Ticket
from tandem.kvtransfer.transports.base import WINDOW_BYTES, Listener


class TransferReceiver:
    """Owns the listeners. Methods may be called from any thread; see Intake for what each guarantees.

    `on_event` runs on transport threads and must not block. `pools` are borrowed until `close` returned.
    """

    def __init__(
        self,
        *,
        worker: WorkerId,
        incarnation: Incarnation,
        rank: Rank,
        pools: Mapping[GroupId, PoolAccess],
        secret: ClusterSecret,
        runtime_dir: Path,
        on_event: Callable[[ReceiverEvent], None],
        clock: Clock,
        transports: Sequence[str] = ("shm", "grpc"),
        bind_host: str = "127.0.0.1",
        advertise_host: str | None = None,
        ring_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.worker = worker
        self._intake = Intake(incarnation=incarnation, rank=rank, pools=pools, on_event=on_event, clock=clock)
        self._listeners: list[Listener] = []
        for name in transports:
            if name == "shm":
                from tandem.kvtransfer.transports.shm_listener import ShmListener

                self._listeners.append(ShmListener(self._intake, secret, rank, runtime_dir, ring_bytes))
            elif name == "grpc":
                from tandem.kvtransfer.transports.grpc_listener import GrpcListener

                host = advertise_host or bind_host
                self._listeners.append(GrpcListener(self._intake, secret, rank, bind_host, host))
            else:
                raise ConfigError(f"unknown KV transport {name!r}", todo="use shm or grpc")

    def start(self) -> None:
        """Listen; raises OSError or StartupError."""
        for listener in self._listeners:
            listener.start()

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where senders reach this rank, to be put into tickets; valid after `start`."""
        return tuple(listener.endpoint() for listener in self._listeners)

    def expect(self, ticket: Ticket) -> None:
        """Accept frames of `ticket`: every (group, block, layer, head) of it must arrive before it is verified."""
        self._intake.expect(ticket)

    def cancel(self, transfer: TransferId, reason: str = "cancelled") -> None:
        """Fence: after return no byte of the transfer can land; its blocks may be released. Idempotent."""
        self._intake.cancel(transfer, reason)

    def admit(self, transfer: TransferId) -> None:
        """The request took over the verified blocks. Raises TransferError if the transfer is not verified."""
        self._intake.admit(transfer)

    def forget(self, transfer: TransferId) -> None:
        """Drop the bookkeeping of a transfer in whatever state: `cancel` if it is open, nothing if it has ended."""
        self._intake.cancel(transfer, "forgotten")

    def set_incarnation(self, incarnation: Incarnation) -> None:
        """Begin a new incarnation; open transfers of the old one fail and nothing of them lands after return."""
        self._intake.set_incarnation(incarnation)

    def counters(self) -> dict[str, int]:
        """`bytes`, `frames`, `blocks` received, `open` transfers, and `dropped_<reason>` frames."""
        return self._intake.counters()

    def close(self) -> None:
        """Stop listening and end every connection; their open transfers fail. After return nothing is written."""
        for listener in self._listeners:
            listener.close()
