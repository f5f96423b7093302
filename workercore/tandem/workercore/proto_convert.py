"""Converts between protobuf messages and the dataclasses of workers. Nothing else here; no logic, no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from tandem.core import token_ids
from tandem.core.errors import InvalidRequestError
from tandem.core.handoff import ChoiceState, HandoffTiming, TokenLogprob
from tandem.core.ids import (
    Attempt,
    BlockId,
    ChoiceIndex,
    GroupId,
    Incarnation,
    Rank,
    RequestId,
    TransferId,
    WorkerId,
)
from tandem.core.lifecycle import FinishReason
from tandem.core.sampling import SamplingParams
from tandem.engine.request import PromptLogprobs, TokenOutput
from tandem.kvtransfer.ticket import Endpoint, GroupBlocks, Ticket
from tandem.kvtransfer.wire import profile_from_wire
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w

_FINISH_OUT = {
    None: g.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: g.FINISH_REASON_STOP,
    FinishReason.LENGTH: g.FINISH_REASON_LENGTH,
}


def sampling_from_wire(m: g.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=m.max_tokens,
        n=m.n,
        temperature=m.temperature,
        top_p=m.top_p,
        top_k=m.top_k,
        min_p=m.min_p,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        repetition_penalty=m.repetition_penalty,
        seed=m.seed,
        stop_token_ids=tuple(m.stop_token_ids),
        ignore_eos=m.ignore_eos,
        logit_bias=tuple(sorted(m.logit_bias.items())),
        logprobs=m.logprobs if m.HasField("logprobs") else None,
        min_tokens=m.min_tokens,
        bad_words=tuple(tuple(word.tokens) for word in m.bad_words),
        allowed_token_ids=tuple(m.allowed_token_ids),
        prompt_logprobs=m.prompt_logprobs if m.HasField("prompt_logprobs") else None,
    )


def each(message: w.RouterMessage) -> Iterable[w.RouterMessage]:
    """The messages that a router sent as one, in order."""
    return message.batch.messages if message.HasField("batch") else (message,)


def prompt_from_wire(m: w.Submit) -> tuple[int, ...]:
    """Raises InvalidRequestError for bytes that are not whole ids."""
    if not m.prompt_ids:
        return tuple(m.prompt)
    if len(m.prompt_ids) % token_ids.ID_BYTES:
        raise InvalidRequestError(f"prompt_ids has {len(m.prompt_ids)} bytes", why="an id has four", param="prompt_ids")
    return tuple(token_ids.unpack(m.prompt_ids))


def choices_from_wire(states: Iterable[g.ChoiceState]) -> tuple[ChoiceState, ...]:
    """Raises InvalidRequestError for an unknown finish reason."""
    return tuple(
        ChoiceState(choice=ChoiceIndex(s.choice), tokens=tuple(s.tokens), finish=_finish_from_wire(s.finish))
        for s in states
    )


def _finish_from_wire(value: int) -> FinishReason | None:
    for reason, known in _FINISH_OUT.items():
        if value == known:
            return reason
    raise InvalidRequestError(f"a choice ended for the unknown reason {value}", param="forced")


def choice_to_wire(state: ChoiceState) -> g.ChoiceState:
    return g.ChoiceState(choice=state.choice, tokens=state.tokens, finish=_FINISH_OUT[state.finish])


def logprob_to_wire(value: TokenLogprob) -> g.TokenLogprob:
    top = [g.TopLogprob(token=token, logprob=logprob) for token, logprob in value.top]
    return g.TokenLogprob(token=value.token, logprob=value.logprob, top=top, rank=value.rank)


def timing_to_wire(timing: HandoffTiming) -> g.HandoffTiming:
    return g.HandoffTiming(
        ticket_wait_s=timing.ticket_wait_s,
        sample_to_step_s=timing.sample_to_step_s,
        last_wire_s=timing.last_wire_s,
        step_rest_s=timing.step_rest_s,
    )


def add_chunk(
    chunks: RepeatedCompositeFieldContainer[w.TokenChunk], output: TokenOutput, request: str, attempt: int
) -> w.TokenChunk:
    """Add one sampled token as a chunk of its own; made in place, as appending copies."""
    return chunks.add(
        request=request,
        attempt=attempt,
        choice=output.choice,
        index=output.index,
        tokens=(output.token,),
        logprobs=() if output.logprob is None else (logprob_to_wire(output.logprob),),
        finish=_FINISH_OUT[output.finish],
    )


def add_prompt_chunk(
    chunks: RepeatedCompositeFieldContainer[w.PromptChunk], scores: PromptLogprobs, request: str, attempt: int
) -> w.PromptChunk:
    return chunks.add(
        request=request,
        attempt=attempt,
        position=scores.position,
        logprobs=[logprob_to_wire(logprob) for logprob in scores.logprobs],
    )


def ticket_to_wire(ticket: Ticket, profile: w.KvProfile) -> w.Ticket:
    """`profile`: the receiver's, with the ticket's layout."""
    return w.Ticket(
        request=ticket.request,
        attempt=ticket.attempt,
        transfer=ticket.transfer,
        sender_incarnation=ticket.sender_incarnation,
        receiver_incarnation=ticket.receiver_incarnation,
        groups=[w.TicketGroup(group=t.group, skip=t.skip, blocks=t.blocks) for t in ticket.groups],
        endpoints=[endpoint_to_wire(e) for e in ticket.endpoints],
        profile=profile,
        codec=ticket.codec,
    )


def ticket_from_wire(m: w.Ticket, sender: WorkerId, receiver: WorkerId) -> Ticket:
    return Ticket(
        transfer=TransferId(m.transfer),
        request=RequestId(m.request),
        attempt=Attempt(m.attempt),
        sender=sender,
        sender_incarnation=Incarnation(m.sender_incarnation),
        receiver=receiver,
        receiver_incarnation=Incarnation(m.receiver_incarnation),
        groups=tuple(
            GroupBlocks(group=GroupId(t.group), skip=t.skip, blocks=tuple(BlockId(b) for b in t.blocks))
            for t in m.groups
        ),
        endpoints=tuple(endpoint_from_wire(e) for e in m.endpoints),
        layout=profile_from_wire(m.profile).layout,
        codec=m.codec,
    )


def endpoint_to_wire(e: Endpoint) -> w.RankEndpoint:
    return w.RankEndpoint(rank=e.rank, transport=e.transport, host=e.host, address=e.address)


def endpoint_from_wire(m: w.RankEndpoint) -> Endpoint:
    return Endpoint(rank=Rank(m.rank), transport=m.transport, host=m.host, address=m.address)
