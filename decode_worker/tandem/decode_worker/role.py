"""The decode role: grants tickets for announced attempts, admits what every rank has verified, and generates."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

from tandem.core.errors import InvalidRequestError, TandemError, TransferError, from_code
from tandem.core.handoff import ChoiceState, HandoffTiming
from tandem.core.ids import Attempt, Incarnation, RequestId, WorkerId
from tandem.core.logs import event
from tandem.core.state_enums import FinishReason, Phase, RoleName
from tandem.decode_worker.reservation import Completed, Reservation, Reservations
from tandem.decode_worker.ticket_grants import Granting
from tandem.decode_worker.tickets import TicketQueue
from tandem.engine.request import StepResult
from tandem.kvtransfer.events import Failed, Verified
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.leases import FORGOTTEN
from tandem.workercore.mixed_role import MixedRole
from tandem.workercore.outbox import transfer_failed
from tandem.workercore.proto_convert import choices_from_wire
from tandem.workercore.requests import Tracked, request_key
from tandem.workercore.role_interface import Claim, RoleContext

_log = logging.getLogger(__name__)


class DecodeRole(MixedRole):
    """Announced → reserved → admitted → generating. Also serves whole requests (its own prefix, short prompts)."""

    name = RoleName.DECODE

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        self._tickets = TicketQueue(context)
        self._reservations = Reservations()
        self._granting = Granting(context, self._tickets, self._reservations)
        self._handoffs: dict[str, tuple[Completed, Verified]] = {}  # of those that have not run a step since

    def submit(self, tracked: Tracked, message: w.Submit) -> None:
        if message.leg == w.LEG_FULL:
            super().submit(tracked, message)
            return
        if message.leg != w.LEG_DECODE:
            raise InvalidRequestError("this worker does not prefill", why="it has the decode role", todo="plan again")
        self._context.engine.check(tracked.engine_request)
        self._tickets.announce(tracked)

    def cancel(self, tracked: Tracked, reason: str) -> None:
        self._forget(tracked)
        super().cancel(tracked, reason)

    def end_choices(self, tracked: Tracked, choices: Collection[int]) -> None:
        super().end_choices(tracked, choices)  # before admission `tracked` keeps them in mind
        if self._context.requests.get(tracked.key) is None:
            self._handoffs.pop(tracked.key, None)

    # ---- tickets -------------------------------------------------------------------------------------------------

    def peer_message(self, peer: WorkerId, message: w.PeerMessage, received_s: float) -> None:
        kind = message.WhichOneof("kind")
        if kind == "ticket_request":
            self._tickets.ask(peer, message.ticket_request)
            self._granting.grant_due()
        elif kind == "complete":
            self._complete(peer, message.complete, received_s)
        elif kind == "failed":
            self._sender_failed(peer, message.failed)

    # ---- admission -----------------------------------------------------------------------------------------------

    def _complete(self, peer: WorkerId, message: w.Complete, received_s: float) -> None:
        reservation = self._reservations.of_transfer(message.transfer)
        sender = (peer, message.sender_incarnation)
        if reservation is None or (reservation.peer, reservation.peer_incarnation) != sender:
            self._context.count("completes_dropped")
            return
        try:
            choices = choices_from_wire(message.choices)
        except TandemError as error:
            self._fail_unusable(reservation, error)
            return
        reservation.completed = Completed(
            choices=choices,
            received_s=received_s,
            sampled_s=message.sampled_at_s,
            ticket_wait_s=message.ticket_wait_s,
            is_same_host=message.host == self._context.host,
        )
        self._admit_if_ready(reservation)

    def transfer_event(self, event: object) -> None:
        if isinstance(event, Verified):
            reservation = self._reservations.of_transfer(event.transfer)
            if reservation is not None:
                reservation.verified = event
                self._admit_if_ready(reservation)
        elif isinstance(event, Failed):
            reservation = self._reservations.of_transfer(event.transfer)
            if reservation is not None:
                self._fail(reservation, TransferError("the KV transfer failed", why=event.reason, todo="try again"))

    def _admit_if_ready(self, reservation: Reservation) -> None:
        tracked, blocks = reservation.tracked, reservation.blocks
        completed, verified = reservation.completed, reservation.verified
        if completed is None or verified is None:
            return
        choices = _as_ended(completed.choices, tracked.ended_choices)
        is_over = all(state.finish is not None for state in choices)
        if is_over and tracked.ended_choices and len(choices) == tracked.engine_request.sampling.n:
            self._forget(tracked)
            self._context.end(tracked)
            return
        try:
            if is_over:
                raise TransferError("no choice continues")
            self._context.receiver.admit(reservation.ticket.transfer)
            self._context.engine.add_prefilled(tracked.engine_request, blocks.holder, blocks.tables, choices)
        except TandemError as error:
            self._fail_unusable(reservation, error)
            return
        self._unlist(reservation)
        tracked.has_reported_cached = True
        self._follow(tracked, {state.choice for state in choices if state.finish is None})
        self._handoffs[tracked.key] = completed, verified
        self._context.count("kv_received_bytes", verified.bytes)
        self._context.count("kv_received_blocks", blocks.new_blocks)
        self._context.count("kv_skipped_blocks", blocks.cached_blocks)
        self._context.count("requests_admitted")
        ticket = reservation.ticket
        said = w.Verified(
            request=ticket.request, attempt=ticket.attempt, transfer=ticket.transfer, bytes=verified.bytes
        )
        self._tell(reservation, w.PeerMessage(verified=said))
        self._context.outbox.phase(tracked, Phase.DECODE)

    def before_step(self) -> None:
        self._granting.grant_due()

    def after_step(self, result: StepResult) -> None:
        timings: dict[str, HandoffTiming] = {}
        if self._handoffs:
            for output in result.outputs:
                handoff = self._handoffs.pop(output.key, None)
                if handoff is not None:
                    timings[output.key] = self._timing(*handoff, result.started_s)
                    self._time_phase(output.key, *handoff, result.ended_s)
            for key in result.failed:
                self._handoffs.pop(key, None)
        self._report_tokens(result, timings)

    def _time_phase(self, key: str, completed: Completed, verified: Verified, sampled_s: float) -> None:
        tracked = self._context.requests.get(key)
        if tracked is not None:
            tracked.phase_s = sampled_s - max(completed.received_s, verified.verified_at_s)

    def _timing(self, completed: Completed, verified: Verified, started_s: float) -> HandoffTiming:
        """The parts of the hand-off overhead. Clocks of two hosts cannot be compared: then count from `complete`."""
        ready_s = max(completed.received_s, verified.verified_at_s)
        sampled_s = completed.sampled_s if completed.is_same_host else completed.received_s
        return HandoffTiming(
            ticket_wait_s=completed.ticket_wait_s,
            sample_to_step_s=max(0.0, started_s - sampled_s),
            last_wire_s=verified.last_wire_s,
            step_rest_s=self._context.rest_of_step_s(ready_s),
        )

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _sender_failed(self, peer: WorkerId, failed: w.TransferFailed) -> None:
        """The prefill worker gave up, or needs no decode ("not_needed")."""
        key = request_key(failed.request, failed.attempt)
        reservation = self._reservations.get(key)
        if reservation is not None and reservation.peer != peer:
            return
        if failed.transfer and (reservation is None or failed.transfer != reservation.ticket.transfer):
            return  # a ticket that is not, or no longer, this attempt's
        tracked = reservation.tracked if reservation else self._tickets.announced(key)
        self._context.requests.add_tombstone(
            RequestId(failed.request), Attempt(failed.attempt), self._context.clock.now_s()
        )
        self._tickets.remove(key)
        if tracked is None:
            return
        self._forget(tracked)
        if failed.code in ("not_needed", "cancelled"):
            self._context.end(tracked)
        else:
            self._context.fail(tracked, from_code(failed.code, failed.message))

    def peer_gone(self, peer: WorkerId, incarnation: Incarnation, reason: str) -> None:
        self._tickets.peer_gone(peer, incarnation)
        for reservation in self._reservations.all():
            if reservation.peer == peer and incarnation in (0, reservation.peer_incarnation):
                what = f"prefill worker {peer} was lost during the hand-over"
                self._fail(reservation, TransferError(what, why=reason, todo="try again"), is_peer_told=True)

    def _fail_unusable(self, reservation: Reservation, error: TandemError) -> None:
        """Fail as the peer's fault, whatever `error` states: the client's request was checked at its announcement."""
        self._fail(reservation, TransferError("the hand-over cannot be used", why=error.message, todo="try again"))

    def _fail(self, reservation: Reservation, error: TandemError, *, is_peer_told: bool = False) -> None:
        event(_log, "transfer failed", logging.WARNING, **reservation.tracked.names, error=error.message)
        if not is_peer_told:
            self._tell_failed(reservation, error)
        self._forget(reservation.tracked, is_peer_told=True)
        self._context.fail(reservation.tracked, error)

    def _forget(self, tracked: Tracked, *, is_peer_told: bool = False) -> None:
        """Drop everything that precedes admission; fence first, then the blocks go back."""
        self._tickets.forget(tracked.key)
        self._handoffs.pop(tracked.key, None)
        reservation = self._reservations.get(tracked.key)
        if reservation is None:
            return
        if not is_peer_told:
            self._tell_failed(reservation, from_code("cancelled", "the request was cancelled."))
        self._unlist(reservation)
        self._context.receiver.cancel(reservation.ticket.transfer)
        self._context.engine.blocks.release_holder(reservation.blocks.holder)

    def _unlist(self, reservation: Reservation) -> None:
        self._reservations.remove(reservation)
        self._context.leases.close(reservation.ticket.transfer)

    def _tell_failed(self, reservation: Reservation, error: TandemError) -> None:
        ticket = reservation.ticket
        failed = transfer_failed(ticket.request, ticket.attempt, ticket.transfer, error.code, error.message)
        self._tell(reservation, failed)

    def _tell(self, reservation: Reservation, message: w.PeerMessage) -> None:
        self._context.outbox.to_peer(reservation.peer, reservation.peer_incarnation, message)

    def tick(self, now_s: float) -> None:
        self._tickets.tick(now_s)
        for transfer in self._context.leases.overdue():
            reservation = self._reservations.of_transfer(transfer)
            if reservation is not None:
                what = f"prefill worker {reservation.peer} has forgotten the hand-over"
                self._context.count("transfers_forgotten")
                self._fail(reservation, TransferError(what, why=FORGOTTEN, todo="try again"))

    def claims(self) -> list[Claim]:
        return [
            Claim("reservation", r.tracked.key, r.ticket.transfer, r.peer, r.peer_incarnation)
            for r in self._reservations.all()
        ]

    def is_idle(self) -> bool:
        return not self._tickets and not self._reservations and super().is_idle()


def _as_ended(choices: tuple[ChoiceState, ...], ended: Collection[int]) -> tuple[ChoiceState, ...]:
    """Return the choices as the prefill worker left them, with the `ended` ones finished."""
    return tuple(
        replace(state, finish=FinishReason.STOP) if state.choice in ended and state.finish is None else state
        for state in choices
    )
