"""The ticket: a receiver's promise of memory to one attempt of one request, with all that a push needs."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, RequestId, TransferId, WorkerId
from tandem.core.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of one rank of the receiver: `transport` is its name; `host` identifies the machine (and boot), so that
    a sender knows whether shared memory can work; `address` is the transport's own."""

    rank: Rank
    transport: str
    host: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBlocks:
    """Destination blocks of one KV group. `blocks[i]` receives logical block `skip + i` of the prompt, in blocks of the
    receiver's size; the first `skip` logical blocks are already at the receiver and must not be sent."""

    group: GroupId
    skip: int
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Granted by the receiver with its destination reserved; fenced by attempt and both incarnations."""

    transfer: TransferId
    request: RequestId
    attempt: Attempt
    sender: WorkerId
    sender_incarnation: Incarnation
    receiver: WorkerId
    receiver_incarnation: Incarnation
    groups: tuple[GroupBlocks, ...]
    endpoints: tuple[Endpoint, ...]
    layout: KVLayout
    """The receiver's KV groups (block size, dtype) and TP."""
    codec: str = ""
    """The wire codec that both ends agreed on (tandem.core.kv_compatibility); "" = bytes in the receiver's dtype."""
