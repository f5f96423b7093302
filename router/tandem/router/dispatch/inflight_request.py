"""One request in flight: fences what arrives for it, puts it in order, and hands it to the reader of the answer."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.core.errors import CancelledError, TandemError
from tandem.core.handoff import ChoiceState, HandoffTiming, TokenLogprob
from tandem.core.ids import Attempt, ChoiceIndex, RequestId, WorkerId
from tandem.core.output_grammar import OutputGrammar
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import FinishReason, Phase
from tandem.router.admission.slo_classes import ANONYMOUS, Caller, SloRequest, SloTerms
from tandem.router.dispatch.request_trace import MAX_MOMENTS, Moment, RequestTrace
from tandem.router.dispatch.retry_policy import AttemptHistory, Member
from tandem.router.output_formats.choice import ThoughtLimit, ToolUse
from tandem.router.output_formats.parser import ParserSpec
from tandem.router.routing.plan import Job, Plan
from tandem.router.tokenization.chat_template import DEFAULT_RENDERING, Rendering
from tandem.router.workers.connection import WorkerLink
from tandem.router.workers.prefix_lookup import KeptHashes
from tandem.router.workers.proto_convert import PromptChunk, TokenChunk

_FIRST = Attempt(1)
_UNREAD = SamplingParams(max_tokens=1)
UNPLANNED = Plan(decode=WorkerId(""), prefill=None, reason="not planned yet")
_TOKEN_BYTES = 256
_ALTERNATIVE_BYTES = 8
"""About what a token and a reported alternative take in a stream; for the bound on unread backlog."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's text, and the offsets of its tokens, if they are wanted."""

    text: str
    tokens: Sequence[int]
    offsets: Sequence[int] = ()


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """A client's request: first one API call, then a copy for each of its prompts, with `prompt` and what comes after
    it. Its readers fill it in; then it is never changed.

    Of a call, exactly one of `prompts` (text or token ids) and `messages` is given; `rendering` defines how `messages`
    become a prompt. Copies have neither. `served_model` is the client's name of the model, `options` the SamplingParams
    fields given. Without max_tokens `default_max_tokens` is the limit, None = what is left of the context. Names like
    `max_tokens_param` are those of fields in errors. With `echoes` an answer begins with its prompt. Of the choices the
    `kept` best are wanted. `is_whole`: the answer is given when it is complete. Requests of one `cache_salt` share
    cached blocks among themselves alone; those of one `cache_key` go to the same workers where that costs little.

    Of a prompt, `sampling.n` choices are wanted. `model` is what its workers must compute; empty = any. `salt` is in
    the root of its block hashes; empty = that of requests that belong to no tenant.
    """

    api: str = ""
    served_model: str = ""
    prompts: tuple[str | Sequence[int], ...] = ()
    messages: tuple[Mapping[str, Any], ...] | None = None
    rendering: Rendering = DEFAULT_RENDERING
    options: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    includes_stop: bool = False
    bad_words: tuple[str, ...] = ()
    output_grammar: OutputGrammar | None = None
    echoes: bool = False
    is_echo_alone: bool = False
    """The answer is the prompt: generated tokens are discarded."""
    kept: int | None = None
    is_whole: bool = False
    default_max_tokens: int | None = None
    tools: ToolUse | None = None
    effort: str | None = None
    thought_limit: ThoughtLimit | None = None
    shows_reasoning: bool = True
    parsing: ParserSpec | None = None
    """Of a prompt: how its answers are taken apart; None = they are content alone."""
    max_tokens_param: str = "max_tokens"
    effort_param: str = "reasoning_effort"
    logprobs_param: str = "logprobs"
    caller: Caller = ANONYMOUS
    wish: SloRequest = field(default_factory=SloRequest)
    cache_salt: str | None = None
    cache_key: str | None = None
    arrived_s: float | None = None
    """When its API call arrived; None = now."""
    trace_id: str = ""
    """Id of the trace that its API call is in, for logs."""
    prompt: Sequence[int] = ()
    sampling: SamplingParams = _UNREAD
    timeout_s: float = math.inf
    model: str = ""
    salt: bytes = b""
    echo: Echo | None = None
    terms: SloTerms = field(default_factory=SloTerms)
    hashes: KeptHashes = field(default_factory=dict, compare=False, repr=False)
    """Hashes of its prompt: computed once, however often it is planned."""

    @property
    def wants_offsets(self) -> bool:
        """True if the answer shows where in its text each token begins."""
        return self.api == "completions" and "logprobs" in self.options


class Turn:
    """Calls for the next turn of the event loop: all of them at once, as one call of the loop."""

    def __init__(self) -> None:
        self._due: dict[Callable[[], None], None] = {}

    def add(self, call: Callable[[], None]) -> None:
        """`call`, which raises nothing, is called once however often it is added."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due[call] = None

    def _run(self) -> None:
        due, self._due = self._due, {}
        for call in due:
            call()


class ArrivalQueue:
    """Unread arrivals of one answer; one reader. The first failure is the last thing read.

    `turn`: shared with other answers, for readers that `follow`."""

    def __init__(self, limit_bytes: int, turn: Turn | None = None) -> None:
        self._limit_bytes, self._turn = limit_bytes, turn or Turn()
        self._arrivals: list[TokenChunk] = []
        self._bytes = 0
        self._error: TandemError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._follower: Callable[[], None] | None = None
        self._on_failed: Callable[[], None] | None = None

    @property
    def error(self) -> TandemError | None:
        return self._error

    def put(self, chunk: TokenChunk) -> None:
        """Add tokens; a reader that lets too many pile up fails."""
        if self._error is not None:
            return
        self._arrivals.append(chunk)
        self._bytes += len(chunk.tokens) * _TOKEN_BYTES
        if chunk.logprobs:
            self._bytes += sum(len(logprob.top) for logprob in chunk.logprobs) * _ALTERNATIVE_BYTES
        if self._bytes > self._limit_bytes:
            why = f"more than {self._limit_bytes} bytes wait for it"
            self.fail(CancelledError("the client reads too slowly", why=why), is_urgent=True)
        else:
            self._wake()

    def fail(self, error: TandemError, *, is_urgent: bool = False) -> None:
        """End the answer after what has arrived, or at once if `is_urgent`; later failures change nothing."""
        if self._error is not None:
            return
        self._error = error
        if is_urgent:
            self._arrivals.clear()
        self.when_failed(self._on_failed)
        self._wake()  # later: a client that receives the failure finds nothing of the request left

    def when_failed(self, call: Callable[[], None] | None) -> None:
        """Have `call` alone called soon after the first failure, or now if there was one; None = no call."""
        self._on_failed = call
        if call is not None and self._error is not None:
            asyncio.get_running_loop().call_soon(self._tell_failed)

    def _tell_failed(self) -> None:
        call, self._on_failed = self._on_failed, None
        if call is not None:
            call()

    async def take(self) -> list[TokenChunk]:
        """Everything that arrived, waiting for the first; raises the failure once all before it was read.

        Bounded by the deadline that the dispatcher sets: it ends in `fail`.
        """
        while not self._arrivals and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self.take_now()

    def take_now(self) -> list[TokenChunk]:
        """As `take`, without waiting: what arrived may be nothing."""
        if not self._arrivals and self._error is not None:
            raise self._error
        arrivals, self._arrivals, self._bytes = self._arrivals, [], 0
        if self._error is not None:
            self._wake()  # a follower comes again for the failure
        return arrivals

    def follow(self, call: Callable[[], None] | None) -> None:
        """Have `call` called in the turn after something arrived, in place of waking the waiting reader. It raises
        nothing; None = no more, but it may be called once again."""
        self._follower = call
        if call is not None and (self._arrivals or self._error is not None):
            self._wake()

    def _wake(self) -> None:
        if self._follower is not None:
            self._turn.add(self._follower)
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(slots=True)
class _ChoiceTokens:
    """The tokens of one choice. `tokens` are all that were passed on, of whichever attempt; the current one supplies
    those from `first_index` on."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    first_index: int = 0
    finish_at: int | None = None
    finish: FinishReason | None = None
    early: dict[int, tuple[int, TokenLogprob | None]] = field(default_factory=dict)
    is_unwanted: bool = False

    @property
    def next_index(self) -> int:
        """The first output index that has not been passed on."""
        return len(self.tokens)

    @property
    def is_done(self) -> bool:
        return self.finish_at is not None and self.next_index >= self.finish_at

    def end(self) -> None:
        """End it as it stands: no more of it is wanted."""
        if not self.is_done:
            self.finish_at, self.finish, self.is_unwanted = self.next_index, FinishReason.STOP, True
            self.early.clear()

    def add(self, chunk: TokenChunk) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
        """The tokens that can be passed on now, each index once, in order."""
        if chunk.index == self.next_index and not self.early and self.finish_at is None:  # as nearly always
            self.tokens.extend(chunk.tokens)
            if chunk.finish is not None:
                self.finish_at, self.finish = self.next_index, chunk.finish
            return chunk.tokens, chunk.logprobs
        if chunk.finish is not None and self.finish_at is None:
            self.finish_at, self.finish = chunk.index + len(chunk.tokens), chunk.finish
        for offset, token in enumerate(chunk.tokens):
            index = chunk.index + offset
            if index >= self.next_index and index not in self.early:
                self.early[index] = (token, chunk.logprobs[offset] if offset < len(chunk.logprobs) else None)
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        while self.next_index in self.early and not self.is_done:
            token, logprob = self.early.pop(self.next_index)
            tokens.append(token)
            if logprob is not None:
                logprobs.append(logprob)
            self.tokens.append(token)
        if self.is_done:
            self.early.clear()
        return tokens, logprobs

    def begin_attempt(self) -> None:
        """Forget tokens that were not passed on, and an end that was not reached."""
        self.early.clear()
        self.first_index = self.next_index
        if not self.is_done:
            self.finish_at = self.finish = None


@dataclass(slots=True, kw_only=True)
class InFlightRequest:
    """An in-flight request. `legs` are the links that still have work to do for its current attempt, by worker."""

    id: RequestId
    slot: int
    work: GenerationRequest
    inbox: ArrivalQueue
    started_s: float
    plan: Plan = field(default_factory=lambda: UNPLANNED)
    is_probe: bool = False
    """It came with its plan and is tried once, there; no client waits for it."""
    attempt: Attempt = _FIRST
    history: AttemptHistory = field(default_factory=AttemptHistory)
    phase: Phase = Phase.QUEUED
    legs: dict[str, WorkerLink] = field(default_factory=dict)
    pair: tuple[Member, ...] = ()
    """All workers in the plan, in the incarnations that the attempt was sent to."""
    cached_tokens: int | None = None
    predicted_tokens: int = 0
    """The expected `cached_tokens`, by the index and by what this router had sent to the worker that computes."""
    is_hoped: bool = False
    """True if the latter had a part in it: the blocks were expected there, not published."""
    handoff: HandoffTiming | None = None
    prefill_started_s: float | None = None
    left_s: float | None = None
    """Time that it had left when it was sent off; None = all of it."""
    first_token_s: float | None = None
    progress_s: float = 0.0
    """When its workers last showed that they go on with it."""
    recomputed: Counter[str] = field(default_factory=Counter)
    """Tokens that attempts computed again, by the cause that ended the one before."""
    redoing: str = ""
    """That, until the current attempt reports how many tokens it found; "" = there was nothing yet to compute again."""
    moments: list[Moment] = field(default_factory=list)
    """Events of the request so far, for operators."""
    trace: RequestTrace | None = None
    """All of it, once it is over."""
    orders: list[_ChoiceTokens] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt from its second token on; complete when the first output token comes."""

    def __post_init__(self) -> None:
        self.orders = [_ChoiceTokens() for _ in range(self.work.sampling.n)]

    @property
    def deadline_s(self) -> float:
        """The time at which the client's wait ends."""
        return self.started_s + (self.work.timeout_s if self.left_s is None else self.left_s)

    @property
    def names(self) -> dict[str, Any]:
        """Identifiers of the request in logs."""
        return {"request": self.id, **({"trace": self.work.trace_id} if self.work.trace_id else {})}

    @property
    def is_background(self) -> bool:
        """True for a batch's request, or a probe: no client waits for it."""
        return self.is_probe or self.work.terms.is_background

    @property
    def is_finished(self) -> bool:
        orders = self.orders
        return orders[0].is_done if len(orders) == 1 else all(order.is_done for order in orders)

    @property
    def has_first_tokens(self) -> bool:
        """True if every choice has its first token in this attempt: the prefill worker has nothing more to send."""
        return all(order.is_done or order.next_index > order.first_index for order in self.orders)

    @property
    def is_handed_over(self) -> bool:
        """Every choice has its first token, and some choice one more, which only the decode worker can have made."""
        return self.has_first_tokens and any(order.next_index > order.first_index + 1 for order in self.orders)

    @property
    def output_tokens(self) -> int:
        return sum(order.next_index for order in self.orders)

    def predict(self, tokens: int, block_tokens: int, *, is_hoped: bool) -> None:
        """So many prompt tokens should be known to the worker that the prompt is sent to; blocks are found whole, and
        the last token is computed anyway. Of several attempts, the first one that reported its cached tokens counts."""
        if self.cached_tokens is None:
            most = (len(self.work.prompt) - 1) // max(1, block_tokens) * block_tokens
            self.predicted_tokens, self.is_hoped = min(tokens, most), is_hoped

    def accept_prompt(self, chunk: PromptChunk) -> str:
        """Keep the new log-probabilities of the prompt; returns why there were none, or ""."""
        if chunk.attempt != self.attempt:
            return "attempt"
        known = 1 + len(self.prompt_logprobs) - chunk.position
        new = chunk.logprobs[known:] if known >= 0 else ()
        self.prompt_logprobs.extend(new)
        return "" if new else "duplicate"

    def end_choice(self, choice: int) -> None:
        """Take no more tokens of this choice: it met a stop string."""
        self.orders[choice].end()

    @property
    def sampling(self) -> SamplingParams:
        """For the current attempt: the prompt's log-probabilities are complete once there is output."""
        wanted = self.work.sampling
        if wanted.prompt_logprobs is None or not self.output_tokens:
            return wanted
        return replace(wanted, prompt_logprobs=None)

    @property
    def replayed_tokens(self) -> int:
        """Output of earlier attempts, of unfinished choices, that the current one computes like a prompt."""
        return sum(order.first_index for order in self.orders if not order.is_done)

    @property
    def longest_rest_tokens(self) -> int:
        """The most tokens that a choice still may have."""
        shortest = min((order.next_index for order in self.orders if not order.is_done), default=0)
        return max(1, self.work.sampling.max_tokens - shortest)

    def job(self, now_s: float, followers: float = 0.0, waiting: int = 0, answer_tokens: float = 0.0) -> Job:
        """The policy's view of it, planned at `now_s`. `followers`: prompts to come that begin alike; `waiting`:
        requests that wait in the router; `answer_tokens`: of an answer on average, 0 = not known."""
        return Job(
            prompt_tokens=len(self.work.prompt) + self.replayed_tokens,
            max_tokens=self.longest_rest_tokens,
            choices=self.work.sampling.n,
            now_s=now_s,
            deadline_s=self.deadline_s,
            skips_cache=self.sampling.prompt_logprobs is not None,
            is_kept_together=bool(self.work.cache_key),
            followers=followers,
            waiting=waiting,
            answer_tokens=answer_tokens,
            promised_ttft_s=self.work.terms.ttft_s if not self.output_tokens else math.inf,
            waited_s=now_s - (self.started_s if self.work.arrived_s is None else self.work.arrived_s),
            itl_s=self.work.terms.itl_s,
        )

    def mark(self, what: str, at_s: float, why: str = "") -> None:
        """Remember that this happened to the current attempt."""
        if len(self.moments) < MAX_MOMENTS:
            prefill, decode = self.plan.prefill or "", self.plan.decode
            self.moments.append(Moment(self.attempt, what, at_s, prefill, decode, why))

    def _found(self, cached_tokens: int) -> None:
        """The current attempt found so many tokens of the prompt cached, and computes the rest."""
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens
        if self.redoing:
            self.recomputed[self.redoing] += len(self.work.prompt) + self.replayed_tokens - cached_tokens
            self.redoing = ""

    def _began(self, phase: Phase, at_s: float) -> None:
        """Record when a phase began, as reported with the first token: news of that by itself may be as late as the
        token."""
        places = {moment.what: place for place, moment in enumerate(self.moments) if moment.attempt == self.attempt}
        at_s = max(at_s, self.moments[places["sent"]].at_s if "sent" in places else self.started_s)
        if phase in places:
            moment = self.moments[places[phase]]
            moment.at_s = min(at_s, moment.at_s)
        else:
            self.mark(phase, at_s)
        if phase is Phase.PREFILL and self.attempt == _FIRST:
            self.prefill_started_s = at_s

    def silent_leg(self, now_s: float, stall_s: float) -> WorkerLink | None:
        """The worker, if any, that should have gone on with it for `stall_s` and did not.

        A queue or a prompt may take its time: a prefill worker is silent only if its load report states that it has
        nothing at all to do. A decode worker is silent once there was a token.
        """
        if stall_s <= 0 or now_s - self.progress_s < stall_s:
            return None
        prefill = self.legs.get(self.plan.prefill or self.plan.decode)
        if not self.has_first_tokens:
            return prefill if prefill is not None and prefill.load.in_flight == 0 else None
        return self.legs.get(self.plan.decode)

    def begin_attempt(self, cause: str = "") -> None:
        """The attempt before is over: from now on its messages are ignored, so what `forced` gives stays true."""
        self.attempt = Attempt(self.attempt + 1)
        self.redoing = cause if self.first_token_s is not None else ""
        self.phase, self.pair = Phase.QUEUED, ()
        for order in self.orders:
            order.begin_attempt()

    def forced(self) -> list[ChoiceState]:
        """All output that the client has; an attempt goes on after it."""
        return [
            ChoiceState(
                choice=ChoiceIndex(choice),
                tokens=tuple(order.tokens),
                finish=order.finish if order.is_done else None,
            )
            for choice, order in enumerate(self.orders)
            if order.tokens or order.is_done
        ]

    def accept(self, chunk: TokenChunk, now_s: float) -> str:
        """Pass on the new tokens of `chunk`; returns why there were none, or ""."""
        if chunk.attempt != self.attempt:
            return "attempt"
        if chunk.choice >= len(self.orders):
            return "choice"
        if chunk.cached_tokens is not None:
            self._found(chunk.cached_tokens)
        if chunk.phase_s > 0:
            self._began(Phase.DECODE if chunk.handoff is not None else Phase.PREFILL, now_s - chunk.phase_s)
        if chunk.handoff is not None:
            self.handoff = chunk.handoff
        order = self.orders[chunk.choice]
        if order.is_unwanted:
            return "unwanted"
        was_done = order.is_done
        tokens, logprobs = order.add(chunk)
        is_now_done = order.is_done and not was_done
        if not tokens and not is_now_done:
            return "" if chunk.index + len(chunk.tokens) > order.next_index and not was_done else "duplicate"
        self.progress_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.mark("first_token", now_s)
        chunk.slot, chunk.at_s, chunk.tokens, chunk.logprobs = self.slot, now_s, tokens, logprobs
        chunk.finish = order.finish if is_now_done else None
        self.inbox.put(chunk)
        return ""
