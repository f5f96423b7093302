"""One request on one time line, for operators: where it waited, which workers computed it, how long its KV
travelled."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, takewhile
from typing import Any

from tandem.core.admin_schema import TraceMoment, TraceSpan, TraceSummary, copied
from tandem.core.clock import Clock
from tandem.core.errors import NotFoundError
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.request_trace import Moment, RequestTrace
from tandem.router.dispatch.traces import MAX_TRACES, Span, spans, trace_of
from tandem.router.error_quoting import shortened

MAX_RUNNING, MAX_SHOWN = 20, 30
_DIGITS = 6
_NAMES = 8
"""Request ids that an error lists."""


class TraceHandlers:
    """Answers from what the dispatcher keeps. Belongs to the event loop."""

    def __init__(self, router: str, dispatcher: Dispatcher, clock: Clock, wall_s: Callable[[], float]) -> None:
        self._router, self._dispatcher, self._clock, self._wall_s = router, dispatcher, clock, wall_s

    def find(self, request: str) -> dict[str, Any]:
        """A request that runs, or one of the last that ended, as plain values; NotFoundError for any other."""
        now_s = self._clock.now_s()
        flight = next((one for one in self._dispatcher.flights if one.id == request), None)
        trace = self._dispatcher.traces.find(request) if flight is None else trace_of(flight, now_s, is_over=False)
        if trace is None:
            raise self._unknown(request)
        return {**self._shown(trace, now_s), "moments": [_moment(moment, trace.arrived_s) for moment in trace.moments]}

    def latest(self) -> dict[str, Any]:
        """Requests that run, the newest MAX_RUNNING of them, and the last that ended: MAX_SHOWN in all, those that
        arrived last first, as plain values."""
        now_s = self._clock.now_s()
        flying = [flight for flight in self._dispatcher.flights if not flight.is_probe][-MAX_RUNNING:]
        traces = [trace_of(flight, now_s, is_over=False) for flight in flying]
        traces += self._dispatcher.traces.latest(MAX_SHOWN - len(traces))
        traces.sort(key=lambda trace: -trace.arrived_s)
        return {"requests": [self._shown(trace, now_s) for trace in traces]}

    def _shown(self, trace: RequestTrace, now_s: float) -> dict[str, Any]:
        end_s = now_s if trace.ended_s is None else trace.ended_s
        return copied(
            TraceSummary,
            trace,
            router=self._router,
            is_over=trace.ended_s is not None,
            began_at_s=round(self._wall_s() - (now_s - trace.arrived_s), 3),
            duration_s=round(end_s - trace.arrived_s, _DIGITS),
            attempts=max((moment.attempt for moment in trace.moments), default=1),
            handoff=dict(trace.handoff) if trace.handoff is not None else None,
            spans=[_span(span, trace.arrived_s) for span in spans(trace, end_s)],
        )

    def _unknown(self, request: str) -> NotFoundError:
        """Why there is none of that id; names those of its prompts, if it had several."""
        known = {str(flight.id) for flight in self._dispatcher.flights}
        of_prompts = (f"{request}-{number}" for number in count())
        prompts = [*takewhile(lambda one: one in known or self._dispatcher.traces.find(one) is not None, of_prompts)]
        if prompts:
            return NotFoundError(
                f"{shortened(request)!r} had several prompts",
                why="each of them is a request of its own",
                todo=f"take one of {', '.join(prompts[:_NAMES])}{' …' if len(prompts) > _NAMES else ''}",
            )
        return NotFoundError(
            f"request {shortened(request)!r} is not known here",
            why=f"it waits for room, went through another router, or more than {MAX_TRACES} ended since",
            todo="take the id of the answer",
        )


def _moment(moment: Moment, arrived_s: float) -> dict[str, Any]:
    return copied(TraceMoment, moment, at_s=round(moment.at_s - arrived_s, _DIGITS))


def _span(span: Span, arrived_s: float) -> dict[str, Any]:
    start_s, end_s = round(span.start_s - arrived_s, _DIGITS), round(span.end_s - arrived_s, _DIGITS)
    return copied(TraceSpan, span, span=span.name, start_s=start_s, end_s=end_s)
