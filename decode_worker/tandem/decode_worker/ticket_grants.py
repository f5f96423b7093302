"""Grants tickets, and frees blocks for the head of the queue when blocks are short (docs/adr/0005).

too few blocks ──▶ tickets without a push are revoked ──▶ the youngest running requests are preempted ──▶ wait
no turn among the choices that run at once ──▶ tickets without a push are revoked ──▶ wait
"""

from __future__ import annotations

from collections import Counter

from tandem.core.ids import Incarnation, TransferId, new_transfer_id
from tandem.core.kv_compatibility import WireForm
from tandem.core.proto_mapping import to_proto
from tandem.decode_worker.reservation import Reservation, Reservations, needs, reserve
from tandem.decode_worker.tickets import QueuedTicketRequest, TicketQueue
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.wire import profile_to_wire
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore import peer_block_quota
from tandem.workercore.block_reservation import BlockReservation
from tandem.workercore.requests import Tracked
from tandem.workercore.role_interface import RoleContext

UNUSED_S = 1.0
"""A ticket without a push for so long may be revoked: pushing starts within a step and a dial."""


class Granting:
    """Turns waiting tickets into reservations. Belongs to the step loop's thread."""

    def __init__(self, context: RoleContext, tickets: TicketQueue, reservations: Reservations) -> None:
        self._context, self._tickets, self._reservations = context, tickets, reservations
        self._profile = profile_to_wire(context.profile)
        self._short: tuple[str, int] | None = None  # request short of blocks; the fewest available since

    def grant_due(self) -> None:
        """Grant in the order of asking. Freed blocks collect for the oldest request within its peer's quota: no request
        overtakes it, nor does it overtake an older request that was preempted here and waits for its blocks."""
        if self._context.engine.is_short_of_blocks:
            self._revoke_unused()  # one a turn, also if no ticket waits
        due = list(self._tickets.due())
        waiting = Counter(asked.peer for _, asked, _ in due)
        for key, asked, tracked in due:
            if waiting.total() > waiting[asked.peer] and self._is_over_quota(asked, tracked):
                continue  # it has its share already, and others wait
            transfer = new_transfer_id()
            self._root(tracked, asked.form)
            room = self._find_room(tracked, transfer)
            if room is None:
                break
            waiting[asked.peer] -= 1
            self._tickets.granted(key)
            self._grant(asked, tracked, transfer, room)
        self._context.engine.scheduler.reserved_sequences = self._reservations.choices
        self._tickets.tell_waiting()

    def _is_over_quota(self, asked: QueuedTicketRequest, tracked: Tracked) -> bool:
        engine = self._context.engine
        held = self._reservations.blocks_of(asked.peer)
        return peer_block_quota.is_over(held, needs(engine, tracked), [ledger.num_blocks for ledger in engine.ledgers])

    def _find_room(self, tracked: Tracked, transfer: TransferId) -> BlockReservation | None:
        engine, scheduler = self._context.engine, self._context.engine.scheduler
        choices, arrival_s = tracked.engine_request.sampling.n, tracked.engine_request.arrival_s
        preempted_s = scheduler.oldest_preempted_s
        if scheduler.is_starved or (preempted_s is not None and preempted_s <= arrival_s):
            return None  # freed blocks are for those requests first
        if not scheduler.has_turn_for(choices, arrival_s, 0):
            return None  # revoking every reservation would not give it a turn either
        while not scheduler.has_turn_for(choices, arrival_s, self._reservations.choices):
            if not self._revoke_unused():
                return None  # once admitted it would get no token until another choice has ended
        room = self._reserve(tracked, transfer)
        while room is None and self._revoke_unused():
            room = self._reserve(tracked, transfer)
        if room is None and (victims := engine.preempt_for(arrival_s, needs(engine, tracked))):
            self._context.count("preemptions", len(victims))
            self._context.count("preempted_for_tickets", len(victims))
            room = self._reserve(tracked, transfer)
        return room

    def _reserve(self, tracked: Tracked, transfer: TransferId) -> BlockReservation | None:
        """Reserve blocks for the prompt. Tried only if blocks came back since this request found too few: its prompt
        would be hashed for nothing."""
        engine = self._context.engine
        available = min(ledger.available for ledger in engine.ledgers) - engine.growth_blocks
        if self._short is not None and self._short[0] == tracked.key:
            least = self._short[1]
            self._short = (tracked.key, min(available, least))
            if available <= least:
                return None
        room = reserve(engine, tracked, transfer)
        self._short = (tracked.key, available) if room is None else None
        return room

    def _revoke_unused(self) -> bool:
        """Revoke the ticket that has been without a byte for longest, if one is past the bound; True if one was."""
        oldest_s = self._context.clock.now_s() - UNUSED_S
        for reservation in self._reservations.all():
            if reservation.granted_s > oldest_s:
                return False  # and so are all that follow
            if self._context.receiver.revoke(reservation.ticket.transfer):
                self._take_back(reservation)
                return True
        return False

    def _take_back(self, reservation: Reservation) -> None:
        """Release the blocks of a fenced transfer; the request waits for its peer to ask again."""
        ticket = reservation.ticket
        self._reservations.remove(reservation)
        self._context.leases.close(ticket.transfer)
        self._context.engine.blocks.release_holder(reservation.blocks.holder)
        self._tickets.announce(reservation.tracked)
        revoked = w.TicketRevoked(
            request=ticket.request,
            attempt=ticket.attempt,
            transfer=ticket.transfer,
            reason=f"nothing was pushed for {UNUSED_S:g} s, and blocks or turns are short",
        )
        message = w.PeerMessage(revoked=revoked)
        self._context.outbox.to_peer(reservation.peer, reservation.peer_incarnation, message)
        self._context.count("tickets_revoked")

    def _root(self, tracked: Tracked, form: WireForm) -> None:
        """Root the request's block hashes in the wire form in which its prompt comes: blocks that a codec or a
        conversion changed are never taken for computed ones."""
        root = self._context.hash_root(tracked.salt, lossy=form.lossy)
        tracked.engine_request = tracked.engine_request.under(root)

    def _grant(
        self, asked: QueuedTicketRequest, tracked: Tracked, transfer: TransferId, room: BlockReservation
    ) -> None:
        ticket = Ticket(
            transfer=transfer,
            request=tracked.request,
            attempt=tracked.attempt,
            sender=asked.peer,
            sender_incarnation=Incarnation(asked.message.sender_incarnation),
            receiver=self._context.worker,
            receiver_incarnation=self._context.incarnation,
            groups=room.groups,
            endpoints=self._context.receiver.endpoints(),
            layout=self._context.profile.layout,
            codec=asked.form.codec,
        )
        reservation = Reservation(
            tracked=tracked,
            ticket=ticket,
            blocks=room,
            granted_s=self._context.clock.now_s(),
        )
        self._reservations.add(reservation)
        self._context.leases.open(transfer, reservation.peer, reservation.peer_incarnation)
        self._context.receiver.expect(ticket)
        message = w.PeerMessage(ticket=to_proto(w.Ticket, ticket, profile=self._profile))
        self._context.outbox.to_peer(reservation.peer, reservation.peer_incarnation, message)
