"""The router's record for the planner: every request that came, and its outcome."""

from dataclasses import replace

from tandem.core.demand import DemandSample
from tandem.core.errors import WorkerLostError
from tandem.core.ids import RequestId
from tandem.core.state_enums import FinishReason
from tandem.router.admission.slo_classes import SloTerms
from tandem.router.dispatch.inflight_request import ArrivalQueue
from tandem.router.dispatch.traces import DemandBook
from tests.unit.router.stage import Stage, chunk, work


def asked(stage: Stage, within_s: float = 60.0) -> list[DemandSample]:
    dispatcher = stage.dispatcher
    return dispatcher.demand.asked(dispatcher.flights, dispatcher.traces, stage.clock.now_s(), within_s)


async def test_a_request_is_known_from_its_arrival_to_after_its_end() -> None:
    stage = Stage("p1", "d1")
    one, request = replace(work(n=1), terms=SloTerms(slo="chat")), RequestId("r")
    stage.dispatcher.demand.came(request, one, 99.0)
    came = DemandSample(age_s=1.0, prompt_tokens=3, slo="chat")
    assert asked(stage) == [came], "it waits in the router"
    with stage.dispatcher.submit(request, 0, one, ArrivalQueue(1 << 20)):
        stage.say("p1", chunk(0, 0, 10, cached_tokens=2))
        assert asked(stage) == [replace(came, output_tokens=1, cached_tokens=2)]
        stage.goes_on("d1", "r", 1)
        stage.say("d1", chunk(0, 1, 11, 12, finish=FinishReason.LENGTH))
    stage.clock.advance(4.0)
    ended = replace(came, age_s=5.0, output_tokens=3, cached_tokens=2, has_ended=True)
    assert asked(stage) == [ended]
    assert asked(stage, within_s=4.9) == []


async def test_tokens_of_choices_are_divided_and_who_got_none_has_not_ended() -> None:
    stage = Stage("p1", "d1")
    both, request = work(n=2), RequestId("r")
    stage.dispatcher.demand.came(request, both, 100.0)
    with stage.dispatcher.submit(request, 0, both, ArrivalQueue(1 << 20)):
        stage.say("p1", chunk(0, 0, 10), chunk(1, 0, 10))
        stage.say("d1", chunk(0, 1, 11))
        assert [(one.choices, one.output_tokens) for one in asked(stage)] == [(2, 2)]
    refused = RequestId("refused")
    stage.dispatcher.demand.came(refused, both, 100.0)
    with stage.dispatcher.submit(refused, 0, both, ArrivalQueue(1 << 20)) as flight:
        flight.inbox.fail(WorkerLostError("it is gone"))
    assert [(one.output_tokens, one.has_ended) for one in asked(stage)] == [(2, True), (0, False)]


def test_past_the_bound_the_oldest_is_forgotten() -> None:
    book = DemandBook(limit=3)
    for number in range(5):
        book.came(RequestId(str(number)), work(), float(number))
    book.came(RequestId("3"), work(), 7.0)
    stage = Stage()
    found = book.asked([], stage.dispatcher.traces, 10.0, 60.0)
    assert [one.age_s for one in found] == [8.0, 6.0, 3.0]
