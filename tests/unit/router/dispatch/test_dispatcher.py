"""Failures that count, the contents of the next attempt, and messages that no longer count."""

import pytest

from tandem.core.config import Disaggregation
from tandem.core.errors import (
    InvalidRequestError,
    TandemError,
    TransferError,
    UnavailableError,
    WorkerLostError,
)
from tandem.core.ids import RequestId, WorkerId
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import FinishReason, Phase
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest
from tandem.router.routing.plan import Plan
from tandem.router.workers.proto_convert import ReportedLoad
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tests.unit.router.stage import Stage, chunk, work

ERROR = TransferError("the channel to the decode worker was lost")
R = RequestId("r")


def forced(submit: w.Submit) -> dict[int, tuple[list[int], int]]:
    return {state.choice: (list(state.tokens), state.finish) for state in submit.forced}


async def read(inbox: ArrivalQueue) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for arrival in await inbox.take():
        tokens.setdefault(arrival.choice, []).extend(arrival.tokens)
    return tokens


async def test_the_next_attempt_carries_what_the_client_has() -> None:
    stage, inbox = Stage("p1", "d1", "d2"), ArrivalQueue(1 << 20)
    with stage.dispatcher.submit(R, 0, work(), inbox) as flight:
        first, decode = stage.submitted("p1"), flight.plan.decode
        other = "d2" if decode == "d1" else "d1"
        assert [s.attempt for s in [*first, *stage.submitted(decode)]] == [1, 1]
        stage.say("p1", chunk(0, 0, 10), chunk(1, 0, 20))
        stage.say(decode, chunk(0, 1, 11), chunk(0, 3, 13), chunk(1, 1, 21, finish=FinishReason.STOP))
        stage.go(decode)
        assert (flight.attempt, stage.dispatcher.waiting) == (2, 1)
        stage.wake()
        for worker, leg in (("p1", w.LEG_PREFILL), (other, w.LEG_DECODE)):
            (submit,) = stage.submitted(worker)
            assert (submit.attempt, submit.leg) == (2, leg)
            assert forced(submit) == {
                0: ([10, 11], g.FINISH_REASON_UNSPECIFIED), 1: ([20, 21], g.FINISH_REASON_STOP)
            }  # fmt: skip
        stage.say("p1", chunk(0, 2, 99), chunk(0, 2, 12, attempt=2))
        assert flight.has_first_tokens
        assert not flight.is_handed_over
        stage.say(other, chunk(0, 3, 13, attempt=2, finish=FinishReason.LENGTH))
        assert flight.is_finished
        assert await read(inbox) == {0: [10, 11, 12, 13], 1: [20, 21]}
    assert stage.meter.counts["again lost"] == 1
    assert stage.meter.counts["dropped attempt"] == 1
    assert not stage.link("p1").requests
    assert not stage.link(other).requests


async def test_a_choice_that_met_a_stop_string_stays_ended() -> None:
    stage, inbox = Stage("p1", "d1", "d2"), ArrivalQueue(1 << 20)
    with stage.dispatcher.submit(R, 0, work(), inbox) as flight:
        decode = flight.plan.decode
        stage.say("p1", chunk(0, 0, 10), chunk(1, 0, 20))
        stage.say(decode, chunk(0, 1, 11), chunk(1, 1, 21))
        stage.dispatcher.end_choice(flight, 0)
        stage.go(decode)
        stage.wake()
        assert forced(stage.submitted("p1")[-1]) == {
            0: ([10, 11], g.FINISH_REASON_STOP), 1: ([20, 21], g.FINISH_REASON_UNSPECIFIED)
        }  # fmt: skip
        stage.go(flight.plan.decode)
        stage.dispatcher.end_choice(flight, 1)
        assert stage.dispatcher.waiting == 0, "nothing is left to do"


async def test_the_prompt_s_log_probabilities_are_asked_for_until_there_is_output() -> None:
    stage, inbox = Stage("p1", "d1", "d2"), ArrivalQueue(1 << 20)
    sampling = SamplingParams(max_tokens=9, prompt_logprobs=1)
    asked = GenerationRequest(prompt=[1, 2, 3], sampling=sampling, timeout_s=60.0)
    with stage.dispatcher.submit(R, 0, asked, inbox) as flight:
        for tokens in ((), (10,)):
            stage.say("p1", *(chunk(0, 0, token, attempt=flight.attempt) for token in tokens))
            stage.fail(flight.plan.decode, "r", flight.attempt, UnavailableError("no"))
            stage.wake()
        asks = [submit.sampling.HasField("prompt_logprobs") for submit in stage.submitted("p1")]
        assert asks == [True, True, False]


async def test_the_old_attempt_is_cancelled_where_it_lives_on() -> None:
    stage = Stage("p1", "p2", "d1", "d2")
    with stage.dispatcher.submit(R, 0, work(), ArrivalQueue(1 << 20)) as flight:
        prefill, decode = flight.plan.prefill, flight.plan.decode
        assert prefill is not None
        for worker in ("p1", "p2", "d1", "d2"):
            stage.sent(worker)
        stage.fail(prefill, "r", 1, ERROR)
        (cancel,) = [message.cancel for message in stage.sent(decode)]
        assert (cancel.request, cancel.attempt) == ("r", 1)
        stage.wake()
        assert flight.plan.decode != decode, "the sender says that its receiver is gone"
        stage.fail(prefill, "r", 1, ERROR)
        assert flight.attempt == 2, "a failure of an attempt that is over"


@pytest.mark.parametrize("is_lost", [False, True])
async def test_the_prefill_worker_may_fail_once_the_decode_worker_goes_on(is_lost: bool) -> None:
    stage, inbox = Stage("p1", "d1"), ArrivalQueue(1 << 20)
    with stage.dispatcher.submit(R, 0, work(), inbox) as flight:
        stage.say("p1", chunk(0, 0, 10), chunk(1, 0, 20))
        stage.goes_on("d1", "r", 1)
        _end(stage, "p1", is_lost=is_lost)
        assert (inbox.error, flight.phase, flight.attempt) == (None, Phase.DECODE, 1)
        assert set(flight.legs) == {"d1"}
        _end(stage, "d1", is_lost=is_lost)
        assert flight.attempt == 2


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize(("first_tokens", "is_admitted"), [(2, False), (1, True), (0, True)])
async def test_before_that_its_failure_ends_the_attempt(first_tokens: int, is_admitted: bool, is_lost: bool) -> None:
    stage, inbox = Stage("p1", "p2", "d1"), ArrivalQueue(1 << 20)
    with stage.dispatcher.submit(R, 0, work(), inbox) as flight:
        prefill = flight.plan.prefill
        assert prefill is not None
        stage.say(prefill, *[chunk(choice, 0, 7) for choice in range(first_tokens)])
        if is_admitted:
            stage.goes_on("d1", "r", 1)
        _end(stage, prefill, is_lost=is_lost)
        assert (inbox.error, flight.attempt, flight.legs) == (None, 2, {})


def _end(stage: Stage, worker: str, *, is_lost: bool) -> None:
    if is_lost:
        stage.go(worker)
    else:
        stage.fail(worker, "r", 1, ERROR)


async def test_the_request_s_own_fault_reaches_the_client_at_once() -> None:
    stage, inbox = Stage("p1", "p2", "d1", "d2"), ArrivalQueue(1 << 20)
    with stage.dispatcher.submit(R, 0, work(), inbox) as flight:
        stage.fail(flight.plan.decode, "r", 1, InvalidRequestError("no"))
        assert isinstance(inbox.error, InvalidRequestError)
        assert (flight.attempt, flight.phase, stage.dispatcher.waiting) == (1, Phase.FAILED, 0)


async def test_a_planned_request_is_tried_there_alone() -> None:
    stage, inbox = Stage("p1", "p2", "d1", "d2"), ArrivalQueue(1 << 20)
    plan = Plan(decode=WorkerId("d1"), prefill=WorkerId("p1"), reason="probe")
    with stage.dispatcher.submit(R, 0, work(), inbox, plan):
        stage.go("d1")
        assert isinstance(inbox.error, WorkerLostError)
    with pytest.raises(UnavailableError), stage.dispatcher.submit(R, 0, work(), inbox, plan):
        pass


async def test_attempts_are_bounded_and_the_last_failure_is_told() -> None:
    stage, inbox = Stage("p1", "p2", "d1", "d2", max_attempts=3), ArrivalQueue(1 << 20)
    with stage.dispatcher.submit(R, 0, work(), inbox) as flight:
        for attempt in (1, 2, 3):
            assert inbox.error is None
            stage.fail(flight.plan.decode, "r", attempt, UnavailableError(f"refusal {attempt}"))
            stage.wake()
        assert inbox.error is not None
        assert "refusal 3" in inbox.error.message
    assert stage.meter.counts["again refused"] == 2
    assert stage.meter.counts["gave up attempts"] == 1


async def test_an_empty_budget_ends_it() -> None:
    stage = Stage("p1", "d1", "d2", retry_burst=1, retry_ratio=0.0, retry_per_s=0.0)
    inboxes = [ArrivalQueue(1 << 20) for _ in range(2)]
    a = stage.dispatcher.submit(RequestId("a"), 0, work(), inboxes[0])
    with a, stage.dispatcher.submit(RequestId("b"), 0, work(), inboxes[1]):
        stage.go("p1")
        assert sum(inbox.error is not None for inbox in inboxes) == 1
    assert stage.meter.counts["gave up budget"] == 1


@pytest.mark.parametrize("is_alone", [False, True])
async def test_a_worker_that_was_tried_again_has_proven_itself_with_a_token_of_its_own(is_alone: bool) -> None:
    mode = Disaggregation.NEVER if is_alone else Disaggregation.ALWAYS
    stage = Stage("p1", "d1", breaker_failures=1, breaker_open_s=5.0, disaggregation=mode)
    breakers, link = stage.retry_policy.breakers, stage.link("d1")
    member = (link.worker, link.where.incarnation)
    breakers.failed(member)
    stage.clock.advance(6.0)
    with stage.dispatcher.submit(R, 0, work(n=1), ArrivalQueue(1 << 20)):
        assert not breakers.allows(member), "one request tries it out"
        if is_alone:
            stage.goes_on("d1", "r", 1)  # it may report so before it has a token
            stage.say("d1", chunk(0, 0, 10))
        else:
            stage.say("p1", chunk(0, 0, 10))
            assert not breakers.allows(member)
            stage.say("d1", chunk(0, 1, 11))
        assert breakers.allows(member)


async def test_it_waits_for_a_worker_that_was_lost() -> None:
    stage, inbox = Stage("p1", "d1"), ArrivalQueue(1 << 20)
    with stage.dispatcher.submit(R, 0, work(), inbox) as flight:
        stage.say("p1", chunk(0, 0, 10))
        stage.go("d1")
        stage.wake()
        assert (stage.dispatcher.waiting, inbox.error) == (1, None)
        stage.come("d1")
        (submit,) = stage.submitted("d1")
        assert (submit.attempt, forced(submit)) == (2, {0: ([10], 0)})
        assert stage.dispatcher.waiting == 0
        stage.go("d1")
        for _ in range(12):
            stage.wake()
        assert isinstance(inbox.error, WorkerLostError)
        assert flight.phase is Phase.FAILED
    assert stage.meter.counts["gave up no_worker"] == 1


async def test_a_new_request_waits_too_and_one_that_is_cancelled_no_longer() -> None:
    stage, inbox = Stage("p1", "d1"), ArrivalQueue(1 << 20)
    stage.go("d1")
    with stage.dispatcher.submit(R, 0, work(), inbox):
        assert stage.dispatcher.waiting == 1
    assert stage.dispatcher.waiting == 0
    stage.come("d1")
    assert stage.submitted("d1") == []
    stage.clock.advance(60)
    stage.go("d1")
    stage.clock.advance(60)
    with pytest.raises(TandemError, match="no decode worker"), stage.dispatcher.submit(R, 0, work(), inbox):
        pass


async def test_what_is_left_of_the_deadline_goes_with_every_attempt() -> None:
    stage, inbox = Stage("p1", "d1", "d2"), ArrivalQueue(1 << 20)
    with stage.dispatcher.submit(R, 0, work(timeout_s=60.0), inbox) as flight:
        assert stage.submitted(flight.plan.decode)[0].timeout_s == pytest.approx(60.0)
        stage.clock.advance(20.0)
        stage.go(flight.plan.decode)
        stage.wake()
        assert stage.submitted(flight.plan.decode)[0].timeout_s == pytest.approx(39.0)


async def test_nothing_is_tried_again_for_a_client_that_is_gone() -> None:
    stage, inbox = Stage("p1", "d1", "d2"), ArrivalQueue(1 << 20)
    with stage.dispatcher.submit(R, 0, work(), inbox) as flight:
        inbox.fail(WorkerLostError("somebody else of this answer"))
        stage.go(flight.plan.decode)
        assert (flight.attempt, stage.dispatcher.waiting) == (1, 0)


async def test_a_decode_worker_that_says_nothing_is_left_if_there_is_another() -> None:
    stage, inbox = Stage("p1", "d1", stall_s=30.0), ArrivalQueue(1 << 20)
    with stage.dispatcher.submit(R, 0, work(), inbox) as flight:
        stage.say("p1", chunk(0, 0, 10), chunk(1, 0, 20))
        stage.clock.advance(29.0)
        stage.say("d1", chunk(0, 1, 11))
        stage.clock.advance(29.0)
        stage.dispatcher.sweep()
        assert flight.attempt == 1, "it went on less than 30 s ago"
        stage.clock.advance(1.0)
        stage.dispatcher.sweep()
        assert flight.attempt == 1, "there is nobody else"
        stage.come("d2")
        stage.clock.advance(30.0)
        stage.dispatcher.sweep()
        assert flight.attempt == 2
        stage.wake()
        assert flight.plan.decode == "d2"
        assert forced(stage.submitted("d2")[0])[0] == ([10, 11], 0)
    assert stage.meter.counts["again stalled"] == 1


async def test_a_prefill_worker_may_take_its_time_while_it_has_something_to_do() -> None:
    stage = Stage("p1", "p2", "d1", stall_s=30.0)
    with stage.dispatcher.submit(R, 0, work(), ArrivalQueue(1 << 20)) as flight:
        first = flight.plan.prefill
        assert first is not None
        stage.link(first).load = ReportedLoad(in_flight=1)
        stage.clock.advance(100.0)
        stage.dispatcher.sweep()
        assert flight.attempt == 1
        stage.link(first).load = ReportedLoad(in_flight=0)
        stage.dispatcher.sweep()
        stage.wake()
        assert (flight.attempt, flight.plan.prefill == first) == (2, False)


async def test_what_crosses_is_what_the_pair_has_to_move_in_the_form_in_which_it_moves() -> None:
    """A decode worker may hold less of the prompt as exact blocks than of those that this prefill worker would send."""
    stage, pair = Stage("p1", "d1"), Plan(decode=WorkerId("d1"), prefill=WorkerId("p1"), reason="", decode_hit_tokens=2)
    with stage.dispatcher.submit(R, 0, work(), ArrivalQueue(1 << 20), pair):
        stage.say("p1", chunk(0, 0, 10))
        assert [stage.link(worker).outstanding.tokens_in_transfer for worker in ("p1", "d1")] == [1, 1]
    assert [stage.link(worker).outstanding.tokens_in_transfer for worker in ("p1", "d1")] == [0, 0]
