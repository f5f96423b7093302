"""The charge of an answer to its tenant, and its time limit, by how it ended."""

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Histogram

from tandem.core.config import AdmissionSection, BudgetSection, Disaggregation
from tandem.core.errors import CancelledError, DeadlineError, TandemError, UnavailableError, WorkerLostError
from tandem.core.handoff import HandoffTiming
from tandem.core.ids import RequestId
from tandem.core.metric_names import RECOMPUTED_TOKENS
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import FinishReason, Phase
from tandem.router.admission.admission_controller import ANSWER_TOKENS, AdmissionController
from tandem.router.admission.slo_classes import SloTerms
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.metrics.router import Metrics
from tandem.router.serving.response_stream import ResponseFactory, ResponseStream
from tandem.router.tenancy.budgets import Budgets
from tandem.router.tokenization.detokenizer import ByteDetokenizer
from tandem.statestore.stores.budgets import Charge
from tests.unit.router.stage import Stage, chunk

PROMPT_TOKENS = 500
CHARGED = PROMPT_TOKENS + ANSWER_TOKENS


class Books:
    """Keeps what is settled."""

    def __init__(self) -> None:
        self.charges: list[Charge] = []

    async def spend(self, tenant: str, budget: BudgetSection, charge: Charge) -> float:
        self.charges.append(charge)
        return 0.0


class Desk:
    """Answers of a stage with workers that may be away."""

    def __init__(self, stage: Stage, *, has_room: bool = True) -> None:
        self.stage, self.books = stage, Books()
        metrics, rules = Metrics(list, lambda: 0), AdmissionSection()
        self.metrics = metrics
        budget = BudgetSection(requests_per_minute=60)
        self._budgets = Budgets({"*": budget}, self.books, stage.clock, lambda reason: None)
        self.admission = AdmissionController(rules, stage.clock, lambda model, need: has_room, metrics)
        self._response_factory = ResponseFactory(
            stage.dispatcher, self.admission, self._budgets, metrics, stage.clock, backlog_bytes=1 << 20
        )

    def open(self, works: int = 1, received_s: float = 100.0, *, is_background: bool = False) -> ResponseStream:
        tokenizer: Any = SimpleNamespace(detokenizer=lambda: ByteDetokenizer(lambda token: b"x"))
        work = GenerationRequest(
            api="chat", served_model="m", prompt=[1] * PROMPT_TOKENS, sampling=SamplingParams(max_tokens=200),
            timeout_s=60.0, terms=SloTerms(is_background=is_background), arrived_s=received_s,
        )  # fmt: skip
        return self._response_factory.open(RequestId("r"), [work] * works, tokenizer)

    async def settled(self) -> list[Charge]:
        await self._budgets.flush()
        return self.books.charges


async def end(answer: ResponseStream, error: TandemError) -> None:
    answer.cancel(error)
    with pytest.raises(type(error)):
        await answer.next()


async def test_who_waited_for_workers_that_did_not_come_gets_everything_back() -> None:
    stage = Stage("p1", "d1", worker_wait_s=10.0)
    stage.go("p1")
    stage.go("d1")
    response_factory = Desk(stage)
    with response_factory.open() as answer:
        stage.clock.advance(11.0)
        stage.wake()
        with pytest.raises(UnavailableError):
            await answer.next()
    assert await response_factory.settled() == [Charge(requests=-1, tokens=-CHARGED, is_asked=False)]


async def test_who_was_sent_off_in_vain_gets_everything_back() -> None:
    response_factory = Desk(Stage("p1", "d1"))
    with response_factory.open() as answer:
        await end(answer, WorkerLostError("it is gone"))
    assert await response_factory.settled() == [Charge(requests=-1, tokens=-CHARGED, is_asked=False)]


async def test_who_got_something_pays_for_what_it_got() -> None:
    stage = Stage("p1", "d1")
    response_factory = Desk(stage)
    with response_factory.open() as answer:
        stage.say("p1", chunk(0, 0, 10))
        assert [update.text for update in await answer.next() or ()] == ["x"]
        await end(answer, WorkerLostError("it is gone"))
    assert await response_factory.settled() == [Charge(requests=0, tokens=PROMPT_TOKENS + 1 - CHARGED, is_asked=False)]


async def test_who_follows_is_called_once_for_what_came_in_a_turn_until_it_will_not() -> None:
    stage, shown = Stage("p1", "d1"), []
    with Desk(stage).open() as answer:

        def show() -> bool:
            shown.append([len(update.tokens) for update in answer.next_now()])
            return len(shown) < 2

        stage.say("p1", chunk(0, 0, 10))
        following = asyncio.create_task(answer.follow(show))
        await asyncio.sleep(0.01)
        assert shown == [[1]], "what had come before is shown, too"
        stage.say("d1", chunk(0, 1, 11), chunk(0, 2, 12))
        await asyncio.wait_for(following, 5.0)
        stage.say("d1", chunk(0, 3, 13))
        assert [update.tokens for update in await answer.next() or ()] == [[13]]
    assert shown == [[1], [2]]


async def test_who_follows_hears_of_the_failure_behind_what_came() -> None:
    stage, shown = Stage("p1", "d1"), [""]
    with Desk(stage).open() as answer:

        def show() -> bool:
            shown.extend(update.text for update in answer.next_now())
            return True

        stage.say("p1", chunk(0, 0, 10))
        answer._inbox.fail(WorkerLostError("it is gone"))
        with pytest.raises(WorkerLostError):
            await answer.follow(show)
        assert shown == ["", "x"]


@pytest.mark.parametrize("error", [CancelledError("the client left"), DeadlineError("its time is over")])
async def test_who_ends_it_by_itself_pays_for_the_prompt(error: TandemError) -> None:
    response_factory = Desk(Stage("p1", "d1"))
    with response_factory.open() as answer:
        await end(answer, error)
    assert await response_factory.settled() == [Charge(requests=0, tokens=PROMPT_TOKENS - CHARGED, is_asked=False)]


async def test_a_failed_stream_is_freed_without_a_collection() -> None:
    """Frames of its failure would hold the stream, and the stream the failure."""
    response_factory = Desk(Stage("p1", "d1"))
    gc.collect()
    gc.disable()
    try:
        answer = response_factory.open()
        with answer:
            await end(answer, WorkerLostError("it is gone"))
        gone = weakref.ref(answer._inbox)
        del answer
        assert gone() is None
    finally:
        gc.enable()


async def test_a_second_prompt_that_nobody_takes_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage("p1", "d1")
    response_factory, submit = Desk(stage), stage.dispatcher.submit
    flown: list[Any] = []

    def once(*arguments: Any, **more: Any) -> Any:
        if flown:
            raise UnavailableError("no worker")
        flown.append(arguments)
        return submit(*arguments, **more)

    monkeypatch.setattr(stage.dispatcher, "submit", once)
    with pytest.raises(UnavailableError), response_factory.open(works=2):
        pass
    assert await response_factory.settled() == [Charge(requests=-1, tokens=-2 * CHARGED, is_asked=False)]


async def test_its_time_runs_from_its_arrival() -> None:
    stage = Stage("p1", "d1")
    stage.clock.advance(20.0)
    with Desk(stage).open(received_s=105.0):
        (submit,) = stage.submitted("d1")
        assert submit.timeout_s == pytest.approx(45.0)


async def test_who_is_of_a_batch_waits_in_no_queue_and_is_in_no_budget() -> None:
    stage = Stage("p1", "d1")
    response_factory = Desk(stage, has_room=False)
    with response_factory.open(is_background=True) as answer, response_factory.open():
        (flight,) = stage.dispatcher.flights
        assert flight.is_background
        assert response_factory.admission.waiting == 1, "the other one, for which a client waits"
        await end(answer, CancelledError("the batch yields"))
    assert len(await response_factory.settled()) == 1


@pytest.mark.parametrize(("is_background", "count"), [(True, 0), (False, 1)])
async def test_the_planner_hears_of_what_clients_wait_for_and_not_of_batches(is_background: bool, count: int) -> None:
    stage = Stage("p1", "d1")
    dispatcher = stage.dispatcher
    with Desk(stage).open(is_background=is_background):
        assert len(dispatcher.flights) == 1
        asked = dispatcher.demand.asked(dispatcher.flights, dispatcher.traces, stage.clock.now_s(), 60.0)
        assert len(asked) == count


async def test_every_phase_of_a_request_that_crosses_is_measured() -> None:
    stage = Stage("p1", "d1")
    response_factory, handoff = (
        Desk(stage),
        HandoffTiming(ticket_wait_s=0, sample_to_step_s=0.5, last_wire_s=0, step_rest_s=0),
    )
    with response_factory.open() as answer:
        stage.clock.advance(1.0)
        stage.dispatcher.on_phase(stage.link("p1"), "r", 1, Phase.PREFILL)
        stage.clock.advance(2.0)
        stage.say("p1", chunk(0, 0, 10, cached_tokens=0))
        stage.clock.advance(3.0)
        stage.goes_on("d1", "r", 1)
        stage.say("d1", chunk(0, 1, 11, handoff=handoff))
        stage.clock.advance(4.0)
        stage.say("d1", chunk(0, 2, 12, finish=FinishReason.LENGTH))
        while await answer.next() is not None:
            pass
    names = ("queue", "prefill", "transfer", "decode")
    assert {name: sums(getattr(response_factory.metrics.of(""), name)) for name in names} == {
        "queue": (1, 1.0), "prefill": (1, 2.0), "transfer": (1, 0.5), "decode": (1, 7.0)
    }  # fmt: skip


async def test_a_request_of_a_batch_is_in_no_histogram_of_phases() -> None:
    stage = Stage("m1", disaggregation=Disaggregation.NEVER)
    response_factory = Desk(stage)
    with response_factory.open(is_background=True) as answer:
        stage.dispatcher.on_phase(stage.link("m1"), "r", 1, Phase.PREFILL)
        stage.say("m1", chunk(0, 0, 10, 11, cached_tokens=0, finish=FinishReason.LENGTH))
        while await answer.next() is not None:
            pass
    measured = response_factory.metrics.of("")
    assert [sums(one)[0] for one in (measured.queue, measured.prefill, measured.decode)] == [0, 0, 0]


async def test_what_was_computed_again_is_counted_with_its_cause() -> None:
    stage = Stage("m1", "m2", disaggregation=Disaggregation.NEVER)
    response_factory = Desk(stage)
    with response_factory.open() as answer:
        (flight,) = stage.dispatcher.flights
        first = flight.plan.decode
        stage.say(first, chunk(0, 0, 10, 11, cached_tokens=0))
        stage.go(first)
        stage.wake()
        stage.say(flight.plan.decode, chunk(0, 2, 12, attempt=2, cached_tokens=96, finish=FinishReason.LENGTH))
        while await answer.next() is not None:
            pass
    text = response_factory.metrics.render().decode()
    assert f'{RECOMPUTED_TOKENS}{{cause="lost"}} {PROMPT_TOKENS + 2 - 96:.1f}' in text


def sums(histogram: Histogram) -> tuple[float, float]:
    """Return the number of observations, and their sum."""
    values = {sample.name: sample.value for family in histogram.collect() for sample in family.samples}
    (count,) = (value for name, value in values.items() if name.endswith("_count"))
    (total,) = (value for name, value in values.items() if name.endswith("_sum"))
    return count, total
