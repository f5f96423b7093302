"""Cancelled choices, and log-probabilities of prompts, as a flight keeps them."""

from __future__ import annotations

from tandem.core.handoff import TokenLogprob
from tandem.core.ids import Attempt
from tandem.core.lifecycle import FinishReason
from tandem.router.dispatch.inflight_request import ArrivalQueue, InFlightRequest
from tandem.router.workers.proto_convert import PromptChunk
from tests.unit.router.flying import chunk, flight, read


def scores(position: int, tokens: list[int], attempt: int = 1) -> PromptChunk:
    logprobs = [TokenLogprob(token=token, logprob=-token / 8) for token in tokens]
    return PromptChunk(request="r", attempt=attempt, position=position, logprobs=logprobs)


def test_an_unwanted_choice_takes_nothing_more_and_is_done() -> None:
    inbox = ArrivalQueue(1 << 20)
    one = flight(inbox, n=2)
    one.accept(chunk(0, [5, 6]), 0.0)
    one.accept(chunk(3, [8]), 0.0)  # waits for what is before it
    one.end_choice(0)
    assert one.accept(chunk(2, [7], finish=FinishReason.LENGTH), 0.0) == "unwanted"
    assert not one.is_finished
    one.accept(chunk(0, [9], choice=1, finish=FinishReason.LENGTH), 0.0)
    assert one.is_finished
    assert read(inbox) == [5, 6, 9]
    assert one.orders[0].finish is FinishReason.STOP


def test_a_choice_that_ended_stays_as_it_ended() -> None:
    inbox = ArrivalQueue(1 << 20)
    one = flight(inbox)
    one.accept(chunk(0, [5], finish=FinishReason.LENGTH), 0.0)
    one.end_choice(0)
    assert (one.orders[0].finish, one.orders[0].is_unwanted) == (FinishReason.LENGTH, False)


def known(one: InFlightRequest) -> list[int]:
    return [logprob.token for logprob in one.prompt_logprobs]


def test_each_prompt_token_is_scored_once_whatever_comes_again() -> None:
    one = flight(ArrivalQueue(1 << 20))
    assert one.accept_prompt(scores(1, [11, 12])) == ""
    assert one.accept_prompt(scores(1, [11, 12])) == "duplicate"
    assert one.accept_prompt(scores(2, [12, 13])) == ""
    assert one.accept_prompt(scores(9, [19])) == "duplicate"  # behind a gap: nothing is known of it
    assert one.accept_prompt(scores(4, [14], attempt=2)) == "attempt"
    one.attempt = Attempt(2)
    assert one.accept_prompt(scores(1, [11, 12, 13, 14], attempt=2)) == ""
    assert known(one) == [11, 12, 13, 14]
