"""Moments of a request made into spans: in order, without gaps, also if some were not reached or came late."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import NotFoundError
from tandem.core.ids import RequestId, WorkerId
from tandem.core.state_enums import WorkerState
from tandem.router.admin import trace_handlers
from tandem.router.admin.trace_handlers import TraceHandlers
from tandem.router.dispatch.inflight_request import ArrivalQueue
from tandem.router.dispatch.request_trace import Moment, RequestTrace
from tandem.router.dispatch.traces import TraceBook, spans
from tandem.router.routing.plan import Plan
from tandem.rpc.v1 import worker_pb2 as w
from tests.unit.router.stage import Stage, chunk, work


def moment(what: str, at_s: float, attempt: int = 1, prefill: str = "p0") -> Moment:
    return Moment(attempt, what, at_s, prefill, "d0", "")


def trace(*moments: Moment, request: str = "r") -> RequestTrace:
    return RequestTrace(
        request=request, model="m", outcome="finished", error="", reason="least", arrived_s=100.0, ended_s=104.0,
        prompt_tokens=7, output_tokens=3, cached_tokens=None, constraint=None, handoff=None, moments=moments,
    )  # fmt: skip


def shown(*moments: Moment) -> list[tuple[str, str, float, float]]:
    return [(s.name, s.worker, s.start_s - 100.0, s.end_s - 100.0) for s in spans(trace(*moments), 104.0)]


CROSSED = [
    ("sent", 100.5),
    ("queued", 100.6),
    ("prefill", 101.0),
    ("first_token", 102.0),
    ("transfer", 102.1),
    ("decode", 103.0),
]


def test_a_request_that_crossed() -> None:
    assert shown(*(moment(what, at_s) for what, at_s in CROSSED)) == [
        ("wait", "", 0.0, 0.5),
        ("queue", "p0", 0.5, 1.0),
        ("prefill", "p0", 1.0, 2.0),
        ("transfer", "p0 → d0", 2.0, 3.0),
        ("decode", "d0", 3.0, 4.0),
    ]


def test_a_request_that_stayed() -> None:
    moments = [moment(what, at_s, prefill="") for what, at_s in CROSSED[:4]]
    assert shown(*moments) == [
        ("wait", "", 0.0, 0.5),
        ("queue", "d0", 0.5, 1.0),
        ("prefill", "d0", 1.0, 2.0),
        ("decode", "d0", 2.0, 4.0),
    ]


def test_one_that_was_never_sent_and_one_that_was_tried_again() -> None:
    assert shown() == [("wait", "", 0.0, 4.0)]
    again = [moment("sent", 100.5), moment("failed", 101.5), moment("sent", 102.0, 2), moment("decode", 103.0, 2)]
    assert shown(*again) == [
        ("wait", "", 0.0, 0.5),
        ("queue", "p0", 0.5, 1.5),
        ("wait", "", 1.5, 2.0),
        ("queue", "p0", 2.0, 3.0),
        ("decode", "d0", 3.0, 4.0),
    ]


@given(st.lists(st.tuples(st.sampled_from([what for what, _ in CROSSED]), st.floats(100.0, 104.0)), max_size=8))
def test_news_in_any_order_gives_a_line_without_gaps(news: list[tuple[str, float]]) -> None:
    found = spans(trace(*(moment(what, at_s) for what, at_s in news)), 104.0)
    assert (found[0].start_s, found[-1].end_s) == (100.0, 104.0)
    for span, after in itertools.pairwise(found):
        assert span.end_s == after.start_s
        assert span.start_s < span.end_s or (span.name == "transfer" and span.start_s == span.end_s)


def test_the_book_forgets_the_oldest() -> None:
    book = TraceBook(limit=2)
    for request in ("a", "b", "a", "c"):
        book.keep(trace(request=request))
    assert (len(book), book.find("b")) == (2, None)
    assert book.find("a") is not None


async def test_what_was_decoded_before_a_move_is_shown_as_such() -> None:
    stage = Stage("p1", "d1", "d2")
    with stage.dispatcher.submit(RequestId("r"), 0, work(n=1), ArrivalQueue(1 << 20)) as flight:
        first = flight.plan.decode
        stage.clock.advance(1.0)
        stage.say("p1", chunk(0, 0, 10))
        stage.clock.advance(0.5)
        stage.goes_on(first, "r", 1)
        stage.clock.advance(8.0)
        drains = w.WorkerState(sequence=1, state=WorkerState.DRAINING.value, hands_back=True)
        stage.link(first)._hear(w.WorkerMessage(state=drains))
        stage.clock.advance(0.25)
        stage.goes_on(flight.plan.decode, "r", 2)
        stage.clock.advance(2.0)
        found = handlers(stage).find("r")
        second = flight.plan.decode
    assert second != first
    assert [(s["span"], s["worker"], s["attempt"], s["start_s"], s["end_s"]) for s in found["spans"]] == [
        ("queue", "p1", 1, 0.0, 1.0),
        ("transfer", f"p1 → {first}", 1, 1.0, 1.5),
        ("decode", first, 1, 1.5, 9.5),
        ("queue", second, 2, 9.5, 9.75),
        ("decode", second, 2, 9.75, 11.75),
    ]
    (moved,) = [moment for moment in found["moments"] if moment["what"] == "moved"]
    assert (moved["attempt"], moved["decode"], moved["why"]) == (1, first, "the worker drains")


async def test_the_latest_are_those_that_run_and_the_last_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_handlers, "MAX_RUNNING", 2)
    monkeypatch.setattr(trace_handlers, "MAX_SHOWN", 4)
    stage = Stage("p1", "d1")
    for number in range(3):
        stage.clock.advance(1.0)
        with stage.dispatcher.submit(RequestId(f"ended-{number}"), 0, work(), ArrivalQueue(1 << 20)):
            pass
    with contextlib.ExitStack() as stack:
        for number in range(3):
            stage.clock.advance(1.0)
            stack.enter_context(
                stage.dispatcher.submit(RequestId(f"runs-{number}"), number, work(), ArrivalQueue(1 << 20))
            )
        probe = Plan(decode=WorkerId("d1"), prefill=WorkerId("p1"), reason="probe")
        stack.enter_context(stage.dispatcher.submit(RequestId("probe"), 9, work(), ArrivalQueue(1 << 20), probe))
        stage.clock.advance(0.5)
        rows = handlers(stage).latest()["requests"]
    assert [row["request"] for row in rows] == ["runs-2", "runs-1", "ended-2", "ended-1"]
    assert [row["is_over"] for row in rows] == [False, False, True, True]
    assert [span["span"] for span in rows[0]["spans"]] == ["queue"]
    assert (rows[0]["duration_s"], rows[0]["began_at_s"]) == (0.5, -0.5)


async def test_of_an_answer_to_several_prompts_the_requests_are_named() -> None:
    stage = Stage("p1", "d1")
    with stage.dispatcher.submit(RequestId("cmpl-X-0"), 0, work(), ArrivalQueue(1 << 20)):
        pass
    with stage.dispatcher.submit(RequestId("cmpl-X-1"), 1, work(), ArrivalQueue(1 << 20)):
        with pytest.raises(NotFoundError, match="several prompts") as found:
            handlers(stage).find("cmpl-X")
        assert "cmpl-X-0, cmpl-X-1" in found.value.todo
        assert handlers(stage).find("cmpl-X-1")["request"] == "cmpl-X-1"
        with pytest.raises(NotFoundError, match="is not known here"):
            handlers(stage).find("cmpl-Y")


def handlers(stage: Stage) -> TraceHandlers:
    return TraceHandlers("router-0", stage.dispatcher, stage.clock, lambda: 0.0)
