"""One ticket's memory at the receiver: which blocks were matched, which were allocated, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.handoff import ChoiceState
from tandem.core.ids import BlockId, Incarnation, TransferId, WorkerId
from tandem.core.ledger import Holder, HoldKind
from tandem.engine.engine import Engine
from tandem.kvtransfer.ticket import GroupBlocks, Ticket
from tandem.workerhost.requests import Tracked


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Held from the ticket's issue until the request is admitted, or fenced and released."""

    tracked: Tracked
    ticket: Ticket
    peer: WorkerId
    peer_incarnation: Incarnation
    tables: tuple[list[BlockId], ...]
    holder: Holder
    choices: tuple[ChoiceState, ...] | None = None
    complete_s: float = 0.0
    sampled_s: float = 0.0
    ticket_wait_s: float = 0.0
    is_same_host: bool = True
    verified_s: float | None = None
    last_wire_s: float = 0.0
    received_bytes: int = 0
    skipped_blocks: int = 0
    received_blocks: int = 0

    @property
    def is_ready(self) -> bool:
        """Both halves are here: the sequence state and every verified byte."""
        return self.choices is not None and self.verified_s is not None


@dataclass(frozen=True, slots=True)
class Room:
    """Blocks taken for one prompt, group by group, in logical order."""

    tables: tuple[list[BlockId], ...]
    groups: tuple[GroupBlocks, ...]
    holder: Holder
    skipped_blocks: int
    new_blocks: int = field(default=0)


def reserve(engine: Engine, tracked: Tracked, transfer: TransferId) -> Room | None:
    """Pin what the prefix cache has of the prompt and allocate the rest; None (and nothing held) if there is no room.

    The blocks are held as RESERVED: nobody reads them before the transfer is verified, nobody else gets them.
    """
    request = tracked.engine_request
    holder = Holder(HoldKind.RESERVED, f"{tracked.key}/{transfer}")
    tables: list[list[BlockId]] = []
    groups: list[GroupBlocks] = []
    skipped = 0
    for spec, ledger in zip(engine.layout.groups, engine.ledgers, strict=True):
        matched = engine.match_prefix(request.hash_root, request.prompt, spec.group)
        ledger.share(holder, matched)
        new = ledger.allocate(holder, spec.blocks_for(len(request.prompt)) - len(matched))
        if new is None:
            release(engine, holder)
            return None
        skipped += len(matched)
        tables.append([*matched, *new])
        groups.append(GroupBlocks(group=spec.group, skip=len(matched), blocks=tuple(new)))
    return Room(tuple(tables), tuple(groups), holder, skipped, sum(len(g.blocks) for g in groups))


def release(engine: Engine, holder: Holder) -> None:
    """Give a reservation's blocks back, in every group. The transfer must be fenced before."""
    for ledger in engine.ledgers:
        ledger.release(holder)
