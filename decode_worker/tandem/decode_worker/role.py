"""The decode role: grants tickets for announced attempts, admits what every rank has verified, and generates."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError, TandemError, TransferError, from_code
from tandem.core.handoff import HandoffTiming
from tandem.core.ids import Attempt, Incarnation, RequestId, WorkerId, new_transfer_id
from tandem.core.lifecycle import Phase, RoleName
from tandem.core.logs import event
from tandem.decode_worker.reservation import Reservation, release, reserve
from tandem.engine.request import LayerHook, StepResult
from tandem.kvtransfer.events import Failed, Verified
from tandem.kvtransfer.ticket import Ticket
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.requests import Tracked, request_key
from tandem.workerhost.role import Shell
from tandem.workerhost.whole_requests import WholeRequests
from tandem.workerhost.wire import choices_from_wire, ticket_to_wire

_log = logging.getLogger(__name__)
ANNOUNCEMENT_WAIT_S = 5.0
"""How long a ticket request may be ahead of its announcement."""


@dataclass(frozen=True, slots=True)
class _Asked:
    peer: WorkerId
    message: w.TicketRequest
    asked_s: float


class DecodeRole:
    """Announced → reserved → admitted → generating. Also serves whole requests (its own prefix, short prompts)."""

    name = RoleName.DECODE

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._whole = WholeRequests(shell)
        self._announced: dict[str, Tracked] = {}
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._reservations: dict[str, Reservation] = {}
        self._by_transfer: dict[int, Reservation] = {}
        self._handoffs: dict[str, Reservation] = {}

    @property
    def layer_hook(self) -> LayerHook | None:
        return None

    def submit(self, tracked: Tracked, message: w.Submit) -> None:
        if message.leg == w.LEG_FULL:
            self._whole.add(tracked)
            return
        if message.leg != w.LEG_DECODE:
            raise InvalidRequestError("this worker does not prefill", why="it has the decode role", todo="plan anew")
        self._shell.engine.check(tracked.engine_request)
        self._announced[tracked.key] = tracked

    def cancel(self, tracked: Tracked, reason: str) -> None:
        self._forget(tracked)
        self._whole.cancel(tracked)

    # ---- tickets -------------------------------------------------------------------------------------------------

    def peer_message(self, peer: WorkerId, message: w.PeerMessage, received_s: float) -> None:
        kind = message.WhichOneof("kind")
        if kind == "ticket_request":
            self._ticket_request(peer, message.ticket_request)
        elif kind == "complete":
            self._complete(peer, message.complete, received_s)
        elif kind == "failed":
            self._sender_failed(peer, message.failed)

    def _ticket_request(self, peer: WorkerId, asked: w.TicketRequest) -> None:
        refusal = self._refusal(asked)
        if refusal is not None:
            self._refuse(peer, asked, refusal)
            return
        key = request_key(asked.request, asked.attempt)
        self._asked[key] = _Asked(peer, asked, self._shell.clock.now_s())
        self._grant_waiting()

    def _refusal(self, asked: w.TicketRequest) -> TandemError | None:
        layout = self._shell.engine.layout
        if asked.receiver_incarnation != self._shell.incarnation:
            return TransferError("this decode worker restarted", why="its incarnation is a new one", todo="try again")
        if self._shell.requests.is_buried(RequestId(asked.request), Attempt(asked.attempt)):
            return from_code("cancelled", "this attempt is over")
        mine = (self._shell.fingerprint, layout.groups[0].block_tokens, layout.groups[0].dtype, layout.tp)
        theirs = (asked.fingerprint, asked.block_tokens, asked.kv_dtype, asked.tp)
        if mine != theirs:
            return TransferError("prefill and decode worker do not match", why=f"{theirs} against {mine}")
        return None

    def _grant_waiting(self) -> None:
        """Grant in the order of asking; the head waits for room and nobody overtakes it."""
        for key, asked in list(self._asked.items()):
            tracked = self._announced.get(key)
            if tracked is None:
                continue
            transfer = new_transfer_id()
            room = reserve(self._shell.engine, tracked, transfer)
            if room is None:
                return
            del self._asked[key]
            del self._announced[key]
            ticket = Ticket(
                transfer=transfer,
                request=tracked.request,
                attempt=tracked.attempt,
                sender=asked.peer,
                sender_incarnation=Incarnation(asked.message.sender_incarnation),
                receiver=self._shell.worker,
                receiver_incarnation=self._shell.incarnation,
                groups=room.groups,
                endpoints=self._shell.receiver.endpoints(),
            )
            reservation = Reservation(
                tracked=tracked,
                ticket=ticket,
                peer=asked.peer,
                peer_incarnation=ticket.sender_incarnation,
                tables=room.tables,
                holder=room.holder,
                skipped_blocks=room.skipped_blocks,
                received_blocks=room.new_blocks,
            )
            self._reservations[key] = self._by_transfer[transfer] = reservation
            self._shell.receiver.expect(ticket)
            self._tell(reservation, w.PeerMessage(ticket=ticket_to_wire(ticket)))

    def _refuse(self, peer: WorkerId, asked: w.TicketRequest, error: TandemError) -> None:
        refused = w.TicketRefused(request=asked.request, attempt=asked.attempt, code=error.code, message=error.message)
        to = w.PeerMessage(ticket_refused=refused)
        self._shell.outbox.to_peer(peer, Incarnation(asked.sender_incarnation), to)
        self._shell.count("tickets_refused")

    # ---- admission -----------------------------------------------------------------------------------------------

    def _complete(self, peer: WorkerId, message: w.Complete, received_s: float) -> None:
        reservation = self._by_transfer.get(message.transfer)
        if reservation is None or not self._is_current(reservation, peer, message.sender_incarnation):
            self._shell.count("completes_dropped")
            return
        reservation.choices = choices_from_wire(message.choices)
        reservation.complete_s = received_s
        reservation.sampled_s = message.sampled_at_s
        reservation.ticket_wait_s = message.ticket_wait_s
        reservation.is_same_host = message.host == self._shell.host
        self._admit_if_ready(reservation)

    def transfer_event(self, event: object) -> None:
        if isinstance(event, Verified):
            reservation = self._by_transfer.get(event.transfer)
            if reservation is not None:
                reservation.verified_s = event.verified_at_s
                reservation.last_wire_s = event.last_wire_s
                reservation.received_bytes = event.bytes
                self._admit_if_ready(reservation)
        elif isinstance(event, Failed):
            reservation = self._by_transfer.get(event.transfer)
            if reservation is not None:
                self._fail(reservation, TransferError("the KV transfer failed", why=event.reason, todo="try again"))

    def _admit_if_ready(self, reservation: Reservation) -> None:
        if not reservation.is_ready:
            return
        choices = reservation.choices
        assert choices is not None
        tracked = reservation.tracked
        try:
            self._shell.receiver.admit(reservation.ticket.transfer)
            self._shell.engine.add_prefilled(tracked.engine_request, reservation.holder, reservation.tables, choices)
        except TandemError as error:
            self._fail(reservation, error)
            return
        self._unlist(reservation)
        tracked.has_reported_cached = True
        self._whole.follow(tracked, {state.choice for state in choices if state.finish is None})
        self._handoffs[tracked.key] = reservation
        self._shell.count("kv_received_bytes", reservation.received_bytes)
        self._shell.count("kv_received_blocks", reservation.received_blocks)
        self._shell.count("kv_skipped_blocks", reservation.skipped_blocks)
        self._shell.count("requests_admitted")
        ticket = reservation.ticket
        verified = w.Verified(
            request=ticket.request, attempt=ticket.attempt, transfer=ticket.transfer, bytes=reservation.received_bytes
        )
        self._tell(reservation, w.PeerMessage(verified=verified))
        self._shell.outbox.phase(tracked, Phase.DECODE)

    def before_step(self) -> None:
        if self._asked:
            self._grant_waiting()

    def after_step(self, result: StepResult) -> None:
        timings: dict[str, HandoffTiming] = {}
        if self._handoffs:
            for output in result.outputs:
                reservation = self._handoffs.pop(output.key, None)
                if reservation is not None:
                    timings[output.key] = self._timing(reservation, result.started_s)
        self._whole.after_step(result, timings)

    def _timing(self, reservation: Reservation, started_s: float) -> HandoffTiming:
        """The parts of the hand-off overhead. Clocks of two hosts cannot be compared: then count from `complete`."""
        ready_s = max(reservation.complete_s, reservation.verified_s or 0.0)
        sampled_s = reservation.sampled_s if reservation.is_same_host else reservation.complete_s
        return HandoffTiming(
            ticket_wait_s=reservation.ticket_wait_s,
            sample_to_step_s=max(0.0, started_s - sampled_s),
            last_wire_s=reservation.last_wire_s,
            step_rest_s=self._shell.rest_of_step_s(ready_s),
        )

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _sender_failed(self, peer: WorkerId, failed: w.TransferFailed) -> None:
        """The prefill worker gave up, or needs no decode ("not_needed")."""
        key = request_key(failed.request, failed.attempt)
        reservation = self._reservations.get(key)
        tracked = reservation.tracked if reservation else self._announced.get(key)
        if reservation is not None and reservation.peer != peer:
            return
        self._shell.requests.bury(RequestId(failed.request), Attempt(failed.attempt), self._shell.clock.now_s())
        self._asked.pop(key, None)
        if tracked is None:
            return
        self._forget(tracked)
        if failed.code in ("not_needed", "cancelled"):
            self._shell.requests.remove(tracked.key)
        else:
            self._shell.fail(tracked, from_code(failed.code, failed.message))

    def peer_gone(self, peer: WorkerId, reason: str) -> None:
        for key in [key for key, asked in self._asked.items() if asked.peer == peer]:
            del self._asked[key]
        for reservation in [r for r in self._reservations.values() if r.peer == peer]:
            error = TransferError(f"prefill worker {peer} was lost during the hand-over", why=reason, todo="try again")
            self._fail(reservation, error, is_peer_told=True)

    def _fail(self, reservation: Reservation, error: TandemError, *, is_peer_told: bool = False) -> None:
        event(_log, "transfer failed", logging.WARNING, request=reservation.tracked.key, error=error.message)
        if not is_peer_told:
            self._tell_failed(reservation, error)
        self._forget(reservation.tracked, is_peer_told=True)
        self._shell.fail(reservation.tracked, error)

    def _forget(self, tracked: Tracked, *, is_peer_told: bool = False) -> None:
        """Drop everything that precedes admission; fence first, then the blocks go back."""
        self._announced.pop(tracked.key, None)
        self._asked.pop(tracked.key, None)
        self._handoffs.pop(tracked.key, None)
        reservation = self._reservations.get(tracked.key)
        if reservation is None:
            return
        if not is_peer_told:
            self._tell_failed(reservation, from_code("cancelled", "the request was cancelled."))
        self._unlist(reservation)
        self._shell.receiver.cancel(reservation.ticket.transfer)
        release(self._shell.engine, reservation.holder)

    def _unlist(self, reservation: Reservation) -> None:
        del self._reservations[reservation.tracked.key]
        del self._by_transfer[reservation.ticket.transfer]

    def _tell_failed(self, reservation: Reservation, error: TandemError) -> None:
        ticket = reservation.ticket
        failed = w.TransferFailed(
            request=ticket.request,
            attempt=ticket.attempt,
            transfer=ticket.transfer,
            code=error.code,
            message=error.message,
        )
        self._tell(reservation, w.PeerMessage(failed=failed))

    def _tell(self, reservation: Reservation, message: w.PeerMessage) -> None:
        self._shell.outbox.to_peer(reservation.peer, reservation.peer_incarnation, message)

    def _is_current(self, reservation: Reservation, peer: WorkerId, incarnation: int) -> bool:
        return reservation.peer == peer and reservation.peer_incarnation == incarnation

    def tick(self, now_s: float) -> None:
        for key, asked in list(self._asked.items()):
            if key not in self._announced and now_s - asked.asked_s > ANNOUNCEMENT_WAIT_S:
                del self._asked[key]
                error = TransferError("no router announced this request", todo="try again")
                self._refuse(asked.peer, asked.message, error)

    def is_idle(self) -> bool:
        pending = self._announced or self._asked or self._reservations
        return not pending and self._whole.is_idle()
