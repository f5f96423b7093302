"""Messages from a prefill worker to a decode worker. Builds messages; sends and decides nothing."""

from __future__ import annotations

from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.wire import profile_to_wire
from tandem.prefill_worker.handover import Handover
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.proto_convert import choice_to_wire
from tandem.workercore.role import RoleContext


def ticket_request(context: RoleContext, handover: Handover) -> w.PeerMessage:
    """Build the message that asks for memory for this attempt."""
    return w.PeerMessage(
        ticket_request=w.TicketRequest(
            request=handover.tracked.request,
            attempt=handover.tracked.attempt,
            sender_incarnation=context.incarnation,
            receiver_incarnation=handover.peer.incarnation,
            profile=profile_to_wire(context.profile),
            codecs=handover.offered,
        )
    )


def complete(context: RoleContext, handover: Handover, ticket: Ticket) -> w.PeerMessage:
    """Build the message that everything is pushed, with the state of the sequence."""
    return w.PeerMessage(
        complete=w.Complete(
            request=ticket.request,
            attempt=ticket.attempt,
            transfer=ticket.transfer,
            sender_incarnation=context.incarnation,
            choices=[choice_to_wire(state) for state in handover.choice_states()],
            sampled_at_s=handover.sampled_s,
            host=context.host,
            ticket_wait_s=max(0.0, handover.ticket_s - handover.sampled_s),
        )
    )


def given_up(handover: Handover, code: str, message: str) -> w.PeerMessage:
    """Build the message that the hand-over is over, with or without a ticket."""
    failed = w.TransferFailed(
        request=handover.tracked.request,
        attempt=handover.tracked.attempt,
        transfer=handover.ticket.transfer if handover.ticket else 0,
        code=code,
        message=message,
    )
    return w.PeerMessage(failed=failed)


def unwanted(ticket: w.Ticket) -> w.PeerMessage:
    """Build the answer to a ticket that came too late, or that was not asked for."""
    failed = w.TransferFailed(
        request=ticket.request,
        attempt=ticket.attempt,
        transfer=ticket.transfer,
        code="cancelled",
        message="nobody waits for this ticket",
    )
    return w.PeerMessage(failed=failed)
