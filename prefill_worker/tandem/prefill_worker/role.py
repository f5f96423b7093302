"""The prefill role: one hand-over a request, from its first chunk to the receiver's word that it verified the KV."""

from __future__ import annotations

import logging

from tandem.core.errors import InternalError, InvalidRequestError, TandemError, TransferError, from_code
from tandem.core.ids import WorkerId
from tandem.core.lifecycle import Phase, RoleName
from tandem.core.logs import event
from tandem.engine.request import LayerHook, PrefillSlice, StepResult
from tandem.kvtransfer.events import Quiesced, SendFailed, Sent
from tandem.prefill_worker.handover import Handover, Stage
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.requests import Tracked, request_key
from tandem.workerhost.role import Shell
from tandem.workerhost.whole_requests import WholeRequests
from tandem.workerhost.wire import choice_to_wire, ticket_from_wire

_log = logging.getLogger(__name__)


class PrefillRole:
    """Computes prompts and pushes their KV. Every request here ends as handed over, not needed, failed or cancelled.

    Also serves whole requests: answers of one token need no decode worker.
    """

    name = RoleName.PREFILL

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._whole = WholeRequests(shell)
        self._handovers: dict[str, Handover] = {}
        self._by_transfer: dict[int, Handover] = {}
        self._quiescing: dict[int, Handover] = {}

    @property
    def layer_hook(self) -> LayerHook | None:
        return self._on_layers

    def submit(self, tracked: Tracked, message: w.Submit) -> None:
        if message.leg == w.LEG_FULL:
            self._whole.add(tracked)
            return
        if message.leg != w.LEG_PREFILL:
            raise InvalidRequestError("this worker receives no KV", why="it has the prefill role", todo="plan anew")
        self._shell.engine.check(tracked.engine_request)
        self._handovers[tracked.key] = Handover(tracked, message.peer)
        self._shell.engine.add(tracked.engine_request)

    def cancel(self, tracked: Tracked, reason: str) -> None:
        handover = self._handovers.get(tracked.key)
        if handover is not None:
            self._give_up(handover, "cancelled", reason)
            self._shell.engine.cancel(tracked.key)
        self._whole.cancel(tracked)

    # ---- compute -------------------------------------------------------------------------------------------------

    def _on_layers(self, slices: tuple[PrefillSlice, ...], first_layer: int, last_layer: int) -> None:
        for part in slices:
            handover = self._handovers.get(part.key)
            if handover is None:
                continue
            if handover.stage is Stage.QUEUED:
                self._begin(handover, part)
            if last_layer > first_layer:
                for plan in handover.plans:
                    plan.computed(first_layer, last_layer, part.end)
                self._push(handover)

    def _begin(self, handover: Handover, part: PrefillSlice) -> None:
        """The request left the queue: ask for the ticket while its first chunk is being computed."""
        handover.start(self._shell.engine.layout, part.start)
        self._shell.outbox.phase(handover.tracked, Phase.PREFILL)
        if not handover.peer.worker:
            return
        layout = self._shell.engine.layout
        self._tell(
            handover,
            w.PeerMessage(
                ticket_request=w.TicketRequest(
                    request=handover.tracked.request,
                    attempt=handover.tracked.attempt,
                    sender_incarnation=self._shell.incarnation,
                    receiver_incarnation=handover.peer.incarnation,
                    fingerprint=self._shell.fingerprint,
                    block_tokens=layout.groups[0].block_tokens,
                    kv_dtype=layout.groups[0].dtype,
                    tp=layout.tp,
                )
            ),
            dial=True,
        )

    def before_step(self) -> None:
        return

    def after_step(self, result: StepResult) -> None:
        touched: dict[str, Handover] = {}
        for output in result.outputs:
            handover = self._handovers.get(output.key)
            if handover is None:
                continue
            cached = None if handover.tracked.has_reported_cached else self._shell.engine.cached_tokens(output.key)
            handover.tracked.has_reported_cached = True
            self._shell.outbox.token(handover.tracked, output, cached_tokens=cached, handoff=None)
            handover.first_token(output, self._shell.clock.now_s())
            touched[output.key] = handover
        for key, error in result.failed.items():
            failed = self._handovers.get(key)
            if failed is not None:
                self._fail(failed, error if isinstance(error, TandemError) else InternalError(str(error)))
        self._whole.after_step(result, {})
        for key, handover in touched.items():
            if handover.has_first_tokens and key in self._handovers:
                self._prefilled(handover)

    def _prefilled(self, handover: Handover) -> None:
        if handover.is_finished:
            self._tell_failed(handover, "not_needed", "the answer ended with its first token")
            self._end(handover)
            return
        if not handover.peer.worker:
            self._fail(handover, InternalError("the answer goes on, but no decode worker was planned for it"))
            return
        self._complete_if_ready(handover)
        self._shell.outbox.phase(handover.tracked, Phase.TRANSFER)

    # ---- push ----------------------------------------------------------------------------------------------------

    def _push(self, handover: Handover) -> None:
        ticket = handover.ticket
        if ticket is None:
            return
        for group, plan in zip(ticket.groups, handover.plans, strict=True):
            source = self._shell.engine.block_table(handover.tracked.key, group.group)
            for push in plan.take():
                self._shell.sender.push(
                    ticket.transfer,
                    group.group,
                    source[push.first : push.last],
                    group.blocks[push.first - group.skip : push.last - group.skip],
                    range(push.first_layer, push.last_layer),
                )

    def _complete_if_ready(self, handover: Handover) -> None:
        """With the ticket here and the first tokens sampled, hand the sequence over."""
        ticket = handover.ticket
        if ticket is None or not handover.has_first_tokens or handover.stage is not Stage.COMPUTING:
            return
        self._push(handover)
        if not all(plan.is_complete for plan in handover.plans):
            raise InternalError(f"request {handover.tracked.key} is prefilled but its KV is not all pushed")
        self._shell.sender.finish(ticket.transfer)
        handover.stage = Stage.AWAITING
        self._tell(
            handover,
            w.PeerMessage(
                complete=w.Complete(
                    request=ticket.request,
                    attempt=ticket.attempt,
                    transfer=ticket.transfer,
                    sender_incarnation=self._shell.incarnation,
                    choices=[choice_to_wire(state) for state in handover.choice_states()],
                    sampled_at_s=handover.sampled_s,
                    host=self._shell.host,
                    ticket_wait_s=max(0.0, handover.ticket_s - handover.sampled_s),
                )
            ),
        )

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
            if handover is not None:
                handover.is_verified = True
                self._end_if_done(handover)
        elif kind == "failed":
            failed = message.failed
            handover = self._find(peer, failed.request, failed.attempt)
            if handover is not None:
                self._fail(handover, from_code(failed.code, failed.message), is_peer_told=True)

    def _ticket(self, peer: WorkerId, message: w.Ticket, received_s: float) -> None:
        handover = self._find(peer, message.request, message.attempt)
        if handover is None or message.sender_incarnation != self._shell.incarnation or handover.ticket is not None:
            self._shell.count("tickets_dropped")
            late = w.TransferFailed(
                request=message.request,
                attempt=message.attempt,
                transfer=message.transfer,
                code="cancelled",
                message="nobody waits for this ticket",
            )
            if handover is None:
                to = w.PeerMessage(failed=late)
                self._shell.outbox.to_peer(peer, message.receiver_incarnation, to)  # type: ignore[arg-type]
            return
        ticket = ticket_from_wire(message, self._shell.worker, peer)
        try:
            handover.check(ticket, self._shell.engine.layout)
            self._shell.sender.open(ticket)
        except (TransferError, ValueError) as error:
            self._fail(handover, TransferError("the ticket cannot be used", why=str(error), todo="try again"))
            return
        handover.grant(ticket, received_s, self._shell.engine)
        self._by_transfer[ticket.transfer] = handover
        self._push(handover)
        self._complete_if_ready(handover)

    def peer_gone(self, peer: WorkerId, reason: str) -> None:
        for handover in [h for h in self._handovers.values() if h.peer.worker == peer and h.stage is not Stage.QUEUED]:
            error = TransferError(f"decode worker {peer} was lost during the hand-over", why=reason, todo="try again")
            self._fail(handover, error, is_peer_told=True)

    def transfer_event(self, event: object) -> None:
        if isinstance(event, Sent):
            handover = self._by_transfer.get(event.transfer)
            if handover is not None:
                handover.is_sent = True
                self._shell.count("kv_sent_bytes", event.bytes)
                self._end_if_done(handover)
        elif isinstance(event, SendFailed):
            handover = self._by_transfer.get(event.transfer)
            if handover is not None:
                handover.is_sent = True  # the source is no longer read
                self._fail(handover, TransferError("the KV transfer failed", why=event.reason, todo="try again"))
        elif isinstance(event, Quiesced):
            handover = self._quiescing.pop(event.transfer, None)
            if handover is not None:
                handover.release_pushing(self._shell.engine)

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _end_if_done(self, handover: Handover) -> None:
        if handover.is_verified and handover.is_sent:
            self._shell.count("handovers")
            self._end(handover)

    def _end(self, handover: Handover) -> None:
        """The happy end: blocks stay behind as cache."""
        self._drop(handover)
        self._shell.engine.release(handover.tracked.key)
        self._shell.requests.remove(handover.tracked.key)

    def _fail(self, handover: Handover, error: TandemError, *, is_peer_told: bool = False) -> None:
        event(_log, "handover failed", logging.WARNING, request=handover.tracked.key, error=error.message)
        if is_peer_told:
            self._drop(handover)
        else:
            self._give_up(handover, error.code, error.message)
        self._shell.fail(handover.tracked, error)

    def _give_up(self, handover: Handover, code: str, message: str) -> None:
        self._tell_failed(handover, code, message)
        self._drop(handover)

    def _drop(self, handover: Handover) -> None:
        """Forget the hand-over. If its push has not ended, its blocks stay held until the sender is quiet."""
        self._handovers.pop(handover.tracked.key, None)
        ticket = handover.ticket
        if ticket is None:
            return
        self._by_transfer.pop(ticket.transfer, None)
        if handover.is_sent:
            handover.release_pushing(self._shell.engine)
        else:
            self._quiescing[ticket.transfer] = handover
            self._shell.sender.cancel(ticket.transfer)

    def _tell_failed(self, handover: Handover, code: str, message: str) -> None:
        if handover.stage is Stage.QUEUED or not handover.peer.worker:
            return
        failed = w.TransferFailed(
            request=handover.tracked.request,
            attempt=handover.tracked.attempt,
            transfer=handover.ticket.transfer if handover.ticket else 0,
            code=code,
            message=message,
        )
        self._tell(handover, w.PeerMessage(failed=failed))

    def _tell(self, handover: Handover, message: w.PeerMessage, *, dial: bool = False) -> None:
        address = handover.peer.address if dial else ""
        peer = handover.peer
        self._shell.outbox.to_peer(peer.worker, peer.incarnation, message, address=address)  # type: ignore[arg-type]

    def _find(self, peer: WorkerId, request: str, attempt: int) -> Handover | None:
        handover = self._handovers.get(request_key(request, attempt))
        return handover if handover is not None and handover.peer.worker == peer else None

    def tick(self, now_s: float) -> None:
        return

    def is_idle(self) -> bool:
        return not self._handovers and not self._quiescing and self._whole.is_idle()
