"""Events of requests and their times: kept for those that run and for the latest that ended, never their contents.

Times are the router's monotonic seconds, for a worker's news those of its arrival here, some 10 ms late. With its first
token a worker reports when it began, and then that counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.router.dispatch.inflight_request import InFlightRequest

MAX_TRACES = 2048
MAX_MOMENTS = 64
"""Moments of one request: attempts are few, so that this is for requests that something is wrong with."""


@dataclass(slots=True)
class Moment:
    """Something that happened to an attempt: it was "sent", a worker reported a phase, the "first_token" came, it
    "failed", or "moved" to another worker.

    `prefill` and `decode` are the workers that it was planned on then; "" = none.
    """

    attempt: int
    what: str
    at_s: float
    prefill: str
    decode: str
    why: str


@dataclass(slots=True, kw_only=True)  # never changed, but frozen it would take four times as long to make
class RequestTrace:
    """A request's moments. `ended_s` None = it runs. `error` is what its client got, `reason` the last plan's."""

    request: str
    model: str
    outcome: str
    error: str
    reason: str
    arrived_s: float
    ended_s: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    handoff: Mapping[str, float] | None
    moments: Sequence[Moment]


class TraceBook:
    """The latest traces, by request; past `limit` the oldest is forgotten."""

    def __init__(self, limit: int = MAX_TRACES) -> None:
        self._limit = limit
        self._traces: OrderedDict[str, RequestTrace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._traces)

    def keep(self, trace: RequestTrace) -> RequestTrace:
        self._traces.pop(trace.request, None)
        self._traces[trace.request] = trace
        if len(self._traces) > self._limit:
            self._traces.popitem(last=False)
        return trace

    def find(self, request: str) -> RequestTrace | None:
        return self._traces.get(request)

    def latest(self, count: int) -> list[RequestTrace]:
        """So many at most, the last that ended first."""
        return list(islice(reversed(self._traces.values()), count))


def trace_of(flight: InFlightRequest, now_s: float, *, is_over: bool) -> RequestTrace:
    """Return the trace of a flight as known now."""
    error, handoff = flight.inbox.error, flight.handoff
    arrived_s = flight.work.arrived_s
    return RequestTrace(
        request=flight.id,
        model=flight.work.model,
        outcome=flight.phase.value,
        error=error.message if error is not None else "",
        reason=flight.plan.reason,
        arrived_s=flight.started_s if arrived_s is None else arrived_s,
        ended_s=now_s if is_over else None,
        prompt_tokens=len(flight.work.prompt),
        output_tokens=flight.output_tokens,
        cached_tokens=flight.cached_tokens,
        handoff={
            "ticket_wait_s": handoff.ticket_wait_s,
            "sample_to_step_s": handoff.sample_to_step_s,
            "last_wire_s": handoff.last_wire_s,
            "step_rest_s": handoff.step_rest_s,
            "overhead_s": handoff.overhead_s,
        }
        if handoff is not None
        else None,
        moments=tuple(flight.moments),
    )
