"""API calls as a trace sees them: begun when one arrives, ended once; and tracing as configured, none or
OpenTelemetry's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.core.clock import Clock
from tandem.core.config import RouterConfig
from tandem.core.errors import StartupError, TandemError
from tandem.core.ids import RequestId
from tandem.core.urls import redacted
from tandem.core.version import release
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.dispatch.request_trace import RequestTrace
from tandem.router.tracing.settings import tracing_settings

RESPONSE_HEADER = "traceresponse"
"""Name of the header that gives a client the trace of its call."""
_PARENT, _STATE = "traceparent", "tracestate"
Context = Mapping[str, Sequence[str]]
"""A client's own trace context, by the names of W3C Trace Context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """An answer once it is over. Times are the router's monotonic seconds.

    `model`: as the client called it. `read_s`: from then on its prompts were known, in tokens. `first_token_s` 0 = it
    had none. `error` None = it is complete. `traces`: of those of its requests that were sent off.
    """

    id: RequestId
    model: str
    works: Sequence[GenerationRequest]
    traces: Sequence[RequestTrace]
    read_s: float
    first_token_s: float
    ended_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    finish_reasons: Sequence[str]
    error: TandemError | None


class Call(Protocol):
    """One API call. Exactly one of `refuse` and `end` is called, once."""

    @property
    def names(self) -> Mapping[str, str]:
        """The header that gives a client the call's trace."""

    @property
    def trace_id(self) -> str:
        """For logs; "" = this call is not traced."""

    def refuse(self, error: TandemError) -> None:
        """It never became an answer."""

    def end(self, answer: AnswerEnd) -> None:
        """Its answer is over."""


class Tracing(Protocol):
    """Starts the traces of calls."""

    def begin(self, api: str, context: Context, received_s: float) -> Call | None:
        """A call of `api` that arrived then; None = calls of this one are not traced."""

    async def close(self) -> None:
        """Send what is left, for a short while at most."""


def context_of(headers: Iterable[tuple[str, str]]) -> Context:
    """The client's trace in headers (or gRPC metadata; names in lower case); {} = nothing that counts."""
    found: dict[str, list[str]] = {}
    for name, value in headers:
        if name in (_PARENT, _STATE):
            found.setdefault(name, []).append(value)
    return found if len(found.get(_PARENT, ())) == 1 else {}


def open_tracing(config: RouterConfig, variables: Mapping[str, str], clock: Clock) -> Tracing | None:
    """None = it is off. StartupError when it cannot be had."""
    settings = tracing_settings(config.tracing, variables)
    if settings is None:
        return None
    try:
        from tandem.router.tracing.otel import make_tracing
    except ImportError as error:
        raise StartupError(
            f"traces cannot be sent to {redacted(settings.url)}", why=f"{error.name} is not installed",
            todo="install tandem-serve with the extra otel, or leave tracing off",
        ) from error  # fmt: skip
    resource = {
        "service.name": "tandem-router",
        "service.namespace": config.cluster,
        "service.instance.id": config.router_id,
        "service.version": release(),
    }
    return make_tracing(settings, resource, clock, time.time_ns)
