"""An answer being written: tokens in from the workers, text out to a client, usage and timing at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import TracebackType
from typing import Any

from tandem.core.clock import Clock
from tandem.core.errors import CancelledError, DeadlineError, InternalError, InvalidRequestError, TandemError
from tandem.core.handoff import TokenLogprob
from tandem.core.ids import RequestId, WorkerId
from tandem.router.admission.admission_controller import ANSWER_TOKENS, AdmissionController, QueuedRequest
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest, InFlightRequest, Turn
from tandem.router.metrics.router import Metrics
from tandem.router.output_formats.events import Reasoning
from tandem.router.routing.plan import decision
from tandem.router.serving.choices import Choice, ChoiceUpdate
from tandem.router.tenancy.budgets import Budgets
from tandem.router.tokenization.tokenizer import Tokenizer
from tandem.router.tracing.calls import AnswerEnd, Call
from tandem.router.workers.proto_convert import TokenChunk

ERROR_FLUSH_S = 2.0
_LEAST_S = 0.001
"""So much time has whatever is sent off."""
_OWN_ENDS = (CancelledError, DeadlineError, InvalidRequestError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """Among the completion's; None = the model marks no reasoning."""
    predicted_tokens: tuple[int, int] | None = None
    """Tokens of the prediction that choices followed, and those that they did not; None = none was given."""


class ResponseFactory:
    """Opens answers; everything that they share."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        admission: AdmissionController,
        budgets: Budgets,
        metrics: Metrics,
        clock: Clock,
        backlog_bytes: int,
    ) -> None:
        self.dispatcher = dispatcher
        self.admission, self.budgets = admission, budgets
        self.metrics, self.clock, self.backlog_bytes = metrics, clock, backlog_bytes
        self.turn = Turn()

    def open(
        self, request: RequestId, works: Sequence[GenerationRequest], tokenizer: Tokenizer, call: Call | None = None
    ) -> ResponseStream:
        """A context manager; entering it sends the request to workers, at once or when its turn comes."""
        return ResponseStream(self, request, works, tokenizer, call)


class ResponseStream:
    """Choices of all prompts, numbered prompt by prompt. Leaving the context ends it everywhere, exactly once."""

    def __init__(
        self,
        response_factory: ResponseFactory,
        request: RequestId,
        works: Sequence[GenerationRequest],
        tokenizer: Tokenizer,
        call: Call | None,
    ) -> None:
        self.id = request
        self._response_factory, self._works, self._call = response_factory, works, call
        self._inbox = ArrivalQueue(response_factory.backlog_bytes, response_factory.turn)
        self._flights: list[InFlightRequest] = []
        self._stack = ExitStack()
        self._tokenizer = tokenizer
        *self._firsts, self._unfinished = accumulate((work.sampling.n for work in works), initial=0)
        self.choice_count = self._unfinished
        self._parsing = works[0].parsing
        self._reasons = self._parsing is not None and self._parsing.reasoning is not None
        self._read_s, arrived_s = response_factory.clock.now_s(), works[0].arrived_s
        self._received_s = self._read_s if arrived_s is None else arrived_s
        self._first_s = self._second_s = 0.0
        self._sent_s = 0.0
        self._error: TandemError | None = None
        self._is_background = works[0].terms.is_background
        self._awaits_content = self._parsing is not None and not self._is_background
        self._measured = response_factory.metrics.of(works[0].model)

    def __enter__(self) -> ResponseStream:
        try:
            self._enter()
        except BaseException as error:
            self._error = _told(error)
            self._end_call()
            raise
        return self

    def _enter(self) -> None:
        if self._is_background:  # it fills gaps: no request has to make room for it, nor is it demand
            self._fly()
            return
        for slot, work in enumerate(self._works):
            self._response_factory.dispatcher.demand.came(self._request(slot), work, self._received_s)
        admission = self._response_factory.admission
        queued = self._queued()
        try:
            if admission.enter(queued):
                self._stack.callback(admission.leave, queued)
        except BaseException:
            self._settle(is_served=False)
            raise

    def _fly(self) -> None:
        """Send all requests off, with the rest of their time since they arrived."""
        now_s = self._sent_s = self._response_factory.clock.now_s()
        with ExitStack() as stack:
            for slot, work in enumerate(self._works):
                left_s = max(_LEAST_S, self._received_s + work.timeout_s - now_s)
                flight = self._response_factory.dispatcher.submit(
                    self._request(slot), slot, work, self._inbox, left_s=left_s
                )
                self._flights.append(stack.enter_context(flight))
            self._stack.enter_context(stack.pop_all())

    def _request(self, slot: int) -> RequestId:
        """Identifier of the request of one of its prompts."""
        return RequestId(f"{self.id}-{slot}") if len(self._works) > 1 else self.id

    def _queued(self) -> QueuedRequest:
        """The request as admission sees it."""
        first, received_s = self._works[0], self._received_s
        return QueuedRequest(
            terms=first.terms,
            prompt_tokens=sum(len(work.prompt) for work in self._works),
            choices=sum(work.sampling.n for work in self._works),
            cost=cost_of(self._works),
            arrived_s=received_s,
            deadline_s=received_s + first.timeout_s,
            model=first.model,
            grant=self._fly,
            refuse=self._inbox.fail,
            compute_time=self._compute_s,
            alone=self._alone,
        )

    @property
    def _is_served(self) -> bool:
        """True if it counts: something of it reached the client, or it ended for a reason of the client's own."""
        is_own = self._error is None or isinstance(self._error, _OWN_ENDS)
        return bool(self._flights) and (is_own or self.usage.completion_tokens > 0)

    def _settle(self, *, is_served: bool) -> None:
        """Settle the tenant's budget: what was charged before is known now."""
        usage, tenant = self.usage, self._works[0].terms.tenant
        if not self._is_background:
            used = usage.prompt_tokens + usage.completion_tokens
            self._response_factory.budgets.settle(tenant, charged=cost_of(self._works), used=used, is_served=is_served)

    def _compute_s(self) -> float:
        """How long its prompts take to compute, as far as that can be foreseen."""
        try:
            plans = [self._response_factory.dispatcher.plan_preview(work) for work in self._works]
        except TandemError:  # sending it off raises the same
            return 0.0
        return sum(plan.cost.compute_s for plan in plans if plan.cost is not None)

    def _alone(self, waiting: int) -> WorkerId | None:
        """The worker that had better serve it whole, if it has one prompt."""
        if len(self._works) > 1:
            return None
        try:
            return self._response_factory.dispatcher.alone(self._works[0], waiting)
        except TandemError:  # sending it off raises the same
            return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._unfinished and self._error is None:
            self._error = self._inbox.error or _told(error)
            self._inbox.fail(self._error, is_urgent=True)
        self._stack.close()
        self._settle(is_served=self._is_served)
        self._measure()
        self._end_call()
        if self._error is not None:
            self._error.__traceback__ = None  # its frames hold the answer, which holds it

    def _end_call(self) -> None:
        """Report the end of the call to its trace, if it has one."""
        if self._call is None:
            return
        usage = self.usage
        self._call.end(
            AnswerEnd(
                id=self.id,
                model=self._works[0].served_model,
                works=self._works,
                traces=[flight.trace for flight in self._flights if flight.trace is not None],
                read_s=self._read_s,
                first_token_s=self._first_s,
                ended_s=self._response_factory.clock.now_s(),
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                finish_reasons=[choice.finish.value for choice in self._choices if choice.finish is not None],
                error=self._error,
            )
        )

    @cached_property
    def _choices(self) -> list[Choice]:
        """Made when tokens come, behind the dispatch."""
        every = [work for work in self._works for _ in range(work.sampling.n)]
        return [Choice(index, self._tokenizer, work) for index, work in enumerate(every)]

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage(
            prompt_tokens=sum(len(work.prompt) for work in self._works),
            completion_tokens=sum(choice.token_count for choice in self._choices),
            cached_tokens=sum(flight.cached_tokens or 0 for flight in self._flights),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices) if self._reasons else None,
            predicted_tokens=self._predicted(),
        )

    def _predicted(self) -> tuple[int, int] | None:
        """Of all choices."""
        predicted = sum(len(work.sampling.prediction) * work.sampling.n for work in self._works)
        found = sum(choice.predicted_tokens for choice in self._choices) if predicted else 0
        return (found, max(0, predicted - found)) if predicted else None

    def cancel(self, error: TandemError) -> None:
        """End the answer now; the reader of `next` gets `error`."""
        self._inbox.fail(error, is_urgent=True)

    @contextmanager
    def when_failed(self, call: Callable[[], None]) -> Iterator[None]:
        """Have `call` called once the answer has failed in this context, by whatever cause; then no worker holds
        anything of it any more."""

        def failed() -> None:
            self._stack.close()
            call()

        self._inbox.when_failed(failed)
        try:
            yield
        finally:
            self._inbox.when_failed(None)

    async def next(self) -> list[ChoiceUpdate] | None:
        """New arrivals since the last call, at most one update a choice; None after the end. Raises the failure."""
        while self._unfinished:
            try:
                arrivals = await self._inbox.take()
            except TandemError as error:
                self._error = error
                raise
            if updates := self._updates(arrivals):
                return updates
        return None

    def next_now(self) -> list[ChoiceUpdate]:
        """As `next`, without waiting: what came may be nothing."""
        try:
            return self._updates(self._inbox.take_now())
        except TandemError as error:
            self._error = error
            raise

    @property
    def is_complete(self) -> bool:
        """True if every choice has ended, by what `next` gave."""
        return not self._unfinished

    async def follow(self, show: Callable[[], bool]) -> None:
        """Have `show` called by the event loop whenever something came, which it takes by `next_now`: no task wakes up.
        Return when it returns False or the answer is complete; raises what it raises."""
        ended = asyncio.get_running_loop().create_future()

        def call() -> None:  # beside those of other streams, which it must not stop
            if ended.done():
                return
            try:
                is_over = not show() or not self._unfinished
            except Exception as error:  # noqa: BLE001 - goes on in the task that follows
                if not ended.done():
                    ended.set_exception(error)
            else:
                if is_over and not ended.done():
                    ended.set_result(None)

        if not self._unfinished:
            return
        self._inbox.follow(call)
        try:
            await ended
        finally:
            self._inbox.follow(None)

    def _updates(self, arrivals: Sequence[TokenChunk]) -> list[ChoiceUpdate]:
        updates: dict[int, ChoiceUpdate] = {}
        for chunk in arrivals:
            self._take(chunk, updates)
        return list(updates.values())

    def _take(self, chunk: TokenChunk, updates: dict[int, ChoiceUpdate]) -> None:
        choice = self._choices[self._firsts[chunk.slot] + chunk.choice]
        if choice.finish is not None:
            return
        update = updates.get(choice.index)
        if update is None:
            update = updates[choice.index] = ChoiceUpdate(choice.index, "")
        if not choice.has_begun:
            choice.begin(update)
            update.prompt_logprobs = self._prompt_logprobs(chunk.slot)
        before = choice.token_count
        choice.add(chunk, update)
        if choice.finish is not None:
            self._unfinished -= 1
            if chunk.finish is None and self._unfinished:  # else its worker has ended it, or all ends now
                self._response_factory.dispatcher.end_choice(self._flights[chunk.slot], chunk.choice)
        if choice.token_count > before:
            self._note_times(choice, before, chunk.at_s)
        if self._awaits_content and any(not isinstance(part, Reasoning) for part in update.parts or ()):
            self._awaits_content = False
            self._measured.first_content.observe(chunk.at_s - self._received_s)

    def _prompt_logprobs(self, slot: int) -> Sequence[TokenLogprob] | None:
        work, found = self._works[slot], self._flights[slot].prompt_logprobs
        if work.sampling.prompt_logprobs is None:
            return None
        missing = len(work.prompt) - 1 - len(found)
        if missing:
            what = f"the log-probabilities of {missing} prompt tokens are missing"
            self._error = InternalError(what, todo="report this")
            raise self._error
        return found

    def _note_times(self, choice: Choice, before: int, at_s: float) -> None:
        """The choice had `before` tokens and now has more."""
        if before:
            gap_s = at_s - choice.last_s
            if before == 1 and not self._second_s:
                self._second_s = at_s
                if not self._is_background:
                    self._measured.second_token.observe(gap_s)
            if not self._is_background:
                self._measured.itl.observe(gap_s / (choice.token_count - before))
        else:
            choice.first_s = at_s
            if not self._first_s:
                self._first_s = at_s
                if not self._is_background:
                    self._measured.ttft.observe(at_s - self._received_s)
        choice.last_s = at_s

    def _measure(self) -> None:
        metrics, measured, now_s = self._response_factory.metrics, self._measured, self._response_factory.clock.now_s()
        metrics.request_ended(self._works[0].api, self._error.code if self._error is not None else "ok")
        usage = self.usage
        measured.generated_tokens.inc(usage.completion_tokens)
        failures = sum(choice.parse_failures for choice in self._choices)
        if failures and self._parsing is not None and self._parsing.tools is not None:
            metrics.calls_unread(self._parsing.tools.name, failures)
        if usage.completion_tokens:
            measured.prompt_tokens.inc(usage.prompt_tokens)
            measured.cached_tokens.inc(usage.cached_tokens)
        if self._error is None and not self._is_background:
            measured.e2e.observe(now_s - self._received_s)
        if self._works[0].terms.slo and not self._is_background:
            metrics.slo(self._works[0].terms.slo, self._outcome())
        for flight in self._flights:
            if not self._is_background:
                self._measure_phases(flight)
            if flight.cached_tokens is not None:
                metrics.prefix_found(flight.predicted_tokens, flight.cached_tokens, is_hoped=flight.is_hoped)
            for cause, tokens in flight.recomputed.items():
                metrics.recomputed(cause, tokens)
            predicted = flight.plan.cost
            if predicted is not None and flight.first_token_s is not None and flight.attempt == 1:
                actual_s = flight.first_token_s - flight.started_s
                measured.predicted_ttft.observe(predicted.first_token_s)
                measured.ttft_error.observe(abs(actual_s - predicted.first_token_s))
            if flight.handoff is not None:
                measured.handoff_overhead.observe(flight.handoff.overhead_s)
        last_s = max((one.last_s for one in self._choices if one.token_count > 1), default=0.0)
        if last_s and not self._is_background:
            measured.decode.observe(last_s - self._first_s)

    def _measure_phases(self, flight: InFlightRequest) -> None:
        metrics, began_s = self._measured, flight.prefill_started_s
        if began_s is not None:
            metrics.queue.observe(began_s - flight.started_s)
            if flight.first_token_s is not None:
                metrics.prefill.observe(max(0.0, flight.first_token_s - began_s))
        if flight.handoff is not None:
            metrics.transfer.observe(flight.handoff.sample_to_step_s)

    def _outcome(self) -> str:
        """How it ended against its SLO class: "met", "missed", or "failed", "cancelled"."""
        terms, choices = self._works[0].terms, self._choices
        if self._error is not None:
            return "cancelled" if self._error.code == "cancelled" else "failed"
        gaps_s = [(one.last_s - one.first_s) / (one.token_count - 1) for one in choices if one.token_count > 1]
        check_slo = self._first_s - self._received_s <= terms.ttft_s
        return "met" if check_slo and max(gaps_s, default=0.0) <= terms.itl_s else "missed"

    def decision(self) -> dict[str, Any]:
        """The plan of the first prompt, and its alternatives."""
        return decision(self._flights[0].plan)

    def timing(self) -> dict[str, Any]:
        """Seconds of each phase since the call arrived, and the parts of the hand-off; for measurements."""
        zero_s = self._received_s
        flight = self._flights[0]
        times: dict[str, Any] = {
            "sent_s": self._sent_s - zero_s,
            "prefill_started_s": flight.prefill_started_s and flight.prefill_started_s - zero_s,
            "first_token_s": self._first_s - zero_s if self._first_s else None,
            "second_token_s": self._second_s - zero_s if self._second_s else None,
            "done_s": self._response_factory.clock.now_s() - zero_s,
            "prefill": flight.plan.prefill,
            "decode": flight.plan.decode,
            "reason": flight.plan.reason,
            "predicted_prefill_hit_tokens": flight.plan.prefill_hit_tokens,
            "sources": [source.worker for source in flight.plan.sources],
            "predicted_decode_hit_tokens": flight.plan.decode_hit_tokens,
            "predicted_cached_tokens": flight.predicted_tokens,
            "prediction_basis": "speculation" if flight.is_hoped else "index",
            "cached_tokens": flight.cached_tokens or 0,
        }
        handoff = flight.handoff
        if handoff is not None:
            times["handoff"] = {
                "ticket_wait_s": handoff.ticket_wait_s,
                "sample_to_step_s": handoff.sample_to_step_s,
                "last_wire_s": handoff.last_wire_s,
                "step_rest_s": handoff.step_rest_s,
                "overhead_s": handoff.overhead_s,
            }
        return times


def _told(error: BaseException | None) -> TandemError:
    """The error that an answer which was left with `error` ended with."""
    return error if isinstance(error, TandemError) else CancelledError("the request was cancelled")


def cost_of(works: Sequence[GenerationRequest]) -> int:
    """Tokens charged to the tenant's share and budget before the answer is known."""
    return sum(len(work.prompt) + work.sampling.n * min(work.sampling.max_tokens, ANSWER_TOKENS) for work in works)


async def attend(
    answer: ResponseStream, delivery: Coroutine[Any, Any, None], *watchers: Coroutine[Any, Any, None]
) -> None:
    """Run `delivery` to its end beside `watchers`. After a failure a reader has ERROR_FLUSH_S to receive it.

    `delivery` runs in the calling task: a task costs more than sending a token.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(watcher) for watcher in watchers]
        try:
            async with asyncio.timeout(None) as patience:
                with answer.when_failed(lambda: patience.reschedule(loop.time() + ERROR_FLUSH_S)):
                    await delivery
        except TimeoutError:
            if not patience.expired():
                raise
        for other in others:
            other.cancel()
