"""The receiving end of one rank: transports that listen, and the intake that judges and places what they bring."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tandem.core.clock import Clock
from tandem.core.errors import ConfigError, StartupError
from tandem.core.ids import GroupId, Incarnation, Rank, TransferId
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.events import ReceiverEvent
from tandem.kvtransfer.kv_pool_access import PoolAccess
from tandem.kvtransfer.receiver_core import ReceiverCore
from tandem.kvtransfer.state import OpenTransfer
from tandem.kvtransfer.ticket import Endpoint, Ticket
from tandem.kvtransfer.transports.base import Listener, UnavailableTransportError
from tandem.kvtransfer.transports.listener_config import ListenerConfig
from tandem.kvtransfer.transports.payload_ring import RING_BYTES
from tandem.kvtransfer.transports.registry import TRANSPORTS, find

_log = logging.getLogger(__name__)


class TransferReceiver:
    """Owns the listeners. Methods may be called from any thread; see ReceiverCore for what each guarantees.

    `on_event` runs on transport threads and must not block. `pools` are borrowed until `close` returned.
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        rank: Rank,
        pools: Mapping[GroupId, PoolAccess],
        secret: ClusterSecret,
        runtime_dir: Path,
        on_event: Callable[[ReceiverEvent], None],
        clock: Clock,
        transports: Sequence[str] = (),
        bind_host: str = "127.0.0.1",
        advertise_host: str | None = None,
        ring_bytes: int = RING_BYTES,
        on_device: bool = False,
    ) -> None:
        """`transports`: names to listen on, each of which must work; none = all that "auto" takes and that work here.

        `on_device`: the pools lie in a GPU's memory. Raises ConfigError for a name that is unknown or does not work.
        """
        self._intake = ReceiverCore(incarnation=incarnation, rank=rank, pools=pools, on_event=on_event, clock=clock)
        self._is_choosy = bool(transports)
        site = ListenerConfig(
            intake=self._intake, secret=secret, rank=rank, runtime_dir=runtime_dir, bind_host=bind_host,
            advertise_host=advertise_host or bind_host, ring_bytes=ring_bytes, on_device=on_device,
        )  # fmt: skip
        automatic = [t for t in TRANSPORTS.values() if t.suits(on_device=on_device)]
        self._listeners: list[Listener] = []
        self._endpoints: tuple[Endpoint, ...] = ()
        for transport in [find(name) for name in transports] or automatic:
            try:
                self._listeners.append(transport.listen(site))
            except (ImportError, UnavailableTransportError) as error:
                if self._is_choosy:
                    self.close()
                    raise ConfigError(f"KV transport {transport.name} does not work here", why=str(error)) from error
                event(_log, "transfer_transport_skipped", transport=transport.name, reason=str(error))

    def start(self) -> None:
        """Listen. Raises OSError or StartupError where a transport that was named cannot, or where none can."""
        failures: list[Exception] = []
        for listener in tuple(self._listeners):
            try:
                listener.start()
            except (OSError, StartupError) as error:
                if self._is_choosy:
                    self.close()
                    raise
                failures.append(error)
                listener.close()
                self._listeners.remove(listener)
                event(_log, "transfer_transport_skipped", logging.WARNING, reason=str(error))
        if not self._listeners:
            raise StartupError("no KV transport works here", why="; ".join(map(str, failures)))
        self._endpoints = tuple(listener.endpoint() for listener in self._listeners)

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where senders reach this rank, to be put into tickets; none before `start`."""
        return self._endpoints

    def expect(self, ticket: Ticket) -> None:
        """Accept frames of `ticket`: every (group, block, layer, head) of it must arrive before it is verified."""
        self._intake.expect(ticket)

    def cancel(self, transfer: TransferId, reason: str = "cancelled") -> None:
        """Fence: after return no byte of the transfer can land; its blocks may be released. Idempotent."""
        self._intake.cancel(transfer, reason)

    def admit(self, transfer: TransferId) -> None:
        """The request took over the verified blocks. Raises TransferError if the transfer is not verified."""
        self._intake.admit(transfer)

    def set_incarnation(self, incarnation: Incarnation) -> None:
        """Begin a new incarnation; open transfers of the old one fail and nothing of them lands after return."""
        self._intake.set_incarnation(incarnation)

    def revoke(self, transfer: TransferId, *, even_if_begun: bool = False) -> bool:
        """Fence a transfer that not a byte came for; False, and nothing changed, if one did. See ReceiverCore."""
        return self._intake.revoke(transfer, even_if_begun=even_if_begun)

    def transfers(self) -> list[OpenTransfer]:
        """Every open transfer: nothing lands for one that is not listed."""
        return self._intake.transfers()

    def counters(self) -> dict[str, int]:
        """`bytes`, `frames`, `blocks` received, `open` transfers, and `dropped_<reason>` frames."""
        return self._intake.counters()

    def close(self) -> None:
        """Stop listening and end every connection; their open transfers fail. After return nothing is written."""
        with ExitStack() as stack:  # close each of them, whatever the others raise
            for listener in self._listeners:
                stack.callback(listener.close)
