"""Moments of a request made into spans: for `clusterctl trace`, and for trace collectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tandem.router.dispatch.traces import Moment, RequestTrace


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
