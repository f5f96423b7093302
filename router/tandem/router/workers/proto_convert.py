"""Between protobuf and the router's own values. Nothing else in the router touches internal protobuf fields."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tandem.core import token_ids
from tandem.core.errors import ConfigError
from tandem.core.handoff import ChoiceState, HandoffTiming, TokenLogprob
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.lifecycle import FinishReason, RoleName, WorkerState
from tandem.core.prefill_queue import FIRST_COME, UNMEASURED, PrefillSpeed, QueuedWork, QueueRules
from tandem.core.protocol_version import STREAM_VERSION
from tandem.core.sampling import SamplingParams
from tandem.kvtransfer.wire import profile_from_wire
from tandem.router.workers.alternatives import Alternatives
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w

BATCH_BYTES = 256 * 1024
"""Bytes of a message that holds several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A worker's description of itself when its stream opened; true for one incarnation."""

    worker: WorkerId
    incarnation: Incarnation
    role: RoleName
    address: str
    model: str
    fingerprint: str
    tp: int
    block_tokens: int
    kv_dtype: str
    max_model_len: int
    vocab_size: int
    num_blocks: tuple[int, ...]
    token_kv_bytes: int
    transports: tuple[str, ...]
    protocol: int
    eos_token_ids: tuple[int, ...]
    pid: int
    rank_pids: tuple[int, ...]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """Log-probabilities of the prompt tokens of a request from `position` on."""

    request: str
    attempt: int
    position: int
    logprobs: Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks of one KV group by state."""

    group: int
    total: int
    free: int
    cached: int
    request: int
    pushing: int
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLink:
    """A link from a rank of the worker that reports it to one of `peer`; speeds in bytes a second, 0 = no figure."""

    rank: int
    peer: WorkerId
    peer_rank: int
    transport: str
    from_host: str
    to_host: str
    bytes_per_s: float
    latency_s: float
    achieved_bytes_per_s: float
    stalls: int
    reason: str
    unused: tuple[str, ...]


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


@dataclass(slots=True, kw_only=True)
class Submission:
    """One request for one worker."""

    request: str
    attempt: int
    leg: w.Leg.ValueType
    prompt: Sequence[int]
    sampling: g.SamplingParams
    salt: bytes
    last_block_hash: bytes
    timeout_s: float
    peer: WorkerFacts | None = None
    sources: Sequence[tuple[WorkerFacts, int]] = ()
    """Workers that hold leading tokens of the prompt, and how many, best first."""
    forced: Sequence[ChoiceState] = ()
    """Output that the client has."""
    trace: str = ""


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


def submit(order: Submission) -> w.RouterMessage:
    message = w.Submit(
        request=order.request,
        attempt=order.attempt,
        leg=order.leg,
        prompt_ids=token_ids.pack(order.prompt),
        sampling=order.sampling,
        salt=order.salt,
        last_block_hash=order.last_block_hash,
        timeout_s=order.timeout_s,
        forced=[_choice_to_wire(state) for state in order.forced],
        trace=order.trace,
    )
    if order.peer is not None:
        message.peer.CopyFrom(_ref(order.peer))
    for facts, tokens in order.sources:
        message.sources.append(w.PrefixSource(worker=_ref(facts), tokens=tokens))
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


def _choice_to_wire(state: ChoiceState) -> g.ChoiceState:
    return g.ChoiceState(choice=state.choice, tokens=state.tokens, finish=finish_to_wire(state.finish))


def _ref(facts: WorkerFacts) -> w.WorkerRef:
    return w.WorkerRef(worker=facts.worker, incarnation=facts.incarnation, address=facts.address)


def sampling_to_wire(sampling: SamplingParams) -> g.SamplingParams:
    return g.SamplingParams(
        max_tokens=sampling.max_tokens,
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        min_tokens=sampling.min_tokens,
        bad_words=[g.BadWord(tokens=word) for word in sampling.bad_words],
        allowed_token_ids=sampling.allowed_token_ids,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def facts_from_wire(info: w.WorkerInfo) -> WorkerFacts:
    """Raises ValueError for a role that this router does not know."""
    return WorkerFacts(
        worker=WorkerId(info.worker),
        incarnation=Incarnation(info.incarnation),
        role=RoleName(info.role),
        address=info.address,
        model=info.model,
        fingerprint=info.fingerprint,
        tp=info.tp,
        block_tokens=info.block_tokens,
        kv_dtype=info.kv_dtype,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        num_blocks=tuple(info.num_blocks),
        token_kv_bytes=info.token_kv_bytes,
        transports=tuple(info.transports),
        protocol=info.protocol,
        eos_token_ids=tuple(info.eos_token_ids),
        pid=info.pid,
        rank_pids=tuple(info.rank_pids),
        profile=profile_from_wire(info.profile),
        host=info.host,
    )


def chunk_from_wire(chunk: w.TokenChunk) -> TokenChunk:
    found = TokenChunk(chunk.request, chunk.attempt, chunk.choice, chunk.index, list(chunk.tokens))
    if logprobs := chunk.logprobs:
        found.logprobs = [_logprob_from_wire(logprob) for logprob in logprobs]
    if finish := chunk.finish:
        found.finish = _FINISH.get(finish)
    if chunk.HasField("cached_tokens"):
        found.cached_tokens = chunk.cached_tokens
    if chunk.HasField("handoff"):
        found.handoff = _handoff_from_wire(chunk.handoff)
    if phase_s := chunk.phase_s:
        found.phase_s = phase_s
    return found


def prompt_from_wire(chunk: w.PromptChunk) -> PromptChunk:
    return PromptChunk(
        request=chunk.request,
        attempt=chunk.attempt,
        position=chunk.position,
        logprobs=[_logprob_from_wire(logprob) for logprob in chunk.logprobs],
    )


def load_from_wire(report: w.LoadReport, now_s: float) -> ReportedLoad:
    """`now_s`: when it arrived. Impossible rules of a queue count as first come, first served."""
    return ReportedLoad(
        queued_requests=report.queued_requests,
        running_requests=report.running_requests,
        queued_tokens=report.queued_tokens,
        in_flight=report.in_flight,
        prefill_speed=PrefillSpeed(tokens_per_s=report.prefill_rate, context_s=report.prefill_context_s),
        decode_step_s=report.decode_step_s,
        decode_sequence_s=report.decode_sequence_s,
        decoding_sequences=report.decoding_sequences,
        queue=tuple(QueuedWork(now_s + row.due_in_s, row.tokens, row.requests, row.attended) for row in report.queue),
        queue_rules=_rules_from_wire(report),
        blocks=tuple(
            BlockCounts(
                group=count.group,
                total=count.total,
                free=count.free,
                cached=count.cached,
                request=count.request,
                pushing=count.pushing,
                reserved=count.reserved,
            )
            for count in report.blocks
        ),
        links=tuple(map(_link_from_wire, report.links)),
        counters=dict(report.counters),
    )


def _rules_from_wire(report: w.LoadReport) -> QueueRules:
    try:
        return QueueRules(stretch=report.queue_stretch, max_overtake_s=report.queue_max_overtake_s)
    except ConfigError:
        return FIRST_COME


def _link_from_wire(link: w.LinkReport) -> ReportedLink:
    return ReportedLink(
        rank=link.rank,
        peer=WorkerId(link.peer),
        peer_rank=link.peer_rank,
        transport=link.transport,
        from_host=link.from_host,
        to_host=link.to_host,
        bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        achieved_bytes_per_s=link.achieved_bytes_per_s,
        stalls=link.stalls,
        reason=link.reason,
        unused=tuple(link.unused),
    )


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


def _handoff_from_wire(timing: g.HandoffTiming) -> HandoffTiming:
    return HandoffTiming(
        ticket_wait_s=timing.ticket_wait_s,
        sample_to_step_s=timing.sample_to_step_s,
        last_wire_s=timing.last_wire_s,
        step_rest_s=timing.step_rest_s,
    )
