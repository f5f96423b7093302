"""Events of requests and their times, as spans and as demand: of those that run and the latest that ended, never their
contents.

Times are the router's monotonic seconds, for a worker's news those of its arrival here, some 10 ms late. With its first
token a worker reports when it began, and then that counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice

from tandem.core.admin_schema import Constraint
from tandem.core.demand import MAX_ASKED, DemandSample
from tandem.core.ids import RequestId
from tandem.router.dispatch.inflight_request import GenerationRequest, InFlightRequest
from tandem.router.dispatch.request_trace import Moment, RequestTrace

MAX_TRACES = 2048


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
    error, handoff, arrived_s = flight.inbox.error, flight.handoff, flight.work.arrived_s
    grammar = flight.work.output_grammar
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
        constraint=None if grammar is None else Constraint(kind=grammar.kind, param=grammar.param),
        handoff=None if handoff is None else asdict(handoff) | {"overhead_s": handoff.overhead_s},
        moments=tuple(flight.moments),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """A part of an attempt: "wait" (in the router), "queue" (at a worker), "prefill", "transfer", "decode". `worker` ""
    = the router. Times are the router's monotonic seconds."""

    name: str
    worker: str
    attempt: int
    start_s: float
    end_s: float


def spans(trace: RequestTrace, end_s: float) -> list[Span]:
    """Split a request that ended at `end_s` into spans, in order and without gaps."""
    found: list[Span] = []
    began_s = trace.arrived_s
    attempts = [list(group) for _, group in groupby(trace.moments, key=lambda moment: moment.attempt)]
    for number, moments in enumerate(attempts):
        is_last = number == len(attempts) - 1
        over_s = end_s if is_last else moments[-1].at_s
        for name, worker, start_s, stop_s in _parts(moments, began_s, over_s):
            if stop_s > start_s or name == "transfer":  # which takes no time where all KV came while it was computed
                found.append(Span(name, worker, moments[0].attempt, start_s, stop_s))
        began_s = over_s
    if not attempts:
        found.append(Span("wait", "", 1, trace.arrived_s, end_s))
    return found


def _parts(moments: Sequence[Moment], began_s: float, over_s: float) -> Iterator[tuple[str, str, float, float]]:
    """(span, worker, start, end) of one attempt; what was not reached is not there, and the last ends with it."""
    first: dict[str, Moment] = {}
    for moment in moments:
        first.setdefault(moment.what, moment)
    sent = first.get("sent")
    if sent is None:
        yield "wait", "", began_s, over_s
        return
    computes = sent.prefill or sent.decode
    marks: list[tuple[str, str, float]] = [("wait", "", began_s), ("queue", computes, sent.at_s)]
    if "prefill" in first:
        marks.append(("prefill", computes, first["prefill"].at_s))
    computed = [first[what].at_s for what in ("transfer", "first_token") if what in first]
    if sent.prefill and computed:
        marks.append(("transfer", f"{sent.prefill} → {sent.decode}", min(computed)))
    if "decode" in first:
        marks.append(("decode", sent.decode, first["decode"].at_s))
    elif not sent.prefill and "first_token" in first:
        marks.append(("decode", sent.decode, first["first_token"].at_s))
    for number, (name, worker, _) in enumerate(marks):  # news of two workers may come in either order
        start_s = max(at_s for _, _, at_s in marks[: number + 1])
        stop_s = max(start_s, marks[number + 1][2]) if number + 1 < len(marks) else over_s
        yield name, worker, start_s, stop_s


@dataclass(slots=True)
class _Came:
    arrived_s: float
    prompt_tokens: int
    choices: int
    slo: str


class DemandBook:
    """The latest requests for the planner, unserved ones included: sizes and SLO classes. Past `limit` the oldest is
    forgotten. Their outcomes are kept elsewhere."""

    def __init__(self, limit: int = MAX_ASKED) -> None:
        self._limit = limit
        self._came: OrderedDict[str, _Came] = OrderedDict()

    def came(self, request: RequestId, work: GenerationRequest, arrived_s: float) -> None:
        """A request arrived; whether it is served is to be seen."""
        self._came.pop(request, None)
        self._came[request] = _Came(arrived_s, len(work.prompt), work.sampling.n, work.terms.slo)
        if len(self._came) > self._limit:
            self._came.popitem(last=False)

    def asked(
        self, flights: Iterable[InFlightRequest], traces: TraceBook, now_s: float, within_s: float
    ) -> list[DemandSample]:
        """All of the last `within_s`, oldest first. A request without a token, or that has not ended, may have more to
        come."""
        flying = {str(flight.id): flight for flight in flights}
        found: list[DemandSample] = []
        for request, came in self._came.items():
            if came.arrived_s < now_s - within_s:
                continue
            known = flying.get(request) or traces.find(request)
            output_tokens = known.output_tokens if known is not None else 0
            found.append(
                DemandSample(
                    age_s=max(0.0, now_s - came.arrived_s),
                    prompt_tokens=came.prompt_tokens,
                    output_tokens=-(-output_tokens // max(1, came.choices)),
                    cached_tokens=(known.cached_tokens or 0) if known is not None else 0,
                    choices=came.choices,
                    has_ended=request not in flying and output_tokens > 0,
                    slo=came.slo,
                )
            )
        return found
