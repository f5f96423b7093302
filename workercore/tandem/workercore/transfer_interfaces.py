"""Interfaces of the two ends of KV transfers for a role: of one rank, or of all ranks of a tensor-parallel group.

`TransferReceiver` and `TransferSender` are the ends of one rank and serve a worker of one rank as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.core.ids import BlockId, GroupId, Incarnation, TransferId
from tandem.core.link_speed import ReportedLink
from tandem.kvtransfer.state import OpenTransfer
from tandem.kvtransfer.ticket import Endpoint, Ticket


class ReceivingEnd(Protocol):
    """Takes transfers in. Called from the step loop's thread; events go to the step loop's inbox."""

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Addresses of every rank for senders, to be put into tickets."""

    def expect(self, ticket: Ticket) -> None:
        """Every rank takes frames of `ticket` from now on. Raises TransferError or ValueError."""

    def admit(self, transfer: TransferId) -> None:
        """The request took over the verified blocks. Raises TransferError if the transfer is not verified."""

    def cancel(self, transfer: TransferId, reason: str = "cancelled") -> None:
        """Fence it: no later step or transfer gets a byte of it; its blocks may be released. Idempotent."""

    def revoke(self, transfer: TransferId) -> bool:
        """Fence a transfer without a byte received; False, and no change, if it has one."""

    def set_incarnation(self, incarnation: Incarnation) -> None:
        """Begin a new incarnation; open transfers of the old one fail."""

    def transfers(self) -> list[OpenTransfer]:
        """Every open transfer."""

    def counters(self) -> dict[str, int]:
        """Bytes, frames and blocks received and so on, over all ranks."""

    def close(self) -> None:
        """Stop listening."""


class SendingEnd(Protocol):
    """Pushes transfers out. Called from the step loop's thread; each opened transfer ends with exactly one event."""

    def open(self, ticket: Ticket) -> None:
        """Begin a transfer on every rank. Raises TransferError or ValueError."""

    def push(
        self,
        transfer: TransferId,
        group: GroupId,
        src_blocks: Sequence[BlockId],
        dst_blocks: Sequence[BlockId],
        layers: range,
        offset_tokens: int = 0,
        tokens: int | None = None,
    ) -> None:
        """Queue blocks on every rank; each sends the heads that it holds. See `TransferSender.push`."""

    def finish(self, transfer: TransferId) -> None:
        """Nothing more will be pushed; Sent follows when every receiving rank has verified all of it."""

    def cancel(self, transfer: TransferId) -> None:
        """Stop; the source may be read until the transfer's event comes."""

    def set_incarnation(self, incarnation: Incarnation) -> None:
        """Begin a new incarnation; open transfers of the old one fail."""

    def transfers(self) -> list[OpenTransfer]:
        """Every open transfer: no rank reads the source of one that is not listed."""

    def links(self) -> tuple[ReportedLink, ...]:
        """Every kept link."""

    def close(self) -> None:
        """Fail what is open and end every link."""
