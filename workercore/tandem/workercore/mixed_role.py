"""The mixed role: prefill and decode of every request on one worker. The other roles extend it by transfers."""

from __future__ import annotations

from collections.abc import Collection

from tandem.core.errors import InternalError, InvalidRequestError, TandemError
from tandem.core.handoff import HandoffTiming
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.state_enums import Phase, RoleName
from tandem.engine.request import LayerHook, StepResult
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.requests import Tracked
from tandem.workercore.role_interface import Claim, RoleContext


class MixedRole:
    """Hands FULL requests to the engine and their tokens to the outbox; also the tokens of admitted hand-overs."""

    name = RoleName.MIXED

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._open_choices: dict[str, set[int]] = {}
        self._started: set[str] = set()

    @property
    def layer_hook(self) -> LayerHook | None:
        return None

    def submit(self, tracked: Tracked, message: w.Submit) -> None:
        """Queue a request that is prefilled and decoded here; raises if it can never fit."""
        if message.leg != w.LEG_FULL:
            raise InvalidRequestError(
                "this worker does not hand requests over", why="it has the mixed role", todo="plan again"
            )
        request = tracked.engine_request
        self._context.engine.add(request)
        ended = {state.choice for state in request.forced if state.finish is not None}
        self._follow(tracked, set(range(request.sampling.n)) - ended)

    def cancel(self, tracked: Tracked, reason: str) -> None:
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
            self._end_whole(tracked)

    def peer_message(self, peer: WorkerId, message: w.PeerMessage, received_s: float) -> None:
        return

    def peer_gone(self, peer: WorkerId, incarnation: Incarnation, reason: str) -> None:
        return

    def transfer_event(self, event: object) -> None:
        return

    def before_step(self) -> None:
        return

    def after_step(self, result: StepResult) -> None:
        self._report_tokens(result, {})

    def tick(self, now_s: float) -> None:
        return

    def claims(self) -> list[Claim]:
        return []

    def is_idle(self) -> bool:
        return not self._open_choices

    def _follow(self, tracked: Tracked, choices: set[int]) -> None:
        """From now on, tokens of these choices are reported; the last finish ends the request."""
        self._open_choices[tracked.key] = choices

    def _report_tokens(self, result: StepResult, handoffs: dict[str, HandoffTiming]) -> None:
        """Report a step's tokens; `handoffs` go out with the first token of the requests that they belong to."""
        for part in result.prefilled:
            tracked = self._context.requests.get(part.key)
            if tracked is not None and part.key in self._open_choices and part.key not in self._started:
                self._started.add(part.key)
                self._context.outbox.phase(tracked, Phase.PREFILL)
        for output in result.outputs:
            tracked = self._context.requests.get(output.key)
            open_choices = self._open_choices.get(output.key, set())
            if tracked is None or output.choice not in open_choices or output.key in result.failed:
                continue
            self._context.report_token(tracked, output, handoffs.pop(output.key, None))
            if output.finish is not None:
                open_choices.discard(output.choice)
                if not open_choices:
                    self._end_whole(tracked)
        for key, error in result.failed.items():
            tracked = self._context.requests.get(key)
            if tracked is not None and key in self._open_choices:
                del self._open_choices[key]
                self._started.discard(key)
                self._context.fail(tracked, error if isinstance(error, TandemError) else InternalError(str(error)))
        self._context.outbox.flush()

    def _end_whole(self, tracked: Tracked) -> None:
        del self._open_choices[tracked.key]
        self._started.discard(tracked.key)
        self._context.end(tracked)
        self._context.count("requests_finished")
