"""Converts between protobuf messages and the dataclasses of workers. Nothing else here; no logic, no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from tandem.core import token_ids
from tandem.core.errors import InvalidRequestError
from tandem.core.handoff import ChoiceState, TokenLogprob
from tandem.core.ids import ChoiceIndex, WorkerId
from tandem.core.proto_mapping import from_proto, to_proto
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import FinishReason
from tandem.core.thought_budget import ThoughtBudget
from tandem.engine.request import PromptLogprobs, TokenOutput
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.wire import profile_from_wire
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w

_FINISH_OUT = {
    None: g.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: g.FINISH_REASON_STOP,
    FinishReason.LENGTH: g.FINISH_REASON_LENGTH,
}


def sampling_from_wire(m: g.SamplingParams) -> SamplingParams:
    return from_proto(
        SamplingParams,
        m,
        logit_bias=tuple(sorted(m.logit_bias.items())),
        bad_words=tuple(tuple(word.tokens) for word in m.bad_words),
        thoughts=from_proto(ThoughtBudget, m.thoughts) if m.HasField("thoughts") else None,
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
    return to_proto(g.ChoiceState, state, finish=_FINISH_OUT[state.finish])


def logprob_to_wire(value: TokenLogprob) -> g.TokenLogprob:
    top = [g.TopLogprob(token=token, logprob=logprob) for token, logprob in value.top]
    return g.TokenLogprob(token=value.token, logprob=value.logprob, top=top, rank=value.rank)


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


def ticket_from_wire(m: w.Ticket, sender: WorkerId, receiver: WorkerId) -> Ticket:
    return from_proto(Ticket, m, sender=sender, receiver=receiver, layout=profile_from_wire(m.profile).layout)
