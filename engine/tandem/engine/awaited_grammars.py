"""Holds back requests from sampling until their output grammars are compiled, and while masks take long."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

from tandem.core.errors import InternalError, InvalidGrammarError
from tandem.core.sampling import SamplingParams
from tandem.engine.runner_protocol import SampleRow
from tandem.engine.sequence import QueueState, RequestState

if TYPE_CHECKING:
    from tandem.engine.output_grammars import CompiledGrammar, OutputGrammars

_WAIT_S = 0.005
"""For a grammar where nothing else can run; longer ones are looked for again after the next messages."""


class AwaitedGrammars:
    """Gives each choice its place in the grammar of its request. Belongs to the step loop's thread.

    `grammars`: None = no output can be made to follow one."""

    def __init__(self, grammars: OutputGrammars | None) -> None:
        self._grammars = grammars
        self._states: list[RequestState] = []
        self._held: list[RequestState] = []

    def __bool__(self) -> bool:
        return bool(self._states or self._held)

    def compile(self, sampling: SamplingParams) -> Future[CompiledGrammar]:
        """Begin to compile the grammar of a request; raises InvalidGrammarError where none can be followed."""
        if self._grammars is None:
            why = "its folder has no tokenizer.json"
            raise InvalidGrammarError("structured outputs are not supported for this model", why=why, param="grammar")
        return self._grammars.compile(sampling.grammar)

    def add(self, state: RequestState) -> None:
        """Let a request wait for its grammar, if it has one."""
        if state.request.sampling.grammar:
            state.compiling = self.compile(state.request.sampling)
            self._states.append(state)

    def hold(self, state: RequestState) -> None:
        """Look after a request that is held for a mask, so that an engine without other work waits for it."""
        if state.is_held and state not in self._held:
            self._held.append(state)

    def take(self, *, is_idle: bool) -> dict[RequestState, Exception]:
        """Release requests with compiled grammars, and return those with errors. `is_idle`: nothing else can run, so a
        short wait costs nothing."""
        if is_idle:
            awaited: list[Future[Any]] = [state.compiling for state in self._states if state.compiling]
            for state in self._held:
                awaited += [mask for choice in state.live for mask in choice.sampling.pending_masks if not mask.done()]
            wait(awaited, _WAIT_S, FIRST_COMPLETED)
        self._held = [state for state in self._held if state.place is not QueueState.GONE and state.is_held]
        states, self._states = self._states, []
        failed: dict[RequestState, Exception] = {}
        for state in states:
            if state.place is QueueState.GONE or state.compiling is None:
                continue
            if not state.compiling.done():
                self._states.append(state)
                continue
            try:
                self._follow(state, state.compiling.result())
            except Exception as error:  # noqa: BLE001 - of one request
                failed[state] = error
        return failed

    def begin_masks(self, rows: Sequence[SampleRow]) -> None:
        """Have the masks of rows with a grammar computed while the logits are."""
        drafts = {
            row.sampling.matcher: row.drafts  # the last row of a choice has all of them
            for row in rows
            if row.sampling.matcher is not None and row.token is None
        }
        if drafts and self._grammars is not None:
            self._grammars.begin_masks(drafts)

    def count_drafts(self, computed: int, accepted: int) -> None:
        """Count the drafts of a step, and those of them that became tokens of the answer."""
        assert self._grammars is not None
        self._grammars.drafts += computed
        self._grammars.accepted_drafts += accepted

    def _follow(self, state: RequestState, compiled: CompiledGrammar) -> None:
        """Give each choice its place. The first mask is there before a row of it is planned: the end of a prompt that
        is pushed is not computed twice."""
        assert self._grammars is not None
        for sequence in state.live:
            matcher = self._grammars.matcher(compiled, state.request.sampling.stop_token_ids)
            sequence.sampling.follow(matcher, sequence.outputs)
            if matcher.error:
                raise InternalError("the output so far does not follow the grammar", why=matcher.error)
        wait([mask for choice in state.live for mask in choice.sampling.pending_masks], self._grammars.patience_s)
        state.compiling = None
        self.hold(state)
