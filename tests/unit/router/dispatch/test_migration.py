"""Workers that drain: nothing new is planned there, and sequences handed back go on elsewhere, if a worker can."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from tandem.core.ids import RequestId
from tandem.core.lifecycle import WorkerState
from tandem.router.dispatch.inflight_request import ArrivalQueue
from tandem.router.dispatch.migration import MigrationQueue
from tandem.router.workers.connection import WorkerLink
from tandem.rpc.v1 import worker_pb2 as w
from tests.unit.router.stage import Stage, chunk, in_loop, work
from tools.waiting import wait_for_async

R = RequestId("r")


def tell(stage: Stage, worker: str, state: WorkerState, *, hands_back: bool = False, sequence: int = 1) -> None:
    """The worker reports so over its stream."""
    said = w.WorkerState(sequence=sequence, state=state.value, hands_back=hands_back)
    stage.link(worker)._hear(w.WorkerMessage(state=said))


def kinds(messages: list[w.RouterMessage]) -> list[str | None]:
    return [message.WhichOneof("kind") for message in messages]


@in_loop
async def test_nothing_is_planned_on_a_worker_that_drains_until_it_is_ready_again() -> None:
    stage = Stage("p1", "d1", "d2")
    tell(stage, "d1", WorkerState.DRAINING)
    for number in range(4):
        with stage.dispatcher.submit(RequestId(f"r{number}"), 0, work(), ArrivalQueue(1 << 20)) as flight:
            assert flight.plan.decode == "d2"
    assert [link.worker for link in stage.table.usable()] == ["p1", "d2"]
    tell(stage, "d1", WorkerState.DRAINED)
    assert [link.worker for link in stage.table.usable()] == ["p1", "d2"]
    tell(stage, "d1", WorkerState.READY)
    assert [link.worker for link in stage.table.usable()] == ["p1", "d1", "d2"]


@in_loop
async def test_nothing_is_planned_on_a_worker_whose_step_does_not_end_and_what_it_has_stays() -> None:
    stage = Stage("p1", "d1", "d2")
    with stage.dispatcher.submit(R, 0, work(), ArrivalQueue(1 << 20)) as flight:
        decode = flight.plan.decode
        assert decode is not None
        other = "d2" if decode == "d1" else "d1"
        stage.sent(decode)
        tell(stage, decode, WorkerState.STALLED, sequence=0)
        assert [link.worker for link in stage.table.usable()] == ["p1", other]
        assert stage.sent(decode) == [], "it is neither cancelled nor handed back"
        tell(stage, decode, WorkerState.READY, sequence=0)
        assert [link.worker for link in stage.table.usable()] == ["p1", "d1", "d2"]


@in_loop
async def test_a_state_is_acknowledged_behind_what_was_sent_before() -> None:
    stage = Stage("p1", "d1")
    with stage.dispatcher.submit(R, 0, work(), ArrivalQueue(1 << 20)):
        tell(stage, "d1", WorkerState.DRAINING, sequence=7)
        messages = stage.sent("d1")
        assert kinds(messages) == ["submit", "state_heard"]
        assert messages[1].state_heard.sequence == 7


@in_loop
async def test_a_request_stays_where_it_is_while_its_worker_drains() -> None:
    stage = Stage("p1", "d1", "d2")
    with stage.dispatcher.submit(R, 0, work(), ArrivalQueue(1 << 20)) as flight:
        decode = flight.plan.decode
        stage.say("p1", chunk(0, 0, 10), chunk(1, 0, 20))
        stage.goes_on(decode, "r", 1)
        stage.sent(decode)
        tell(stage, decode, WorkerState.DRAINING)
        stage.dispatcher.sweep()
        assert (flight.attempt, flight.plan.decode) == (1, decode)
        assert kinds(stage.sent(decode)) == ["state_heard"]


@in_loop
async def test_a_sequence_that_is_handed_back_goes_on_from_the_blocks_that_are_there() -> None:
    stage = Stage("p1", "d1", "d2")
    with stage.dispatcher.submit(R, 0, work(n=1), ArrivalQueue(1 << 20)) as flight:
        first = flight.plan.decode
        other = "d2" if first == "d1" else "d1"
        stage.say("p1", chunk(0, 0, 10))
        stage.goes_on(first, "r", 1)
        stage.say(first, chunk(0, 1, 11))
        for worker in ("p1", "d1", "d2"):
            stage.sent(worker)
        tokens = stage.retry_policy.budget.tokens
        tell(stage, first, WorkerState.DRAINING, hands_back=True)
        assert flight.attempt == 2
        assert (flight.history.failures, flight.history.suspects) == (0, set())
        assert stage.retry_policy.budget.tokens == tokens
        assert kinds(stage.sent(first)) == ["state_heard", "cancel"]
        assert stage.sent("p1") == []
        (submit,) = stage.submitted(other)
        assert (submit.leg, submit.attempt) == (w.LEG_FULL, 2)
        assert [list(state.tokens) for state in submit.forced] == [[10, 11]]
        ((source, tokens_there),) = [(source.worker.worker, source.tokens) for source in submit.sources]
        assert (source, tokens_there) == (first, 3 + 2)
        stage.say(first, chunk(0, 2, 12))
        stage.say(other, chunk(0, 2, 12, attempt=2))
        assert flight.output_tokens == 3
    assert stage.meter.counts["again moved"] == 1
    assert stage.meter.counts["dropped unknown"] == 1


@in_loop
async def test_a_machine_on_which_it_was_lost_after_a_move_is_remembered() -> None:
    stage = Stage("p1", "d1", "d2")
    with stage.dispatcher.submit(R, 0, work(n=1), ArrivalQueue(1 << 20)) as flight:
        first = flight.plan.decode
        other = "d2" if first == "d1" else "d1"
        stage.say("p1", chunk(0, 0, 10))
        stage.goes_on(first, "r", 1)
        stage.say(first, chunk(0, 1, 11))
        tell(stage, first, WorkerState.DRAINING, hands_back=True)
        assert flight.plan.workers == (other,)
        stage.go(other)
        assert flight.history.lost_on == {"here": 1}


@in_loop
async def test_of_several_choices_the_prompt_is_fetched() -> None:
    stage = Stage("p1", "d1", "d2")
    with stage.dispatcher.submit(R, 0, work(n=2), ArrivalQueue(1 << 20)) as flight:
        first = flight.plan.decode
        stage.say("p1", chunk(0, 0, 10), chunk(1, 0, 20))
        stage.goes_on(first, "r", 1)
        tell(stage, first, WorkerState.DRAINING, hands_back=True)
        (submit,) = [s for s in stage.submitted("d2" if first == "d1" else "d1") if s.attempt == 2]
        assert [source.tokens for source in submit.sources] == [3]
        assert flight.attempt == 2


@in_loop
async def test_where_nobody_can_take_it_it_goes_on_where_it_is_until_somebody_comes() -> None:
    stage = Stage("p1", "d1")
    with stage.dispatcher.submit(R, 0, work(n=1), ArrivalQueue(1 << 20)) as flight:
        stage.say("p1", chunk(0, 0, 10))
        stage.goes_on("d1", "r", 1)
        tell(stage, "d1", WorkerState.DRAINING, hands_back=True)
        stage.dispatcher.sweep()
        stage.say("d1", chunk(0, 1, 11))
        assert (flight.attempt, flight.output_tokens, flight.inbox.error) == (1, 2, None)
        stage.come("d2")
        stage.dispatcher.sweep()
        assert (flight.attempt, flight.plan.decode) == (2, "d2")


@in_loop
async def test_a_prompt_that_is_handed_back_is_planned_anew_with_what_was_computed_of_it() -> None:
    stage = Stage("p1", "p2", "d1")
    with stage.dispatcher.submit(R, 0, work(n=1), ArrivalQueue(1 << 20)) as flight:
        first = flight.plan.prefill
        assert first is not None
        other = "p2" if first == "p1" else "p1"
        for worker in ("p1", "p2", "d1"):
            stage.sent(worker)
        tell(stage, first, WorkerState.DRAINING, hands_back=True)
        assert (flight.attempt, flight.plan.prefill, flight.plan.decode) == (2, other, "d1")
        (submit,) = stage.submitted(other)
        assert [(source.worker.worker, source.tokens) for source in submit.sources] == [(first, 3)]


@in_loop
async def test_what_waited_for_a_worker_goes_on_when_one_is_ready_again() -> None:
    stage = Stage("p1", "d1", "d2", worker_wait_s=30.0)
    tell(stage, "d2", WorkerState.DRAINING)
    stage.go("d1")
    with stage.dispatcher.submit(R, 0, work(), ArrivalQueue(1 << 20)) as flight:
        assert stage.dispatcher.waiting == 1
        tell(stage, "d2", WorkerState.READY)
        assert (stage.dispatcher.waiting, flight.plan.decode) == (0, "d2")


@in_loop
async def test_a_move_that_breaks_does_not_stop_the_others() -> None:
    """Sequences that are still there are shown again at the next look."""
    stage, requests = Stage("p1", "d1"), {RequestId(f"r{number}") for number in range(3)}
    shown: list[RequestId] = []
    broken: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))

    def move(link: WorkerLink, request: RequestId) -> None:
        shown.append(request)
        if len(shown) == 2:
            raise RuntimeError("a bug")

    with ExitStack() as flights:
        for request in requests:
            flights.enter_context(stage.dispatcher.submit(request, 0, work(n=1), ArrivalQueue(1 << 20)))
        tell(stage, "d1", WorkerState.DRAINING, hands_back=True)
        handed_back = MigrationQueue(move, spacing_s=0.0)
        handed_back.add(stage.link("d1"))
        await wait_for_async(lambda: bool(broken))
        handed_back.look_again([stage.link("d1")])
        await wait_for_async(lambda: set(shown[2:]) == requests)
