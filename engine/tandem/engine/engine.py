"""The engine of one worker: requests in, tokens out, one `step` at a time. Knows no network and starts no thread.

A step: plan (scheduler) → copy-on-write → forward and sample (runner) → publish full blocks → finish or fork choices.
Where the runner can (`Ahead`), the next decode step begins before the tokens of this one are known: its inputs are the
choices of this one, on the device, and the device never waits for the host. Sequences that changed by then are left
out.
Every method is called from one thread, the step loop's.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from itertools import islice
from typing import TYPE_CHECKING

from tandem.core.block_hash import BlockHash
from tandem.core.clock import Clock
from tandem.core.errors import InternalError, InvalidGrammarError, TandemError, WorkerLostError
from tandem.core.handoff import ChoiceState
from tandem.core.ids import BlockId, GroupId
from tandem.core.ledger import Holder, HoldKind
from tandem.core.sampling import SamplingParams
from tandem.engine.awaited_grammars import AwaitedGrammars
from tandem.engine.block_manager import BlockSpace, Reserved, longest_hit
from tandem.engine.memory_plan import SCORED_LOGITS
from tandem.engine.request import (
    EngineLoad,
    EngineRequest,
    LayerHook,
    PrefillSlice,
    PromptLogprobs,
    RequestKind,
    StepResult,
    TokenOutput,
    check_request,
    finish_reason,
)
from tandem.engine.runner_protocol import Runner, SeqSlice, StepBatch
from tandem.engine.scheduler import Scheduler, StepItem, StepPlan
from tandem.engine.sequence import QueueState, RequestState, Sequence
from tandem.engine.step_assembly import (
    BegunStep,
    assemble,
    is_chunk,
    is_stale,
    prefill_slices,
    prompt_logprobs,
    scoring,
    verified,
)
from tandem.engine.step_budget import SchedulerConfig, StepPace
from tandem.engine.swapping import Swap

if TYPE_CHECKING:
    from tandem.engine.output_grammars import OutputGrammars

_log = logging.getLogger(__name__)
_SCORED_LOGITS = SCORED_LOGITS


class Engine:
    """Continuous batching over a runner. Keys are unique among the requests that are in flight.

    `scheduler`, `blocks` and `pace` are its parts, for the same thread.
    """

    def __init__(
        self, runner: Runner, *, config: SchedulerConfig | None = None, clock: Clock, swap: Swap | None = None,
        grammars: OutputGrammars | None = None,
    ) -> None:  # fmt: skip
        """`swap` may keep the KV of preempted requests; None = they are computed again. `grammars`: None = no output
        can be made to follow one."""
        self.layout = runner.layout
        self.max_model_len = runner.max_model_len
        self.vocab_size = runner.vocab_size
        self.config = config or SchedulerConfig()
        self._runner, self._clock = runner, clock
        self.eos_token_ids = tuple(runner.eos_token_ids)
        self._eos = frozenset(runner.eos_token_ids)
        self.blocks = BlockSpace(runner.layout, runner.num_blocks, clock)
        self.ledgers = self.blocks.ledgers
        self.pace = StepPace(self.config, self.blocks.block_tokens)
        scored = _SCORED_LOGITS // runner.vocab_size
        self.swap = swap
        self.scheduler = Scheduler(self.blocks, self.config, self.pace, scored, swap, self._eos)
        self.grammars = grammars
        self._awaited = AwaitedGrammars(grammars)
        self._arrivals = 0
        self._early: list[tuple[RequestState, TokenOutput]] = []  # ends of replays with nothing left to generate
        self._batch: StepBatch | None = None  # that is computed now
        self._ahead: BegunStep | None = None  # the device computes it between two calls of `step`
        self._ended: dict[str, RequestState] = {}  # by the latest step; their counts stay readable until the next

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs. An empty step then means that blocks held elsewhere must come back."""
        return self.scheduler.has_work or bool(self._early) or self._ahead is not None

    @property
    def is_short_of_blocks(self) -> bool:
        """True while a preempted request waits to return, or the oldest running one cannot grow. Freed blocks are for
        these first."""
        return self.scheduler.has_preempted or self.scheduler.is_starved

    @property
    def growth_blocks(self) -> int:
        """Blocks a group that running choices may need soon: one each. Others should not take the last of these."""
        return self.scheduler.running_sequences

    def preempt_for(self, arrival_s: float, needs: AbstractSequence[int]) -> list[str]:
        """Preempt requests younger than `arrival_s`, youngest first, until each group has `needs[i]` blocks
        available beyond `growth_blocks`. Returns their keys; [] and nothing changed if that cannot be.
        Never the oldest running."""
        self._await_ahead()
        return self.scheduler.preempt_for(arrival_s, needs)

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError or ContextLengthError if `request` can never run here."""
        check_request(
            request, max_model_len=self.max_model_len, vocab_size=self.vocab_size,
            max_sequences=self.config.max_sequences, block_tokens=self.blocks.block_tokens,
            pool_blocks=self.blocks.total_blocks(),
        )  # fmt: skip

    def prepare(self, sampling: SamplingParams) -> None:
        """Begin to compile the grammar of a request that will be added. Raises InvalidGrammarError where none can be
        followed."""
        if sampling.grammar:
            self._awaited.compile(sampling)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises what `check` raises, and InternalError for a key in flight."""
        state = self._new_state(request, request.forced)
        if state.live:
            self.scheduler.add(state)

    def add_prefilled(
        self,
        request: EngineRequest,
        holder: Holder,
        tables: tuple[list[BlockId], ...],
        choices: tuple[ChoiceState, ...],
    ) -> None:
        """Admit a request with complete prompt KV in `tables` (one a group), held by `holder`.

        `choices` has every choice with at least one output token, or finished. The blocks move to the request, those
        beyond the prompt are given back. Raises LedgerError or InternalError, with `holder` keeping its blocks.
        """
        request = dataclasses.replace(request, kind=RequestKind.FULL)
        known = {choice.choice for choice in choices if choice.tokens or choice.finish}
        if len(known) != request.sampling.n:
            raise InternalError(f"{len(known)} of {request.sampling.n} choices have a first token")
        if all(choice.finish for choice in choices) or not (state := self._new_state(request, choices)).live:
            self.blocks.release_holder(holder)
            return
        state.cached_tokens = 0
        state.scored = len(request.prompt) - 1  # the worker that computed the prompt has reported it
        self.blocks.adopt(state, holder, tables)
        self.scheduler.add_running(state)

    def cancel(self, key: str) -> bool:
        """Forget a request in any phase and give back its blocks at once; full ones stay cached. False if unknown."""
        state = self.scheduler.get(key)
        if state is None:
            return False
        self.scheduler.remove(state)
        return True

    def end_choice(self, key: str, choice: int) -> None:
        """End an unwanted choice as it stands, without reporting it. Its blocks go back at once.

        A request without any other choice is forgotten; a PREFILL_ONLY one that has run keeps its blocks until
        `cancel`. Unknown keys and choices that have ended are ignored.
        """
        state = self.scheduler.get(key)
        if state is not None:
            self.scheduler.end_choice(state, choice)

    def block_table(self, key: str, group: GroupId) -> list[BlockId]:
        """The blocks of the prompt in logical order, empty while the request waits. KeyError if not in flight."""
        state = self._state(key)
        count = self.blocks.blocks_for(len(state.request.prompt))
        return next((s.tables[group][:count] for s in state.sequences if s.tables[group]), [])

    def cached_tokens(self, key: str) -> int:
        """Prompt tokens that were prefix hits here at first admission. Readable until the step after the last token."""
        return (self._ended.get(key) or self._state(key)).cached_tokens or 0

    def load(self) -> EngineLoad:
        """Number of waiting and running requests, sequences and tokens."""
        return self.scheduler.load(self._clock.now_s())

    def in_flight(self) -> list[str]:
        """Keys of all requests that are waiting, running or parked until `cancel`."""
        return [state.request.key for state in self.scheduler.states()]

    def reserve(
        self,
        holder: Holder,
        hashes: AbstractSequence[BlockHash],
        count: int,
        window_offsets: AbstractSequence[int] | None = None,
    ) -> tuple[Reserved, ...] | None:
        """Reserve `count` blocks a group for KV from elsewhere: those cached under `hashes`, and new ones, save for the
        first `window_offsets[i]` of group i. None, and nothing held, if running choices could not grow then."""
        return self.blocks.reserve(holder, hashes, count, self.growth_blocks, window_offsets)

    def hit_blocks(self, hashes: AbstractSequence[BlockHash], *, is_whole: bool) -> int:
        """Number of leading blocks that a request would not have to compute; `is_whole`: counts only up to where all of
        them are here, also behind windows. Holds nothing."""
        return longest_hit(self.ledgers, self.layout.groups, hashes, is_whole=is_whole)

    def step(self, on_layers: LayerHook | None = None) -> StepResult:
        """Compute one batch. Requests with a failed computation are in `failed` and hold nothing any more.

        Raises WorkerLostError when the runner has lost ranks of its group: then the engine cannot go on.
        """
        begun, self._ahead = self._ahead, None
        started_s = self._clock.now_s() if begun is None else begun.since_s
        self._ended = {output.key: state for state, output in self._early}
        failed: dict[str, Exception] = {}
        if self._awaited:
            self._take_grammars(failed)
        plan = self.scheduler.plan(started_s) if begun is None else begun.plan
        outputs = [output for _, output in self._early]
        self._early.clear()
        scores: list[PromptLogprobs] = []
        slices: tuple[PrefillSlice, ...] = ()
        if plan.items:
            if plan.prefill_tokens:
                plan.items.sort(key=is_chunk)
                slices = tuple(prefill_slices(plan.items))
            try:
                if begun is None:
                    self._copy(plan.items)
                    begun = self._begin(plan)
                sampled = self._execute(plan, slices, on_layers) if begun is None else self._overlap(begun)
            except WorkerLostError:  # the group that computes is broken: no step can run any more
                raise
            except Exception as error:  # noqa: BLE001 - the top of the step loop: ends the step's requests only
                _log.exception("a step failed")
                self._await_ahead()
                self._ahead = None
                self._fail([item for item in plan.items if not is_stale(item)], error, failed)
            else:
                self._commit(plan.items, sampled, outputs, scores, failed)
        ended_s = self._clock.now_s()
        if self._ahead is not None:
            self._ahead.since_s = ended_s
        if plan.items and not failed:
            took_s = ended_s - started_s
            self.pace.observe(plan.prefill_tokens, plan.decode_tokens, took_s, plan.prefill_attended)
            if not plan.prefill_tokens:
                self.scheduler.drafts.controller.observe_step(plan.decode_tokens, took_s)
        return StepResult(
            outputs=tuple(outputs), prefilled=slices, preempted=tuple(plan.preempted),
            recomputed_tokens=plan.recomputed_tokens,
            prefill_tokens=plan.prefill_tokens, decode_tokens=plan.decode_tokens, logit_rows=plan.logit_rows,
            context_tokens=plan.context_tokens, attended=plan.prefill_attended + plan.decode_attended,
            started_s=started_s, ended_s=ended_s, failed=failed, admitted=plan.admitted,
            prompt_logprobs=tuple(scores),
        )  # fmt: skip

    def batch_counts(self) -> dict[str, int]:
        """Counts of the step in progress; {} between steps. Any thread."""
        batch = self._batch
        return batch.counts() if batch is not None else {}

    def probe(self) -> None:
        """After a step that failed: compute one token beside all requests, if a block is free.

        Raises WorkerLostError if that fails too: then it was not the requests, and no further step can be trusted.
        """
        self._await_ahead()
        holder = Holder(HoldKind.REQUEST, "probe")
        tables = [ledger.allocate(holder, 1) for ledger in self.ledgers]
        try:
            if all(tables):
                self._runner.step(
                    StepBatch([0], [0], [SeqSlice(1, 1, tuple(table or [] for table in tables))], []), [], None
                )
        except WorkerLostError:
            raise
        except Exception as error:
            what = "the engine cannot compute even one token any more"
            raise WorkerLostError(what, why=f"{type(error).__name__}: {error}") from error
        finally:
            self.blocks.release_holder(holder)

    def _new_state(self, request: EngineRequest, outputs: tuple[ChoiceState, ...]) -> RequestState:
        """Check a request and settle choices that their known tokens already end (their last token is reported
        again)."""
        if self.scheduler.get(request.key) is not None:
            raise InternalError(f"request {request.key} is already in this engine")
        self.check(dataclasses.replace(request, forced=outputs))
        self._arrivals += 1
        age = (request.arrival_s, self._arrivals)
        state = RequestState(request, outputs, age, len(self.ledgers), self.eos_token_ids)
        for sequence in tuple(state.live):
            self._finish_if_done(state, sequence)
            if sequence.finish is not None:
                self._early.append((state, _output(request.key, sequence, None)))
        state.is_forked = len(state.live) <= 1
        self._awaited.add(state)
        self.scheduler.drafts.follow(state)
        return state

    def _take_grammars(self, failed: dict[str, Exception]) -> None:
        is_idle = all(state.is_held for state in self.scheduler.states())
        for state, error in self._awaited.take(is_idle=is_idle).items():
            failed[state.request.key] = _as_tandem_error(error)
            self.scheduler.remove(state)

    def _execute(
        self, plan: StepPlan, slices: tuple[PrefillSlice, ...], on_layers: LayerHook | None
    ) -> list[TokenOutput]:
        """Run the planned batch; one result for every taker, in the order of items."""
        batch, rows = assemble(plan.items)
        self._awaited.begin_masks(rows)
        plan.logit_rows = len(batch.logit_rows)
        hook: Callable[[int, int], None] | None = None
        if on_layers is not None and slices:
            tell = on_layers

            def hook(first: int, last: int) -> None:
                tell(slices, first, last)

            hook(0, 0)
        self._batch = batch
        try:
            return self._runner.step(batch, rows, hook)
        finally:
            self._batch = None

    def _begin(self, plan: StepPlan) -> BegunStep | None:
        """Begin a step of decodes, behind which the next one can begin; None where this one has to be executed."""
        ahead = self._runner.ahead
        if ahead is None or plan.prefill_tokens:
            return None
        batch, rows = assemble(plan.items)
        self._awaited.begin_masks(rows)
        begun = ahead.begin(batch, rows)
        return None if begun is None else BegunStep(plan, batch, begun)

    def _overlap(self, begun: BegunStep) -> list[TokenOutput]:
        """Begin the step behind `begun`, if it can be planned, and wait for the tokens of `begun`."""
        self._batch = begun.batch
        try:
            self._ahead = self._begin_behind(begun)
            return begun.results()
        finally:
            self._batch = None
            items = self._ahead.plan.items if self._ahead is not None else ()
            self.blocks.keep_written((item.sequence, item.end) for item in items)

    def _begin_behind(self, before: BegunStep) -> BegunStep | None:
        ahead = self._runner.ahead
        plan = self.scheduler.plan_ahead([item for item in before.plan.items if not is_stale(item)])
        if plan is None or ahead is None or before.begun is None:
            return None
        places = {item.sequence: place for place, item in enumerate(before.plan.items)}
        batch, rows = assemble(plan.items)
        try:
            begun = ahead.begin(batch, rows, before.begun, [places[item.sequence] for item in plan.items])
        except Exception as error:  # noqa: BLE001 - reported when it is this step's turn
            return BegunStep(plan, batch, None, error)
        return None if begun is None else BegunStep(plan, batch, begun)

    def _await_ahead(self) -> None:
        """Wait until the device is done with the step that has begun. Its results are kept."""
        if self._ahead is not None:
            self._ahead.wait()
            self.blocks.keep_written(())

    def _copy(self, items: list[StepItem]) -> None:
        copies: dict[GroupId, list[tuple[int, int]]] = {}
        for item in items:
            for group, source, target in item.copies:
                copies.setdefault(group, []).append((source, target))
        for group, pairs in copies.items():
            self._runner.copy_blocks(group, pairs)

    def _commit(
        self,
        items: list[StepItem],
        sampled: list[TokenOutput],
        outputs: list[TokenOutput],
        scores: list[PromptLogprobs],
        failed: dict[str, Exception],
    ) -> None:
        """Apply the results of a completed step: publish blocks, add tokens, end or fork choices."""
        results = iter(sampled)
        for item in items:
            state, sampling_choices = item.state, item.sampling_choices
            scored = list(islice(results, len(scoring(item))))
            tokens = list(islice(results, len(sampling_choices) + len(item.drafts)))
            if is_stale(item):  # cancelled by a layer hook or since it began, or failed with another choice
                continue
            if not all(result.is_valid for result in (*scored, *tokens)):
                error = InternalError("the logits have no finite maximum", why="the computation went wrong")
                self.blocks.unpublish(state)  # earlier blocks of this prompt may be bad too
                self._fail([item], error, failed)
                continue
            if state.has_grammar and [taker for taker in sampling_choices if taker.sampling.take_late()]:
                self._defer(item, scored, scores)
                continue
            if item.drafts:
                tokens = verified(item, tokens)
                counting = self._awaited if item.sequence.sampling.drafter is None else self.scheduler.drafts.controller
                counting.count_drafts(len(item.drafts), len(tokens) - 1)
                sampling_choices = [item.sequence] * len(tokens)
            for sequence, result in zip(sampling_choices, tokens, strict=True):
                if not sequence.sampling.grammar_error:  # as its mask found it
                    sequence.append(result.token)
                    self._finish_if_done(state, sequence)
                    outputs.append(_output(state.request.key, sequence, result))
                if state.has_grammar and not self._follows(item, sequence, failed):
                    break
            else:
                if sampling_choices:
                    state.is_preempted = False
                item.sequence.computed = item.end + (len(tokens) - 1 if item.drafts else 0)
                self.blocks.publish(state, item.sequence)
                self.blocks.leave(state, item.sequence)
                if scored:
                    scores.append(prompt_logprobs(item, scored))
                self._settle(state, item)

    def _follows(self, item: StepItem, sequence: Sequence, failed: dict[str, Exception]) -> bool:
        """Fail the request if the grammar of `sequence` cannot be followed any further; False then."""
        if why := sequence.sampling.grammar_error:
            what, todo = "the output grammar cannot be followed any further", "use a simpler grammar"
            self._fail([item], InvalidGrammarError(what, why=why, todo=todo, param="grammar"), failed)
            return False
        self._awaited.hold(item.state)
        return True

    def _defer(self, item: StepItem, scored: list[TokenOutput], scores: list[PromptLogprobs]) -> None:
        """Commit an item without the token behind it, which is computed again once the mask of its grammar is there."""
        item.sequence.computed = item.end - 1
        self.blocks.publish(item.state, item.sequence)
        if scored:
            scores.append(prompt_logprobs(item, scored))
        self._awaited.hold(item.state)

    def _settle(self, state: RequestState, item: StepItem) -> None:
        """Fork, park or end a request after one of its sequences moved."""
        sequence = item.sequence
        if state.is_prefill_only and state.is_first_token_done:
            self.scheduler.park(state)
            return
        if not state.is_forked and item.end == sequence.prompt_tokens:
            self.blocks.fork(state, sequence)
        if state.is_prefill_only:
            return
        for taker in item.sampling_choices:
            if taker.finish is not None:
                self.blocks.release_sequence(taker)
        if not state.live:
            self._ended[state.request.key] = state
            self.scheduler.remove(state)

    def _finish_if_done(self, state: RequestState, sequence: Sequence) -> None:
        sequence.finish = finish_reason(
            state.request.sampling, sequence.outputs, sequence.length, self._eos, self.max_model_len,
            is_complete=sequence.sampling.is_complete,
        )  # fmt: skip
        if sequence.finish is not None:
            state.live.remove(sequence)

    def _fail(self, items: list[StepItem], error: Exception, failed: dict[str, Exception]) -> None:
        for item in items:
            if item.state.place is not QueueState.GONE:
                failed[item.state.request.key] = _as_tandem_error(error)
                self.scheduler.remove(item.state)

    def _state(self, key: str) -> RequestState:
        state = self.scheduler.get(key)
        if state is None:
            raise KeyError(key)
        return state


def _output(key: str, sequence: Sequence, result: TokenOutput | None) -> TokenOutput:
    """Fill in of which choice `result` is; None = a replay that ends with its last token, nothing left to generate."""
    output = result or TokenOutput(sequence.outputs[-1])
    output.key, output.choice, output.index = key, sequence.choice, len(sequence.outputs) - 1
    output.finish = sequence.finish
    return output


def _as_tandem_error(error: Exception) -> TandemError:
    if isinstance(error, TandemError):
        return error
    wrapped = InternalError("a step of the engine failed", why=f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
