"""Block reservations for granted tickets: matched blocks, allocated blocks, and their release."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.block_hash import chain
from tandem.core.handoff import ChoiceState
from tandem.core.ids import Incarnation, TransferId, WorkerId
from tandem.core.ledger import Holder, HoldKind
from tandem.engine.engine import Engine
from tandem.kvtransfer.events import Verified
from tandem.kvtransfer.ticket import Ticket
from tandem.workercore.block_reservation import BlockReservation, reserve_blocks
from tandem.workercore.requests import Tracked


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The prefill worker's `complete` message. `sampled_s` is by its clock, `received_s` by ours."""

    choices: tuple[ChoiceState, ...]
    received_s: float
    sampled_s: float
    ticket_wait_s: float
    is_same_host: bool


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Held from the ticket's issue until the request is admitted, or fenced and released. Ready when the sequence state
    and every verified byte have arrived."""

    tracked: Tracked
    ticket: Ticket
    blocks: BlockReservation
    granted_s: float
    completed: Completed | None = None
    verified: Verified | None = None

    @property
    def peer(self) -> WorkerId:
        return self.ticket.sender

    @property
    def peer_incarnation(self) -> Incarnation:
        return self.ticket.sender_incarnation


class Reservations:
    """All reservations that are granted and not admitted yet, in the order of granting."""

    def __init__(self) -> None:
        self._by_key: dict[str, Reservation] = {}
        self._by_transfer: dict[int, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, reservation: Reservation) -> None:
        self._by_key[reservation.tracked.key] = self._by_transfer[reservation.ticket.transfer] = reservation

    def remove(self, reservation: Reservation) -> None:
        del self._by_key[reservation.tracked.key]
        del self._by_transfer[reservation.ticket.transfer]

    def get(self, key: str) -> Reservation | None:
        return self._by_key.get(key)

    def of_transfer(self, transfer: int) -> Reservation | None:
        return self._by_transfer.get(transfer)

    def all(self) -> list[Reservation]:
        return list(self._by_key.values())

    @property
    def choices(self) -> int:
        """Number of choices that run once these reservations are admitted."""
        return sum(r.tracked.engine_request.sampling.n for r in self._by_key.values())

    def blocks_of(self, peer: WorkerId) -> list[int]:
        """Blocks of each KV group that a peer's reservations have, pinned prefix hits among them."""
        mine = [r.blocks.held_blocks for r in self._by_key.values() if r.peer == peer]
        return [sum(counts) for counts in zip(*mine, strict=True)]


def needs(engine: Engine, tracked: Tracked) -> list[int]:
    """Blocks of each KV group that the prompt takes, if none of them is shared: of a window the last one."""
    tokens = len(tracked.engine_request.prompt)
    return [spec.blocks_for(tokens) - spec.first_to_hand_over(tokens) for spec in engine.layout.groups]


def reserve(engine: Engine, tracked: Tracked, transfer: TransferId) -> BlockReservation | None:
    """Pin what the prefix cache has of the prompt and allocate the rest; None (and nothing held) if blocks are short.

    Blocks that running choices may grow into are not available. The blocks are held as RESERVED: they are not read
    before the transfer is verified, and are not given to another holder.
    """
    request = tracked.engine_request
    block_tokens = engine.layout.groups[0].block_tokens
    hashes = chain(request.hash_root, request.prompt, block_tokens, request.hashes)
    holder = Holder(HoldKind.RESERVED, f"{tracked.key}/{transfer}")
    tokens, specs = len(request.prompt), engine.layout.groups
    window_offsets = [spec.first_to_hand_over(tokens) for spec in specs]
    return reserve_blocks(engine, holder, hashes, specs[0].blocks_for(tokens), window_offsets)
