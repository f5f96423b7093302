"""Fences and order: each output index passes once, in order, and only from the current attempt."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from tandem.core.errors import CancelledError, WorkerLostError
from tandem.core.handoff import HandoffTiming, TokenLogprob
from tandem.core.ids import Attempt
from tandem.core.lifecycle import FinishReason
from tandem.router.dispatch.inflight_request import ArrivalQueue
from tests.unit.router.flying import chunk, flight, read

HANDOFF = ("ticket_wait_s", "sample_to_step_s", "last_wire_s", "step_rest_s")


def test_any_order_and_repetition_gives_the_same() -> None:
    rng = random.Random(1)
    for _ in range(200):
        inbox = ArrivalQueue(1 << 20)
        one = flight(inbox)
        chunks = [chunk(start, list(range(start, start + size))) for start, size in ((0, 1), (1, 3), (3, 2), (5, 4))]
        chunks += rng.sample(chunks, 2)
        chunks.append(chunk(9, [9], finish=FinishReason.LENGTH))
        rng.shuffle(chunks)
        for part in chunks:
            one.accept(part, 0.0)
        assert read(inbox) == list(range(10))
        assert one.is_finished


def test_other_attempts_and_choices_are_dropped() -> None:
    inbox = ArrivalQueue(1 << 20)
    one = flight(inbox, n=2)
    one.attempt = Attempt(2)
    assert one.accept(chunk(0, [5], attempt=1), 0.0) == "attempt"
    assert one.accept(chunk(0, [5], attempt=3), 0.0) == "attempt"
    assert one.accept(chunk(0, [5], attempt=2, choice=2), 0.0) == "choice"
    assert one.accept(chunk(0, [6], attempt=2, choice=1), 0.0) == ""
    assert one.accept(chunk(0, [6], attempt=2, choice=1), 0.0) == "duplicate"
    assert one.accept(chunk(3, [6], attempt=2, choice=1), 0.0) == ""
    assert read(inbox) == [6]


def test_nothing_after_the_end() -> None:
    inbox = ArrivalQueue(1 << 20)
    one = flight(inbox)
    one.accept(chunk(0, [1, 2], finish=FinishReason.STOP), 0.0)
    one.accept(chunk(2, [3]), 0.0)
    one.accept(chunk(0, [7, 8, 9]), 0.0)
    assert read(inbox) == [1, 2]
    assert one.is_finished


def test_end_without_tokens() -> None:
    inbox = ArrivalQueue(1 << 20)
    one = flight(inbox)
    one.accept(chunk(0, [1]), 0.0)
    one.accept(chunk(1, [], finish=FinishReason.LENGTH), 0.0)
    assert one.is_finished
    assert read(inbox) == [1]


def test_what_an_attempt_computes_again_counts_by_what_ended_the_one_before() -> None:
    one = flight(ArrivalQueue(1 << 20))
    one.work = replace(one.work, prompt=[1] * 100)
    one.begin_attempt("refused")  # nothing was computed yet
    one.accept(chunk(0, [5], attempt=2, cached_tokens=32), 1.0)
    assert one.recomputed == {}
    one.accept(chunk(1, [6, 7], attempt=2), 1.0)
    one.begin_attempt("lost")
    one.begin_attempt("transfer")  # before the next one sent anything
    one.accept(chunk(2, [8], attempt=3, cached_tokens=0), 2.0)
    assert one.recomputed == {}
    one.accept(chunk(3, [8], attempt=4, cached_tokens=96), 2.0)
    one.accept(chunk(4, [9], attempt=4, cached_tokens=96), 2.0)
    assert one.recomputed == {"transfer": 100 + 3 - 96}
    assert one.cached_tokens == 32


def test_logprobs_stay_with_their_tokens() -> None:
    inbox = ArrivalQueue(1 << 20)
    one = flight(inbox)
    one.accept(chunk(1, [11], logprobs=[TokenLogprob(token=11, logprob=-1)]), 0.0)
    one.accept(chunk(0, [10, 11], logprobs=[TokenLogprob(token=t, logprob=-1) for t in (10, 11)]), 0.0)

    async def run() -> list[int]:
        return [logprob.token for arrival in await inbox.take() for logprob in arrival.logprobs]

    assert asyncio.run(run()) == [10, 11]


def test_failure_comes_after_what_arrived_and_once() -> None:
    async def run() -> None:
        inbox = ArrivalQueue(1 << 20)
        flight(inbox).accept(chunk(0, [1]), 0.0)
        inbox.fail(WorkerLostError("lost"))
        inbox.fail(CancelledError("late"))
        assert [arrival.tokens for arrival in await inbox.take()] == [[1]]
        for _ in range(2):
            with pytest.raises(WorkerLostError):
                await inbox.take()

    asyncio.run(run())


def test_backlog_is_bounded() -> None:
    async def run() -> None:
        inbox = ArrivalQueue(10_000)
        one = flight(inbox)
        for index in range(100):
            one.accept(chunk(index, [1]), 0.0)
        with pytest.raises(CancelledError, match="too slowly"):
            await inbox.take()

    asyncio.run(run())


def test_a_further_attempt_counts_the_output_that_it_computes_again() -> None:
    one = flight(ArrivalQueue(1 << 20), n=2)
    assert one.job(0.0).prompt_tokens == 1
    one.accept(chunk(0, [5, 6, 7]), 0.0)
    one.accept(chunk(0, [8, 9], choice=1, finish=FinishReason.STOP), 0.0)
    assert one.job(0.0).prompt_tokens == 1, "nothing is computed again in the attempt that said it"
    one.begin_attempt()
    job = one.job(0.0)
    assert (job.prompt_tokens, job.max_tokens) == (1 + 3, 100 - 3), "the finished choice needs nothing"


def test_with_its_first_token_a_worker_says_when_it_began() -> None:
    one = flight(ArrivalQueue(1 << 20))
    one.mark("sent", 10.0)
    one.mark("prefill", 11.9)  # news that came with the token
    one.accept(chunk(0, [5], phase_s=1.5, cached_tokens=0), 12.0)
    one.accept(chunk(1, [6], phase_s=0.25, handoff=HandoffTiming(**dict.fromkeys(HANDOFF, 0.0))), 13.0)
    assert {moment.what: moment.at_s for moment in one.moments} == {
        "sent": 10.0, "prefill": 10.5, "first_token": 12.0, "decode": 12.75,
    }  # fmt: skip
    assert one.prefill_started_s == 10.5


def test_nobody_began_before_the_request_was_sent_nor_after_it_said_so() -> None:
    one = flight(ArrivalQueue(1 << 20))
    one.mark("sent", 10.0)
    one.accept(chunk(0, [5], phase_s=99.0, cached_tokens=0), 12.0)
    one.mark("decode", 12.5)
    one.accept(chunk(1, [6], phase_s=0.25, handoff=HandoffTiming(**dict.fromkeys(HANDOFF, 0.0))), 13.0)
    assert {moment.what: moment.at_s for moment in one.moments if moment.what in ("prefill", "decode")} == {
        "prefill": 10.0, "decode": 12.5,
    }  # fmt: skip
