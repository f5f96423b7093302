"""An API call as a trace sees it: begun when it arrives, and ended once, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.core.errors import TandemError
from tandem.core.ids import RequestId
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.dispatch.traces import RequestTrace

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
