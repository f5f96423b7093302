"""Hand-over of one request from a prefill worker to a decode worker: its state, messages and held blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from enum import Enum, auto

from tandem.core.errors import TransferError
from tandem.core.handoff import ChoiceState
from tandem.core.ids import ChoiceIndex, TransferId
from tandem.core.kv_compatibility import KVProfile, agree
from tandem.core.kv_layout import KVLayout
from tandem.core.ledger import Holder, HoldKind
from tandem.core.state_enums import FinishReason
from tandem.engine.engine import Engine
from tandem.engine.request import TokenOutput
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.wire import profile_to_wire
from tandem.prefill_worker.push_plan import PushPlan
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.outbox import transfer_failed
from tandem.workercore.proto_convert import choice_to_wire
from tandem.workercore.requests import Tracked
from tandem.workercore.role_interface import RoleContext


class HandoverStage(Enum):
    """QUEUED: the decode worker was not contacted. COMPUTING: ticket asked for. AWAITING: all pushed, not verified."""

    QUEUED = auto()
    COMPUTING = auto()
    AWAITING = auto()


class Handover:
    """Owned by the prefill role; lives from submit until it ends, which it does once."""

    def __init__(self, tracked: Tracked, peer: w.WorkerRef) -> None:
        self.tracked = tracked
        self.peer = peer
        self.stage = HandoverStage.QUEUED
        self.offered: tuple[str, ...] = ()
        """Codecs that the ticket request offers."""
        self.plans: tuple[PushPlan, ...] = ()
        self.ticket: Ticket | None = None
        self.ticket_s = 0.0
        self.sampled_s = 0.0
        self.is_sent = False
        self.is_verified = False
        self.revoked: set[int] = set()
        """Transfers that the decode worker revoked: any later message about them is late."""
        self._first: dict[int, TokenOutput] = {}
        self._ended: set[ChoiceIndex] = set()

    def start(self, layout: KVLayout, cached_tokens: int) -> None:
        """Open the push plans as the first chunk is computed; `cached_tokens` of the prompt were prefix hits."""
        prompt_tokens = len(self.tracked.engine_request.prompt)
        self.plans = tuple(PushPlan(spec, prompt_tokens, cached_tokens) for spec in layout.groups)
        self.stage = HandoverStage.COMPUTING

    def check(self, ticket: Ticket, mine: KVProfile, receiver: KVProfile) -> None:
        """Raise TransferError unless the ticket keeps to the form that follows from both profiles, and has room for
        exactly this prompt in every KV group, in blocks of the receiver's size."""
        prompt_tokens = len(self.tracked.engine_request.prompt)
        form = agree(mine, receiver, offered=self.offered)
        if ticket.codec != form.codec:
            raise TransferError(f"its codec is {ticket.codec or 'none'} instead of {form.codec or 'none'}")
        groups = receiver.layout.groups
        if len(ticket.groups) != len(groups):
            raise TransferError(f"it has {len(ticket.groups)} KV groups, this model {len(groups)}")
        for spec, group in zip(groups, ticket.groups, strict=True):
            needed = spec.blocks_for(prompt_tokens)
            if group.group != spec.group or group.skip + len(group.blocks) != needed:
                raise TransferError(
                    f"group {group.group} has {group.skip} + {len(group.blocks)} blocks for a prompt of {needed}"
                )

    def grant(self, ticket: Ticket, received_s: float, engine: Engine) -> None:
        """Take in the ticket: open the plans, and hold the source for the push whatever becomes of the request."""
        self.ticket, self.ticket_s = ticket, received_s
        for group, plan in zip(ticket.groups, self.plans, strict=True):
            plan.open(group.skip, ticket.layout.groups[group.group].block_tokens)
            blocks = engine.block_table(self.tracked.key, group.group)
            engine.ledgers[group.group].share(pusher(self.tracked.key, ticket.transfer), blocks)

    def ticket_request(self, context: RoleContext) -> w.PeerMessage:
        """Build the message that asks for memory for this attempt."""
        return w.PeerMessage(
            ticket_request=w.TicketRequest(
                request=self.tracked.request,
                attempt=self.tracked.attempt,
                sender_incarnation=context.incarnation,
                receiver_incarnation=self.peer.incarnation,
                profile=profile_to_wire(context.profile),
                codecs=self.offered,
            )
        )

    def complete(self, context: RoleContext, ticket: Ticket) -> w.PeerMessage:
        """Build the message that everything is pushed, with the state of the sequence."""
        return w.PeerMessage(
            complete=w.Complete(
                request=ticket.request,
                attempt=ticket.attempt,
                transfer=ticket.transfer,
                sender_incarnation=context.incarnation,
                choices=[choice_to_wire(state) for state in self.choice_states()],
                sampled_at_s=self.sampled_s,
                host=context.host,
                ticket_wait_s=max(0.0, self.ticket_s - self.sampled_s),
            )
        )

    def given_up(self, code: str, message: str) -> w.PeerMessage:
        """Build the message that the hand-over is over, with or without a ticket."""
        transfer = self.ticket.transfer if self.ticket else 0
        return transfer_failed(self.tracked.request, self.tracked.attempt, transfer, code, message)

    def take_back(self, transfer: int) -> None:
        """Void the ticket, if it ever came: state as before it was asked for, save for what is computed since."""
        self.revoked.add(transfer)
        self.ticket, self.ticket_s, self.is_sent = None, 0.0, False
        self.stage = HandoverStage.COMPUTING
        for plan in self.plans:
            plan.close()

    def first_token(self, output: TokenOutput, now_s: float) -> None:
        self._first[output.choice] = output
        self.sampled_s = now_s

    def end(self, choices: Collection[int]) -> bool:
        """End unwanted choices; True if now, and not before, every other choice has its first token."""
        had_all = self.has_first_tokens
        self._ended.update(map(ChoiceIndex, choices))
        return self.has_first_tokens and not had_all

    @property
    def has_first_tokens(self) -> bool:
        """True if every choice that goes on has its first token."""
        request = self.tracked.engine_request
        before = {state.choice for state in request.forced if state.finish is not None}
        return len(self._ended | before | self._first.keys()) == request.sampling.n

    @property
    def is_finished(self) -> bool:
        """True if every choice has ended: no decode worker is needed."""
        return self.has_first_tokens and all(state.finish is not None for state in self.choice_states())

    def choice_states(self) -> list[ChoiceState]:
        """Every choice with all its output: forced tokens, then the token sampled here. Ended ones as they stand."""
        forced = {state.choice: state for state in self.tracked.engine_request.forced}
        states = {choice: state for choice, state in forced.items() if state.finish is not None}
        for output in self._first.values():
            before = forced[output.choice].tokens[: output.index] if output.choice in forced else ()
            states[output.choice] = ChoiceState(
                choice=output.choice, tokens=(*before, output.token), finish=output.finish
            )
        for choice in self._ended:
            state = states.get(choice) or forced.get(choice) or ChoiceState(choice=choice, tokens=())
            states[choice] = replace(state, finish=state.finish or FinishReason.STOP)
        return [states[choice] for choice in sorted(states)]


def pusher(key: str, transfer: TransferId) -> Holder:
    """Return the holder of one transfer's source blocks until its sender is quiet."""
    return Holder(HoldKind.PUSHING, f"{key}/{transfer}")
