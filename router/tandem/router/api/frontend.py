"""Shared by all client APIs: one router's parts, and the way from an ask to works that may be dispatched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from tandem.core.clock import Clock
from tandem.core.config import RouterSection
from tandem.core.errors import DeadlineError, TandemError, UnavailableError
from tandem.router.admission.slo import SloClasses
from tandem.router.api.request_pacing import RequestPacer
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.dispatch.readiness import Readiness
from tandem.router.metrics.router import Metrics
from tandem.router.serving.choices import AnswerSettings
from tandem.router.serving.request_parser import ApiRequest, RequestParser
from tandem.router.serving.response_stream import ResponseFactory, cost_of
from tandem.router.tenancy.authenticator import Authenticator
from tandem.router.tokenization.models import ModelRegistry
from tandem.router.tracing.calls import Call, Tracing, context_of


def stopping_error() -> TandemError:
    """For requests that come while the router stops."""
    return UnavailableError("this router is stopping", todo="send the request again", retry_after_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """`wall_s` gives seconds since 1970 for `created` fields; durations are measured with `clock`."""

    reader: RequestParser
    response_factory: ResponseFactory
    metrics: Metrics
    readiness: Readiness
    gate: Authenticator
    classes: SloClasses
    settings: RouterSection
    clock: Clock
    wall_s: Callable[[], float]
    started_s: int
    scrape: Callable[[], Awaitable[bytes]]
    """Metrics of the router, of all its processes; raises UnavailableError."""
    tracing: Tracing | None = None
    intake: RequestPacer = field(default_factory=RequestPacer)

    @property
    def is_traced(self) -> bool:
        """True if the trace context that clients send is used."""
        return self.tracing is not None

    def begin(self, api: str, headers: Iterable[tuple[str, str]], received_s: float) -> Call | None:
        """The trace of a call with these headers, or gRPC metadata; None = it has none."""
        return None if self.tracing is None else self.tracing.begin(api, context_of(headers), received_s)

    async def read(self, ask: ApiRequest, received_s: float) -> list[GenerationRequest]:
        """Works of an ask that arrived at `received_s`; refuses everything while the router stops."""
        if self.readiness.is_draining:
            raise stopping_error()
        terms = self.classes.terms(ask.caller, ask.wish)
        works = await self._in_time(self.reader.read(ask), received_s, terms.timeout_s)
        if not terms.is_background:
            await self.response_factory.budgets.spend(terms.tenant, cost_of(works))
        trace_id = ask.call.trace_id if ask.call is not None else ""
        for work in works:
            work.terms, work.timeout_s = terms, terms.timeout_s
            work.arrived_s, work.trace_id = received_s, trace_id
        return works

    async def _in_time(
        self, reading: Awaitable[list[GenerationRequest]], received_s: float, timeout_s: float
    ) -> list[GenerationRequest]:
        """DeadlineError if the prompt is not tokenised in the time that its whole answer has."""
        try:
            async with asyncio.timeout(received_s + timeout_s - self.clock.now_s()):
                return await reading
        except TimeoutError:
            why = f"its prompt was not tokenised within {timeout_s:g} s"
            raise DeadlineError("no answer in the time that was given", why=why, todo="try later") from None

    def answer_settings(self, ask: ApiRequest, received_s: float) -> AnswerSettings:
        return AnswerSettings(
            api=ask.api,
            model=ask.model,
            stop=ask.stop,
            received_s=received_s,
            tokenizer=self.models.find(ask.model).tokenizer,
            backlog_bytes=self.settings.slow_reader_backlog_bytes,
            includes_stop=ask.includes_stop,
            wants_offsets=ask.api == "completions" and "logprobs" in ask.sampling,
            call=ask.call,
        )

    def refused(self, api: str, error: TandemError, call: Call | None = None) -> None:
        """Count a request that never became an answer, and end its trace."""
        self.metrics.request_ended(api, error.code)
        if call is not None:
            call.refuse(error)

    @property
    def models(self) -> ModelRegistry:
        return self.reader.models
