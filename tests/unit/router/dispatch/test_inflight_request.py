"""Test the record of a request in flight, its ends and submissions."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tandem.core.block_hash import BlockHash, HashRoot, chain
from tandem.core.errors import CancelledError, WorkerLostError
from tandem.core.handoff import HandoffTiming, TokenLogprob
from tandem.core.ids import Attempt, RequestId, WorkerId
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import FinishReason, RoleName
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest, InFlightRequest
from tandem.router.workers.prefix_lookup import PrefixFinder
from tandem.router.workers.proto_convert import BlockCounts, PromptChunk, ReportedLoad
from tests.unit.router.facts import facts
from tests.unit.router.flying import chunk, flight, read
from tests.unit.router.stage import Stage

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


async def test_failure_comes_after_what_arrived_and_once() -> None:
    inbox = ArrivalQueue(1 << 20)
    flight(inbox).accept(chunk(0, [1]), 0.0)
    inbox.fail(WorkerLostError("lost"))
    inbox.fail(CancelledError("late"))
    assert [arrival.tokens for arrival in await inbox.take()] == [[1]]
    for _ in range(2):
        with pytest.raises(WorkerLostError):
            await inbox.take()


async def test_backlog_is_bounded() -> None:
    inbox = ArrivalQueue(10_000)
    one = flight(inbox)
    for index in range(100):
        one.accept(chunk(index, [1]), 0.0)
    with pytest.raises(CancelledError, match="too slowly"):
        await inbox.take()


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


PROMPT = list(range(160))
BLOCKS = BlockCounts(group=0, total=100, free=100, cached=0, request=0, pushing=0, reserved=0)


class Held:
    """An index in which d1 holds so many leading blocks of PROMPT, by HashRoot.lossy."""

    def __init__(self, **blocks: int) -> None:
        self._depths: dict[BlockHash, int] = {}
        for lossy, count in blocks.items():
            root = HashRoot(fingerprint="f", block_tokens=16, lossy=lossy).digest()
            self._depths |= {block: depth for depth, block in enumerate(chain(root, PROMPT, 16)[:count], start=1)}

    def lookup(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        return {WorkerId("d1"): max((self._depths.get(block, 0) for block in hashes), default=0)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("exact", "converted"), [(7, 0), (0, 6), (7, 6), (0, 0)])
async def test_a_pair_s_decode_worker_reserves_what_it_lacks_in_the_form_in_which_the_pair_moves_blocks(
    dtype: str, exact: int, converted: int
) -> None:
    index = Held(**{"": exact, "float32>bfloat16": converted})
    stage = Stage("p1", "d1", finder=lambda clock: PrefixFinder(index, b""))
    stage.link("p1").facts = facts("p1", RoleName.PREFILL, incarnation=1)
    link = stage.link("d1")
    link.facts, link.load = facts("d1", RoleName.DECODE, dtype=dtype, incarnation=2), ReportedLoad(blocks=(BLOCKS,))
    asked = GenerationRequest(prompt=PROMPT, sampling=SamplingParams(max_tokens=9), timeout_s=60.0)
    with stage.dispatcher.submit(RequestId("r"), 0, asked, ArrivalQueue(1 << 20)) as flight:
        held = exact if dtype == "float32" else converted
        assert flight.plan.prefill == "p1"
        assert flight.plan.decode_hit_tokens == 16 * held
        (sent,) = link.outstanding.uncounted(stage.clock.now_s())
        assert sent.blocks == 10 - held + 1, "what it lacks, and one for the answer"
        (decode,) = [one for one in stage.table.candidates() if one.worker == "d1"]
        assert decode.free_blocks == 100 - sent.blocks
