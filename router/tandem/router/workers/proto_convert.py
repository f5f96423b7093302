"""Between protobuf and the router's own values. Nothing else in the router touches internal protobuf fields."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import overload

from tandem.core import token_ids
from tandem.core.errors import ConfigError
from tandem.core.handoff import ChoiceState, HandoffTiming, TokenLogprob
from tandem.core.kv_compatibility import KVProfile
from tandem.core.ledger import LedgerCounts
from tandem.core.link_speed import ReportedLink
from tandem.core.prefill_queue import FIRST_COME, UNMEASURED, PrefillSpeed, QueuedWork, QueueRules
from tandem.core.proto_mapping import from_proto, to_proto
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import FinishReason, RoleName, WorkerState
from tandem.core.version import STREAM_VERSION
from tandem.kvtransfer.wire import profile_from_wire
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.records import WorkerRecord

BATCH_BYTES = 256 * 1024
"""Bytes of a message that holds several."""
_ALTERNATIVE = struct.Struct("<If")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts(WorkerRecord):
    """A worker's description of itself when its stream opened: `state` as it was then, the rest for one incarnation."""

    role: RoleName
    profile: KVProfile
    host: str = ""

    @property
    def context_tokens(self) -> int:
        """The longest sequence that this worker can hold."""
        fits = min(self.num_blocks, default=0) * self.block_tokens
        return min(self.max_model_len, fits) if fits else self.max_model_len


@dataclass(slots=True)
class TokenChunk:
    """Consecutive output tokens of one choice of one request, from `index` on."""

    request: str
    attempt: int
    choice: int
    index: int
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    handoff: HandoffTiming | None = None
    phase_s: float = 0.0
    """Since its prompt was begun (with `cached_tokens`) or all its KV was there (with `handoff`); 0 = not known."""
    slot: int = 0
    """Position of its prompt in the API call, and `at_s` the time of its arrival, once its request accepted it: then
    `tokens`, `logprobs` and `finish` follow those passed on before, without gaps."""
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """Log-probabilities of the prompt tokens of a request from `position` on."""

    request: str
    attempt: int
    position: int
    logprobs: Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts(LedgerCounts):
    """Blocks of one KV group by state."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLoad:
    """A worker's last load report."""

    queued_requests: int = 0
    running_requests: int = 0
    queued_tokens: int = 0
    in_flight: int = 0
    prefill_speed: PrefillSpeed = UNMEASURED
    decode_step_s: float = 0.0
    decode_sequence_s: float = 0.0
    decoding_sequences: int = 0
    queue: tuple[QueuedWork, ...] = ()
    """By when it is due, on this router's clock."""
    queue_rules: QueueRules = FIRST_COME
    blocks: tuple[BlockCounts, ...] = ()
    links: tuple[ReportedLink, ...] = ()
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def free_blocks(self) -> int:
        """Blocks that a new request could get, in the tightest group."""
        return min((b.free + b.cached for b in self.blocks), default=0)

    @property
    def total_blocks(self) -> int:
        """Blocks of the smallest group; 0 = not known."""
        return min((b.total for b in self.blocks), default=0)


class Leg(IntEnum):
    """The part of a request that a worker computes."""

    FULL = w.LEG_FULL
    PREFILL = w.LEG_PREFILL
    DECODE = w.LEG_DECODE


SamplingMessage = g.SamplingParams
"""Sampling settings as they are sent: made once for all workers of a request."""


def hello(router: str, router_incarnation: int, worker_incarnation: int) -> w.RouterMessage:
    said = w.RouterHello(
        router=router, router_incarnation=router_incarnation, worker_incarnation=worker_incarnation,
        protocol=STREAM_VERSION,
    )  # fmt: skip
    return w.RouterMessage(hello=said)


def ping(sequence: int) -> w.RouterMessage:
    return w.RouterMessage(ping=w.Ping(sequence=sequence))


def state_heard(sequence: int) -> w.RouterMessage:
    return w.RouterMessage(state_heard=w.StateHeard(sequence=sequence))


def worker_state(text: str) -> WorkerState:
    """Parse a worker's state; a worker with a state that is not known here takes no work."""
    try:
        return WorkerState(text or WorkerState.READY)
    except ValueError:
        return WorkerState.DRAINING


def cancel(request: str, attempt: int, reason: str) -> w.RouterMessage:
    return w.RouterMessage(cancel=w.Cancel(request=request, attempt=attempt, reason=reason))


def end_choices(request: str, attempt: int, choices: Sequence[int]) -> w.RouterMessage:
    return w.RouterMessage(end_choices=w.EndChoices(request=request, attempt=attempt, choices=choices))


def submit(
    *,
    request: str,
    attempt: int,
    leg: Leg,
    prompt: Sequence[int],
    sampling: SamplingMessage,
    salt: bytes,
    last_block_hash: bytes,
    timeout_s: float,
    peer: WorkerFacts | None,
    sources: Iterable[tuple[WorkerFacts, int]],
    forced: Iterable[ChoiceState],
    trace: str,
) -> w.RouterMessage:
    """One request for one worker. `sources`: workers that hold leading tokens of the prompt, and how many, best first.
    `forced`: output that the client has."""
    message = w.Submit(
        request=request,
        attempt=attempt,
        leg=w.Leg.ValueType(leg),
        prompt_ids=token_ids.pack(prompt),
        sampling=sampling,
        salt=salt,
        last_block_hash=last_block_hash,
        timeout_s=timeout_s,
        peer=None if peer is None else to_proto(w.WorkerRef, peer),
        sources=[w.PrefixSource(worker=to_proto(w.WorkerRef, facts), tokens=tokens) for facts, tokens in sources],
        forced=[to_proto(g.ChoiceState, state, finish=finish_to_wire(state.finish)) for state in forced],
        trace=trace,
    )
    return w.RouterMessage(submit=message)


def each(message: w.WorkerMessage) -> Iterable[w.WorkerMessage]:
    """Messages that a worker sent as one, in order."""
    return message.batch.messages if message.HasField("batch") else (message,)


def next_of(unsent: deque[w.RouterMessage]) -> w.RouterMessage:
    """Take the first message, and with it those behind it that fit: each costs both ends more than its content."""
    first = unsent.popleft()
    if not unsent:
        return first
    batch, left = w.RouterBatch(messages=[first]), BATCH_BYTES - first.ByteSize()
    while unsent and (left := left - unsent[0].ByteSize()) >= 0:
        batch.messages.append(unsent.popleft())
    return w.RouterMessage(batch=batch) if len(batch.messages) > 1 else first


def sampling_to_wire(sampling: SamplingParams) -> g.SamplingParams:
    bad_words = [g.BadWord(tokens=word) for word in sampling.bad_words]
    return to_proto(g.SamplingParams, sampling, logit_bias=dict(sampling.logit_bias), bad_words=bad_words)


def facts_from_wire(info: w.WorkerInfo) -> WorkerFacts:
    """Raises ValueError for a role that this router does not know."""
    return from_proto(WorkerFacts, info, profile=profile_from_wire(info.profile))


def chunk_from_wire(chunk: w.TokenChunk) -> TokenChunk:
    found = TokenChunk(chunk.request, chunk.attempt, chunk.choice, chunk.index, list(chunk.tokens))
    if logprobs := chunk.logprobs:
        found.logprobs = [_logprob_from_wire(logprob) for logprob in logprobs]
    if finish := chunk.finish:
        found.finish = _FINISH.get(finish)
    if chunk.HasField("cached_tokens"):
        found.cached_tokens = chunk.cached_tokens
    if chunk.HasField("handoff"):
        found.handoff = from_proto(HandoffTiming, chunk.handoff)
    if phase_s := chunk.phase_s:
        found.phase_s = phase_s
    return found


def prompt_from_wire(chunk: w.PromptChunk) -> PromptChunk:
    return from_proto(PromptChunk, chunk, logprobs=[_logprob_from_wire(logprob) for logprob in chunk.logprobs])


def load_from_wire(report: w.LoadReport, now_s: float) -> ReportedLoad:
    """`now_s`: when it arrived. Impossible rules of a queue count as first come, first served."""
    return from_proto(
        ReportedLoad,
        report,
        prefill_speed=PrefillSpeed(tokens_per_s=report.prefill_rate, context_s=report.prefill_context_s),
        queue=tuple(QueuedWork(now_s + row.due_in_s, row.tokens, row.requests, row.attended) for row in report.queue),
        queue_rules=_rules_from_wire(report),
    )


def _rules_from_wire(report: w.LoadReport) -> QueueRules:
    try:
        return QueueRules(stretch=report.queue_stretch, max_overtake_s=report.queue_max_overtake_s)
    except ConfigError:
        return FIRST_COME


def logprob_to_wire(logprob: TokenLogprob) -> g.TokenLogprob:
    top = [g.TopLogprob(token=token, logprob=value) for token, value in logprob.top]
    return g.TokenLogprob(token=logprob.token, logprob=logprob.logprob, top=top, rank=logprob.rank)


def finish_to_wire(finish: FinishReason | None) -> g.FinishReason.ValueType:
    if finish is None:
        return g.FINISH_REASON_UNSPECIFIED
    return g.FINISH_REASON_STOP if finish is FinishReason.STOP else g.FINISH_REASON_LENGTH


_FINISH: dict[int, FinishReason] = {
    g.FINISH_REASON_STOP: FinishReason.STOP,
    g.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


def _logprob_from_wire(logprob: g.TokenLogprob) -> TokenLogprob:
    top = [(other.token, other.logprob) for other in logprob.top]
    return TokenLogprob(
        token=logprob.token, logprob=logprob.logprob, top=Alternatives(top) if top else (), rank=logprob.rank
    )


class Alternatives(Sequence[tuple[int, float]]):
    """(token id, logprob) of each, in a tenth of the memory of tuples. Logprobs are float32.

    An answer that is not streamed holds half a million of them.
    """

    __slots__ = ("_packed",)

    def __init__(self, top: Sequence[tuple[int, float]]) -> None:
        self._packed = struct.pack(f"<{'If' * len(top)}", *chain.from_iterable(top))

    def __len__(self) -> int:
        return len(self._packed) // _ALTERNATIVE.size

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return _ALTERNATIVE.iter_unpack(self._packed)

    @overload
    def __getitem__(self, place: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[tuple[int, float]]: ...
    def __getitem__(self, place: int | slice) -> tuple[int, float] | Sequence[tuple[int, float]]:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Iterable) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
