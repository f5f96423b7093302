"""The prefill role: one hand-over per request, from its first chunk until the receiver reports verified KV."""

from __future__ import annotations

import logging
from collections.abc import Collection

from tandem.core.errors import InternalError, InvalidRequestError, TandemError, TransferError, from_code
from tandem.core.ids import Incarnation, TransferId, WorkerId
from tandem.core.ledger import Holder, subject_of
from tandem.core.logs import event
from tandem.core.state_enums import Phase, RoleName
from tandem.engine.request import LayerHook, PrefillSlice, StepResult
from tandem.kvtransfer.events import Quiesced, SendCompleted, SendFailed
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.wire import profile_from_wire
from tandem.prefill_worker.handover import Handover, HandoverStage, pusher
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.leases import FORGOTTEN, send_holdings
from tandem.workercore.mixed_role import MixedRole
from tandem.workercore.proto_convert import ticket_from_wire
from tandem.workercore.requests import Tracked, request_key
from tandem.workercore.role_interface import Claim, RoleContext

_log = logging.getLogger(__name__)


class PrefillRole(MixedRole):
    """Computes prompts and pushes their KV. Every request here ends as handed over, not needed, failed or cancelled.

    Also serves whole requests: answers of one token need no decode worker.
    """

    name = RoleName.PREFILL

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        self._layers = 1 + max(layer for spec in context.engine.layout.groups for layer in spec.layers)
        self._handovers: dict[str, Handover] = {}
        self._by_transfer: dict[int, Handover] = {}
        self._quiescing: dict[int, Holder] = {}

    @property
    def layer_hook(self) -> LayerHook | None:
        return self._on_layers

    def submit(self, tracked: Tracked, message: w.Submit) -> None:
        if message.leg == w.LEG_FULL:
            super().submit(tracked, message)
            return
        if message.leg != w.LEG_PREFILL:
            raise InvalidRequestError("this worker receives no KV", why="it has the prefill role", todo="plan again")
        self._context.engine.add(tracked.engine_request)
        self._handovers[tracked.key] = Handover(tracked, message.peer)

    def cancel(self, tracked: Tracked, reason: str) -> None:
        handover = self._handovers.get(tracked.key)
        if handover is not None:
            self._give_up(handover, "cancelled", reason)
        super().cancel(tracked, reason)

    def end_choices(self, tracked: Tracked, choices: Collection[int]) -> None:
        super().end_choices(tracked, choices)
        handover = self._handovers.get(tracked.key)
        if handover is None or handover.stage is HandoverStage.AWAITING:  # else the decode worker does it
            return
        for choice in choices:
            self._context.engine.end_choice(tracked.key, choice)
        if handover.end(choices):
            self._prefilled(handover)

    # ---- compute -------------------------------------------------------------------------------------------------

    def _on_layers(self, slices: tuple[PrefillSlice, ...], first_layer: int, last_layer: int) -> None:
        send_holdings(self._context)  # a long step is no reason to be taken for forgetful
        for part in slices:
            handover = self._handovers.get(part.key)
            if handover is None:
                continue
            if handover.stage is HandoverStage.QUEUED:
                self._begin(handover, part)
            if last_layer > first_layer:
                for plan in handover.plans:
                    plan.computed(first_layer, last_layer, part.end)
                self._push(handover)

    def _begin(self, handover: Handover, part: PrefillSlice) -> None:
        """Ask for the ticket of a request that left the queue. Its first chunk is being computed meanwhile."""
        handover.start(self._context.engine.layout, part.start)
        self._context.outbox.phase(handover.tracked, Phase.PREFILL)
        if not handover.peer.worker:
            return
        handover.offered = self._context.offers_to(WorkerId(handover.peer.worker))
        self._tell(handover, handover.ticket_request(self._context), dial=True)

    def after_step(self, result: StepResult) -> None:
        touched: dict[str, Handover] = {}
        for output in result.outputs:
            handover = self._handovers.get(output.key)
            if handover is None or output.key in result.failed:
                continue
            self._context.report_token(handover.tracked, output)
            handover.first_token(output, self._context.clock.now_s())
            touched[output.key] = handover
        for key, error in result.failed.items():
            failed = self._handovers.get(key)
            if failed is not None:
                self._fail(failed, error if isinstance(error, TandemError) else InternalError(str(error)))
        self._report_tokens(result, {})
        computed = tuple(part for part in result.prefilled if part.key not in result.failed)
        self._on_layers(computed, 0, self._layers)  # layers that the hook did not receive, having no lease
        for key, handover in touched.items():
            if handover.has_first_tokens and key in self._handovers:
                self._prefilled(handover)

    def _prefilled(self, handover: Handover) -> None:
        if handover.is_finished:
            if handover.peer.worker:  # also if it never left the queue: then the decode worker waits for its ticket
                ended = handover.given_up("not_needed", "the answer ended with its first token")
                self._tell(handover, ended, dial=True)
            self._end(handover)
            return
        if not handover.peer.worker:
            self._fail(handover, InternalError("the answer continues, but no decode worker was planned for it"))
            return
        self._complete_if_ready(handover)
        if handover.tracked.key in self._handovers:  # else it just failed, and nothing may follow that
            self._context.outbox.phase(handover.tracked, Phase.TRANSFER)

    # ---- push ----------------------------------------------------------------------------------------------------

    def _push(self, handover: Handover) -> None:
        ticket = handover.ticket
        if ticket is None:
            return
        for group, plan in zip(ticket.groups, handover.plans, strict=True):
            pushes = plan.take()
            if not pushes:
                continue
            source = self._context.engine.block_table(handover.tracked.key, group.group)
            for push in pushes:
                ours, offset_tokens, tokens = plan.source(push)
                self._context.sender.push(
                    ticket.transfer,
                    group.group,
                    source[ours],
                    group.blocks[push.first - group.skip : push.last - group.skip],
                    range(push.first_layer, push.last_layer),
                    offset_tokens,
                    tokens,
                )

    def _complete_if_ready(self, handover: Handover) -> None:
        """Hand the sequence over once the ticket is here and the first tokens are sampled."""
        ticket = handover.ticket
        if ticket is None or not handover.has_first_tokens or handover.stage is not HandoverStage.COMPUTING:
            return
        self._push(handover)
        if not all(plan.is_complete for plan in handover.plans):
            self._fail(handover, InternalError("the prompt is computed, but not all of its KV was pushed"))
            return
        self._context.sender.finish(ticket.transfer)
        handover.stage = HandoverStage.AWAITING
        self._tell(handover, handover.complete(self._context, ticket))

    # ---- the other end --------------------------------------------------------------------------------------------

    def peer_message(self, peer: WorkerId, message: w.PeerMessage, received_s: float) -> None:
        kind = message.WhichOneof("kind")
        if kind == "ticket":
            self._ticket(peer, message.ticket, received_s)
        elif kind == "ticket_refused":
            refused = message.ticket_refused
            handover = self._find(peer, refused.request, refused.attempt)
            if handover is not None:
                self._fail(handover, from_code(refused.code, refused.message))
        elif kind == "verified":
            handover = self._by_transfer.get(message.verified.transfer)
            if handover is not None and handover.peer.worker == peer:
                handover.is_verified = True
                self._context.leases.close(TransferId(message.verified.transfer))  # the transfer's ends do the rest
                self._end_if_done(handover)
        elif kind == "revoked":
            self._revoked(peer, message.revoked)
        elif kind == "queued":
            if self._find(peer, message.queued.request, message.queued.attempt) is not None:
                self._context.count("tickets_queued")
        elif kind == "failed":
            failed = message.failed
            handover = self._find(peer, failed.request, failed.attempt)
            if handover is not None:
                self._fail(handover, from_code(failed.code, failed.message), is_peer_told=True)

    def _ticket(self, peer: WorkerId, message: w.Ticket, received_s: float) -> None:
        handover = self._find(peer, message.request, message.attempt)
        is_asked = handover is not None and handover.stage is HandoverStage.COMPUTING and handover.ticket is None
        if handover is not None and message.transfer in handover.revoked:
            self._context.count("tickets_dropped")
            return
        if handover is None or not is_asked or message.sender_incarnation != self._context.incarnation:
            self._context.count("tickets_dropped")
            if handover is None or handover.ticket is None or handover.ticket.transfer != message.transfer:
                self._context.outbox.refuse_ticket(peer, message)
            return
        ticket = ticket_from_wire(message, self._context.worker, peer)
        try:
            handover.check(ticket, self._context.profile, profile_from_wire(message.profile))
            self._context.sender.open(ticket)
        except (TransferError, ValueError) as error:
            self._fail(handover, TransferError("the ticket cannot be used", why=str(error), todo="try again"))
            return
        handover.grant(ticket, received_s, self._context.engine)
        self._by_transfer[ticket.transfer] = handover
        self._context.leases.open(ticket.transfer, peer, ticket.receiver_incarnation)
        self._push(handover)
        self._complete_if_ready(handover)

    def _revoked(self, peer: WorkerId, message: w.TicketRevoked) -> None:
        """Ask again for a ticket that the decode worker revoked because nothing had come for it. The receiver drops
        what is in flight; the source is still here, and the request waits in turn."""
        handover = self._find(peer, message.request, message.attempt)
        if handover is None or handover.stage is HandoverStage.QUEUED or message.transfer in handover.revoked:
            self._context.count("revocations_dropped")
            return
        ticket = handover.ticket
        if ticket is not None and ticket.transfer != message.transfer:
            self._context.count("revocations_dropped")
            return
        if ticket is not None:
            self._stop_push(handover, ticket)
        handover.take_back(message.transfer)
        self._context.count("tickets_revoked")
        self._tell(handover, handover.ticket_request(self._context))

    def peer_gone(self, peer: WorkerId, incarnation: Incarnation, reason: str) -> None:
        for handover in list(self._handovers.values()):
            is_there = handover.peer.worker == peer and incarnation in (0, handover.peer.incarnation)
            if not is_there or handover.stage is HandoverStage.QUEUED:
                continue
            error = TransferError(f"decode worker {peer} was lost during the hand-over", why=reason, todo="try again")
            self._fail(handover, error, is_peer_told=True)

    def transfer_event(self, event: object) -> None:
        if not isinstance(event, SendCompleted | SendFailed | Quiesced):
            return
        quiet = self._quiescing.pop(event.transfer, None)
        if quiet is not None:  # whichever event the transfer ended with: its source is no longer read
            self._context.engine.blocks.release_holder(quiet)
            return
        handover = self._by_transfer.get(event.transfer)
        if handover is None:
            return
        handover.is_sent = True
        if isinstance(event, SendCompleted):
            took_s = self._context.clock.now_s() - handover.ticket_s
            self._context.count_sent(WorkerId(handover.peer.worker), event.bytes, took_s)
        if isinstance(event, SendCompleted) or handover.is_verified:  # a link may break after the last byte
            self._end_if_done(handover)
        else:
            why = event.reason if isinstance(event, SendFailed) else "it was cancelled"
            self._fail(handover, TransferError("the KV transfer failed", why=why, todo="try again"))

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _end_if_done(self, handover: Handover) -> None:
        if handover.is_verified and handover.is_sent:
            self._context.count("handovers")
            self._end(handover)

    def _end(self, handover: Handover) -> None:
        """End a successful hand-over: its blocks stay behind as cache."""
        self._drop(handover)
        self._context.engine.cancel(handover.tracked.key)
        self._context.end(handover.tracked)

    def _fail(self, handover: Handover, error: TandemError, *, is_peer_told: bool = False) -> None:
        event(_log, "handover failed", logging.WARNING, **handover.tracked.names, error=error.message)
        if handover.ticket is not None:
            self._context.count_unsent(WorkerId(handover.peer.worker))
        if is_peer_told:
            self._drop(handover)
        else:
            self._give_up(handover, error.code, error.message)
        self._context.fail(handover.tracked, error)

    def _give_up(self, handover: Handover, code: str, message: str) -> None:
        self._tell_failed(handover, code, message)
        self._drop(handover)

    def _drop(self, handover: Handover) -> None:
        """Forget the hand-over. If its push has not ended, its blocks stay held until the sender is quiet."""
        self._handovers.pop(handover.tracked.key, None)
        ticket = handover.ticket
        if ticket is None:
            return
        self._stop_push(handover, ticket)

    def _stop_push(self, handover: Handover, ticket: Ticket) -> None:
        self._by_transfer.pop(ticket.transfer, None)
        self._context.leases.close(ticket.transfer)
        holder = pusher(handover.tracked.key, ticket.transfer)
        if handover.is_sent:
            self._context.engine.blocks.release_holder(holder)
        else:
            self._quiescing[ticket.transfer] = holder
            self._context.sender.cancel(ticket.transfer)

    def _tell_failed(self, handover: Handover, code: str, message: str) -> None:
        if handover.stage is not HandoverStage.QUEUED and handover.peer.worker:
            self._tell(handover, handover.given_up(code, message))

    def _tell(self, handover: Handover, message: w.PeerMessage, *, dial: bool = False) -> None:
        address = handover.peer.address if dial else ""
        worker, incarnation = WorkerId(handover.peer.worker), Incarnation(handover.peer.incarnation)
        self._context.outbox.to_peer(worker, incarnation, message, address=address)

    def _find(self, peer: WorkerId, request: str, attempt: int) -> Handover | None:
        handover = self._handovers.get(request_key(request, attempt))
        return handover if handover is not None and handover.peer.worker == peer else None

    def tick(self, now_s: float) -> None:
        for transfer in self._context.leases.overdue():
            handover = self._by_transfer.get(transfer)
            if handover is not None:
                what = f"decode worker {handover.peer.worker} has forgotten the hand-over"
                self._context.count("transfers_forgotten")
                self._fail(handover, TransferError(what, why=FORGOTTEN, todo="try again"))

    def claims(self) -> list[Claim]:
        working = [
            Claim("handover", h.tracked.key, TransferId(t), WorkerId(h.peer.worker), Incarnation(h.peer.incarnation))
            for t, h in self._by_transfer.items()
        ]
        ending = [
            Claim("quiescing", subject_of(holder).key, TransferId(t), WorkerId(""), Incarnation(0))
            for t, holder in self._quiescing.items()
        ]
        return working + ending

    def is_idle(self) -> bool:
        return not self._handovers and not self._quiescing and super().is_idle()
