"""Serves whole requests on one worker: for a mixed worker, and for a decode worker without a transfer."""

from __future__ import annotations

from collections.abc import Collection

from tandem.core.errors import InternalError, TandemError
from tandem.core.handoff import HandoffTiming
from tandem.core.lifecycle import Phase
from tandem.engine.request import StepResult
from tandem.workercore.requests import Tracked
from tandem.workercore.role import RoleContext


class WholeRequests:
    """Hands FULL requests to the engine and their tokens to the outbox; also the tokens of admitted hand-overs."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._open_choices: dict[str, set[int]] = {}
        self._started: set[str] = set()

    def add(self, tracked: Tracked) -> None:
        """Queue a request that is prefilled and decoded here; raises if it can never fit."""
        request = tracked.engine_request
        self._context.engine.add(request)
        ended = {state.choice for state in request.forced if state.finish is not None}
        self.follow(tracked, set(range(request.sampling.n)) - ended)

    def follow(self, tracked: Tracked, choices: set[int]) -> None:
        """From now on, tokens of these choices are reported; the last finish ends the request."""
        self._open_choices[tracked.key] = choices

    def cancel(self, tracked: Tracked) -> None:
        self._open_choices.pop(tracked.key, None)
        self._started.discard(tracked.key)
        self._context.engine.cancel(tracked.key)

    def end_choices(self, tracked: Tracked, choices: Collection[int]) -> None:
        """Generate no more of these; the request ends with its last choice. Requests that are not here are ignored."""
        open_choices = self._open_choices.get(tracked.key)
        if open_choices is None:
            return
        for choice in choices:
            self._context.engine.end_choice(tracked.key, choice)
        open_choices.difference_update(choices)
        if not open_choices:
            self._end(tracked)

    def after_step(self, result: StepResult, handoffs: dict[str, HandoffTiming]) -> None:
        """Report a step's tokens; `handoffs` go out with the first token of the requests that they belong to."""
        for part in result.prefilled:
            tracked = self._context.requests.get(part.key)
            if tracked is not None and part.key in self._open_choices and part.key not in self._started:
                self._started.add(part.key)
                self._context.outbox.phase(tracked, Phase.PREFILL)
        for output in result.outputs:
            tracked = self._context.requests.get(output.key)
            open_choices = self._open_choices.get(output.key)
            if tracked is None or open_choices is None or output.key in result.failed:
                continue
            if output.choice not in open_choices:
                continue
            cached = None
            if not tracked.has_reported_cached:
                tracked.has_reported_cached = True
                cached = self._context.engine.cached_tokens(output.key)
            handoff = handoffs.pop(output.key, None)
            self._context.outbox.token(tracked, output, cached_tokens=cached, handoff=handoff)
            if output.finish is not None:
                open_choices.discard(output.choice)
                if not open_choices:
                    self._end(tracked)
        for key, error in result.failed.items():
            tracked = self._context.requests.get(key)
            if tracked is not None and key in self._open_choices:
                del self._open_choices[key]
                self._started.discard(key)
                self._context.fail(tracked, error if isinstance(error, TandemError) else InternalError(str(error)))
        self._context.outbox.flush()

    def is_idle(self) -> bool:
        return not self._open_choices

    def _end(self, tracked: Tracked) -> None:
        del self._open_choices[tracked.key]
        self._started.discard(tracked.key)
        self._context.end(tracked)
        self._context.count("requests_finished")
