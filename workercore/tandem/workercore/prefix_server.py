"""The holder's side of a fetch: looks up a prefix for another worker, pins its blocks, and pushes them all at once.

    asked ──▶ offered (pinned) ──ticket──▶ pushing ──Sent──▶ released
                 └───────────────────────────┴── given up ──▶ quiet ──▶ released

The index is advice: an offer has the blocks of the ledger, under the requested root and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from tandem.core import kv_compatibility
from tandem.core import metric_names as names
from tandem.core.block_hash import BlockHash, chain
from tandem.core.errors import CapacityError, TandemError, TransferError
from tandem.core.ids import Attempt, BlockId, Incarnation, RequestId, TransferId, WorkerId
from tandem.core.kv_compatibility import KVProfile, WireForm
from tandem.core.ledger import Holder, HoldKind
from tandem.core.logs import event
from tandem.engine.sequence import GONE
from tandem.kvtransfer.events import Quiesced, SendCompleted, SendFailed
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.wire import profile_from_wire, profile_to_wire
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore import peer_block_quota
from tandem.workercore.outbox import transfer_failed
from tandem.workercore.proto_convert import ticket_from_wire
from tandem.workercore.requests import fetch_holder, fetch_name, request_key
from tandem.workercore.role_interface import Claim, RoleContext

_log = logging.getLogger(__name__)


class SupplyStage(Enum):
    """QUIESCING: given up, and the source may still be read."""

    OFFERED = auto()
    PUSHING = auto()
    QUIESCING = auto()


@dataclass(slots=True, kw_only=True)
class Supply:
    """One fetch that this worker feeds. `tables` are its own blocks, pinned, group by group, save for the first
    `window_offsets` of each, which the requester has or does not need."""

    transfer: TransferId
    name: RequestId
    attempt: Attempt
    peer: WorkerId
    peer_incarnation: Incarnation
    theirs: KVProfile
    form: WireForm
    tables: tuple[list[BlockId], ...]
    window_offsets: tuple[int, ...]
    tokens: int
    stage: SupplyStage = SupplyStage.OFFERED
    ticket_s: float = 0.0

    @property
    def holder(self) -> Holder:
        return fetch_holder(HoldKind.PUSHING, self.name, self.attempt, self.transfer)


class PrefixServer:
    """All fetches that other workers make here. Belongs to the step loop's thread."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._profile = profile_to_wire(context.profile)
        self._block_tokens = context.engine.layout.groups[0].block_tokens
        self._supplies: dict[TransferId, Supply] = {}

    # ---- messages and events ---------------------------------------------------------------------------------------

    def asked(self, peer: WorkerId, message: w.FetchRequest) -> None:
        """Offer the cached blocks of the prefix, pinned from now on; a repeated request changes nothing."""
        if TransferId(message.fetch) in self._supplies:
            self._context.count("fetch_requests_dropped")
            return
        offer = w.FetchOffer(fetch=message.fetch, holder_incarnation=message.holder_incarnation)
        try:
            supply, codecs = self._look(peer, message)
        except (TransferError, CapacityError, ValueError) as error:
            offer.code = error.code if isinstance(error, TandemError) else TransferError.code
            offer.message = str(error)
            self._context.count("fetches_refused")
        else:
            self._supplies[supply.transfer] = supply
            self._context.leases.open(supply.transfer, peer, supply.peer_incarnation)
            offer.tokens = supply.tokens
            offer.profile.CopyFrom(self._profile)
            offer.codecs.extend(codecs)
        incarnation = Incarnation(message.requester_incarnation)
        self._context.outbox.to_peer(peer, incarnation, w.PeerMessage(fetch_offer=offer))

    def ticket(self, peer: WorkerId, message: w.Ticket) -> None:
        """The requester has room: push everything, all layers at once. May come while a step runs."""
        supply = self._supplies.get(TransferId(message.transfer))
        if supply is None or supply.peer != peer or supply.stage is SupplyStage.QUIESCING:
            self._context.count("tickets_dropped")
            self._context.outbox.refuse_ticket(peer, message)
            return
        if supply.stage is SupplyStage.PUSHING:
            self._context.count("tickets_dropped")
            return
        try:
            ticket = ticket_from_wire(message, self._context.worker, peer)
            self._check(supply, ticket)
            self._context.sender.open(ticket)
        except (TransferError, ValueError) as error:
            self._give_up(supply, TransferError("the ticket cannot be used", why=str(error)))
            return
        supply.stage, supply.ticket_s = SupplyStage.PUSHING, self._context.clock.now_s()
        try:
            self._push(supply, ticket)
        except ValueError as error:
            self._give_up(supply, TransferError("the ticket cannot be used", why=str(error)))

    def failed(self, peer: WorkerId, message: w.TransferFailed) -> None:
        """End the supply: the requester gave up, or needs nothing any more."""
        supply = self._supplies.get(TransferId(message.transfer))
        if supply is not None and supply.peer == peer:
            self._give_up(supply)

    def peer_gone(self, peer: WorkerId, incarnation: Incarnation) -> None:
        self._end(lambda s: s.peer == peer and incarnation in (0, s.peer_incarnation))

    def new_incarnation(self) -> None:
        """End all offers: the incarnation before made them."""
        self._end(lambda supply: True)

    def transfer_event(self, outcome: object) -> bool:
        """True if this was the event of a supply: with it the source is no longer read."""
        if not isinstance(outcome, SendCompleted | SendFailed | Quiesced):
            return False
        supply = self._supplies.get(outcome.transfer)
        if supply is None:
            return False
        if isinstance(outcome, SendCompleted):
            self._context.count(names.SUPPLIES)
            self._context.count_sent(supply.peer, outcome.bytes, self._context.clock.now_s() - supply.ticket_s)
        elif isinstance(outcome, SendFailed) and supply.stage is not SupplyStage.QUIESCING:
            self._context.count_unsent(supply.peer)
            self._tell_failed(supply, TransferError("the KV transfer failed", why=outcome.reason))
        self._forget(supply)
        return True

    def tick(self) -> None:
        for transfer in self._context.leases.overdue():
            supply = self._supplies.get(transfer)
            if supply is not None:
                self._context.count("transfers_forgotten")
                self._give_up(supply)

    def claims(self) -> list[Claim]:
        return [
            Claim("quiescing", _key(s), s.transfer, WorkerId(""), Incarnation(0))
            if s.stage is SupplyStage.QUIESCING
            else Claim("handover", _key(s), s.transfer, s.peer, s.peer_incarnation)
            for s in self._supplies.values()
        ]

    def is_idle(self) -> bool:
        return not self._supplies

    # ---- what is here ----------------------------------------------------------------------------------------------

    def _look(self, peer: WorkerId, message: w.FetchRequest) -> tuple[Supply, tuple[str, ...]]:
        """Find and pin blocks, with the codecs that this end offers. Raises TransferError, CapacityError or
        ValueError."""
        if message.holder_incarnation != self._context.incarnation:
            raise TransferError("this worker restarted", why="its incarnation is a new one")
        theirs = profile_from_wire(message.profile)
        codecs = tuple(name for name in self._context.offers_to(peer) if name in message.codecs)
        form = kv_compatibility.agree(self._context.profile, theirs, offered=codecs)
        root = self._context.hash_root(message.salt, lossy=message.lossy)
        hashes = chain(root, tuple(message.tokens), self._block_tokens)
        matches = self._matches(hashes, message.have_tokens // self._block_tokens)
        count = min(len(table) for table, _ in matches)
        tokens = count * self._block_tokens
        if tokens // theirs.layout.groups[0].block_tokens * theirs.layout.groups[0].block_tokens <= message.have_tokens:
            raise TransferError("it holds no more of the prefix", why=f"{tokens} tokens are here")
        supply = Supply(
            transfer=TransferId(message.fetch),
            name=fetch_name(RequestId(message.request)),
            attempt=Attempt(message.attempt),
            peer=peer,
            peer_incarnation=Incarnation(message.requester_incarnation),
            theirs=theirs,
            form=form,
            tables=tuple(table[:count] for table, _ in matches),
            window_offsets=tuple(min(left, count) for _, left in matches),
            tokens=tokens,
        )
        self._pin(supply)
        return supply, codecs

    def _matches(self, hashes: Sequence[BlockHash], have: int) -> list[tuple[list[BlockId], int]]:
        """For each KV group a table of the prefix's cached blocks, and the number of leading ones that are missing:
        where a group has a window and that reaches further, those before `have`, which the requester has or does not
        need."""
        found: list[tuple[list[BlockId], int]] = []
        for ledger, spec in zip(self._context.engine.ledgers, self._context.engine.layout.groups, strict=True):
            whole, left = ledger.match(hashes), 0
            rest = ledger.match(hashes[have:]) if spec.window is not None else []
            if rest and have + len(rest) > len(whole):
                whole, left = [*[GONE] * have, *rest], have
            found.append((whole, left))
        return found

    def _pin(self, supply: Supply) -> None:
        """Keep the blocks until the fetch ends. Cached ones are out of others' reach meanwhile, so not without bound:
        raises CapacityError, and holds nothing, where running requests need them or others are fetching much."""
        engine, everyone = self._context.engine, self._supplies.values()
        groups = [ledger.group for ledger in engine.ledgers]
        held = [sum(len(other.tables[group]) - other.window_offsets[group] for other in everyone) for group in groups]
        offered = [table[left:] for table, left in zip(supply.tables, supply.window_offsets, strict=True)]
        needs, pools = [len(table) for table in offered], [ledger.num_blocks for ledger in engine.ledgers]
        is_too_much = engine.is_short_of_blocks or peer_block_quota.is_over(held, needs, pools)
        if not is_too_much:
            for ledger, table in zip(engine.ledgers, offered, strict=True):
                ledger.share(supply.holder, table)
            is_too_much = any(ledger.available < engine.growth_blocks for ledger in engine.ledgers)
        if is_too_much:
            engine.blocks.release_holder(supply.holder)
            raise CapacityError("this worker is short of blocks")

    def _check(self, supply: Supply, ticket: Ticket) -> None:
        """Raise TransferError unless the ticket is for this offer, in the form that follows from both profiles."""
        if (ticket.sender_incarnation, ticket.receiver_incarnation) != (
            self._context.incarnation, supply.peer_incarnation
        ):  # fmt: skip
            raise TransferError("it is for another incarnation")
        if ticket.codec != supply.form.codec or ticket.layout != supply.theirs.layout:
            raise TransferError("its codec or layout is not the agreed one")
        if [group.group for group in ticket.groups] != [spec.group for spec in supply.theirs.layout.groups]:
            raise TransferError("it has other KV groups than this model")
        for spec, group, left in zip(supply.theirs.layout.groups, ticket.groups, supply.window_offsets, strict=True):
            if group.blocks and group.skip * spec.block_tokens < left * self._block_tokens:
                raise TransferError(f"group {group.group} asks for blocks before its window, which are no longer here")
            if (group.skip + len(group.blocks)) * spec.block_tokens > supply.tokens:
                raise TransferError(f"group {group.group} asks for more than the {supply.tokens} offered tokens")

    def _push(self, supply: Supply, ticket: Ticket) -> None:
        layout = self._context.engine.layout
        for ours, theirs, group, table in zip(
            layout.groups, supply.theirs.layout.groups, ticket.groups, supply.tables, strict=True
        ):
            if not group.blocks:
                continue
            first, offset_tokens = divmod(group.skip * theirs.block_tokens, ours.block_tokens)
            last = ours.blocks_for((group.skip + len(group.blocks)) * theirs.block_tokens)
            layers = range(len(ours.layers))
            self._context.sender.push(
                ticket.transfer, group.group, table[first:last], group.blocks, layers, offset_tokens
            )
        self._context.sender.finish(ticket.transfer)

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _end(self, is_meant: Callable[[Supply], bool]) -> None:
        for supply in [supply for supply in self._supplies.values() if is_meant(supply)]:
            self._give_up(supply)

    def _give_up(self, supply: Supply, error: TandemError | None = None) -> None:
        """Release what was offered; what is being pushed stays held until the sender is quiet. `error`: sent to the
        requester."""
        if error is not None:
            self._tell_failed(supply, error)
        if supply.stage is SupplyStage.OFFERED:
            self._forget(supply)
        elif supply.stage is SupplyStage.PUSHING:
            supply.stage = SupplyStage.QUIESCING
            self._context.leases.close(supply.transfer)
            self._context.sender.cancel(supply.transfer)

    def _forget(self, supply: Supply) -> None:
        del self._supplies[supply.transfer]
        self._context.leases.close(supply.transfer)
        self._context.engine.blocks.release_holder(supply.holder)

    def _tell_failed(self, supply: Supply, error: TandemError) -> None:
        event(_log, "supply failed", logging.WARNING, request=_key(supply), peer=supply.peer, error=error.message)
        failed = transfer_failed(supply.name, supply.attempt, supply.transfer, error.code, error.message)
        self._context.outbox.to_peer(supply.peer, supply.peer_incarnation, failed)


def _key(supply: Supply) -> str:
    return request_key(supply.name, supply.attempt)
