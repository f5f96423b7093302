"""Playing the last minutes again: cases computed by hand, and what must hold of any requests."""

import dataclasses
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.controlplane.planner.records import Forecast, ObservedRequest, Rates, RoleSplit
from tandem.controlplane.planner.split_forecast import forecast
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.planner_rates import calibrated
from tandem.controlplane.simulator.simulator import Simulator
from tandem.controlplane.simulator.summary import attained, quantile
from tandem.controlplane.simulator.sweep import MIXED, setup
from tandem.controlplane.simulator.workloads import shared_prompt
from tandem.core.config import SloSection
from tandem.core.prefill_queue import FIRST_COME, PrefillSpeed, QueueRules

HAND = Rates(prefill=PrefillSpeed(tokens_per_s=1000.0), decode_step_s=0.01, handoff_s=0.0, queue=FIRST_COME)
FAST = {"": SloSection(ttft_s=1.0, itl_s=0.02)}


def seen(arrival_s: float, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> ObservedRequest:
    return ObservedRequest(
        arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens
    )


once = partial(forecast, is_warm=False)


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    found = once(RoleSplit(1, 1), [seen(0.0, 500, 11)], HAND, FAST)
    assert (found.attained, found.score) == (1.0, 1.0)
    assert found.ttft_p90_s == pytest.approx(0.5)
    assert found.itl_p90_s == pytest.approx(0.01)
    assert found.prefill_busy == pytest.approx(0.5 / 0.6)


def test_prompts_wait_for_each_other_and_two_workers_halve_it() -> None:
    """Four prompts of half a second at once, 1 s promised: two are in time with one worker, all with two."""
    together = [seen(0.0, 500, 1) for _ in range(4)]
    assert once(RoleSplit(1, 1), together, HAND, FAST).attained == 0.5
    assert once(RoleSplit(2, 1), together, HAND, FAST).attained == 1.0


def test_what_is_cached_need_not_be_computed() -> None:
    assert once(RoleSplit(1, 1), [seen(0.0, 500, 1, 400)], HAND, FAST).ttft_p90_s == pytest.approx(0.1)


def test_sequences_slow_each_other_down_and_more_workers_make_them_faster() -> None:
    """Ten answers at once; each adds 2 ms to a step of 10 ms: 30 ms a token at one worker, 20 at two, 20 promised."""
    rates = Rates(
        prefill=PrefillSpeed(tokens_per_s=1e9), decode_step_s=0.01, decode_sequence_s=0.002, handoff_s=0.0,
        queue=FIRST_COME,
    )  # fmt: skip
    together = [seen(0.0, 100, 101) for _ in range(10)]
    one, two = (once(RoleSplit(1, count), together, rates, {"": SloSection(itl_s=0.0205)}) for count in (1, 2))
    assert one.itl_p90_s == pytest.approx(0.03, rel=0.01)
    assert two.itl_p90_s == pytest.approx(0.02, rel=0.01)
    assert (one.attained, two.attained) == (0.0, 1.0)


@pytest.mark.parametrize(("tokens", "kept"), [(2, 0.5), (11, 1.0)])
def test_who_comes_while_a_step_runs_waits_for_the_next(tokens: int, kept: float) -> None:
    """KV is there half way through a step of 10 ms: a single token takes 15 ms, of ten tokens each takes 10.5."""
    together = [seen(0.0, 500, 101), seen(0.1, 405, tokens)]
    assert once(RoleSplit(2, 1), together, HAND, {"": SloSection(itl_s=0.012)}).attained == kept


def test_who_comes_to_an_empty_worker_waits_for_nothing() -> None:
    apart = [seen(0.0, 500, 2), seen(1.0, 405, 2)]
    assert once(RoleSplit(1, 1), apart, HAND, {"": SloSection(itl_s=0.0101)}).attained == 1.0


def test_a_mixed_worker_gives_a_token_a_chunk_while_it_computes() -> None:
    """A prompt of 1 s in chunks of 0.2 s beside one answer: 0.21 s a token for five tokens, else 0.01."""
    found = once(RoleSplit(0, 0, 1), [seen(0.0, 1, 41), seen(0.1, 1000, 1)], HAND, {})
    first_s = 0.001
    before = (0.1 - first_s) / 0.01
    assert found.itl_p90_s == pytest.approx((0.1 - first_s + 5 * 0.21 + (40 - before - 5) * 0.01) / 40, rel=1e-3)
    assert found.ttft_p90_s == pytest.approx(0.001)


def test_an_answer_that_finds_no_room_waits() -> None:
    rates = Rates(
        prefill=PrefillSpeed(tokens_per_s=1e9), decode_step_s=0.01, handoff_s=0.0, kv_tokens=250, queue=FIRST_COME
    )
    found = once(RoleSplit(1, 1), [seen(0.0, 100, 101), seen(0.0, 100, 101)], rates, {"": SloSection(itl_s=0.011)})
    assert found.attained == 0.5


def linked(token_s: float, **more: Any) -> Rates:
    """HAND, with a wire on which the KV of a token takes so long; a chunk is 200 tokens, its last part 25."""
    return dataclasses.replace(HAND, kv_token_bytes=1000, link_bytes_per_s=1000 / token_s, **more)


def second_s(found: Forecast, steps: int) -> float:
    """From the first token to the moment when the answer went on, of answers that are alone."""
    return steps * (found.itl_p90_s - 0.01)


def test_kv_leaves_while_the_prompt_is_computed() -> None:
    """500 tokens in 0.5 s. A wire that is faster has the last 25 left; one of 4 ms a token sends until 2.025 s."""
    alone = [seen(0.0, 500, 11)]
    fast, slow = (once(RoleSplit(1, 1), alone, linked(token_s), {}) for token_s in (1e-4, 4e-3))
    assert fast.ttft_p90_s == slow.ttft_p90_s == pytest.approx(0.5)
    assert second_s(fast, 10) == pytest.approx(25e-4)
    assert second_s(slow, 10) == pytest.approx(2.025 - 0.5)


def test_what_is_cached_leaves_at_once() -> None:
    alone = [seen(0.0, 500, 11, cached_tokens=400)]
    assert second_s(once(RoleSplit(1, 1), alone, linked(4e-3), {}), 10) == pytest.approx(0.0125 + 2.0 - 0.1)


def test_a_mixed_worker_sends_nothing() -> None:
    alone = [seen(0.0, 500, 11)]
    assert once(RoleSplit(0, 0, 1), alone, linked(4e-3), {}) == once(RoleSplit(0, 0, 1), alone, HAND, {})


@pytest.mark.parametrize("split", [RoleSplit(1, 2), RoleSplit(2, 1)])
def test_a_prompt_waits_for_the_one_before_it_on_either_end_of_the_wire(split: RoleSplit) -> None:
    """Two prompts of 100 tokens, 0.4 s on the wire each: the second is there at 0.8 s, whichever end has but one
    wire."""
    together = [seen(0.0, 100, 11), seen(0.0, 100, 11)]
    at_s = [0.1 * (number + 1) if split.prefill == 1 else 0.1 for number in range(2)]
    there_s = [0.0125 + 0.4, 0.0125 + 0.8]
    promise_s = (there_s[1] - at_s[1]) / 10 + 0.01
    for itl_s, kept in ((promise_s - 1e-4, 0.5), (promise_s + 1e-4, 1.0)):
        assert once(split, together, linked(4e-3), {"": SloSection(itl_s=itl_s)}).attained == kept
    assert once(RoleSplit(2, 2), together, linked(4e-3), {"": SloSection(itl_s=promise_s - 0.01)}).attained == 1.0


def test_the_slower_end_of_a_wire_counts() -> None:
    alone = [seen(0.0, 500, 11)]
    slow, fast = linked(4e-3), linked(1e-4)
    for prefill, decode in ((slow, fast), (fast, slow), (slow, slow)):
        found = once(RoleSplit(1, 1), alone, prefill, {}, decode_rates=decode)
        assert second_s(found, 10) == pytest.approx(2.025 - 0.5)


def test_who_cannot_send_what_it_computed_takes_no_more_prompts() -> None:
    """Prompts of 0.1 s with KV that takes 1 s on the wire, and a pool for two: the third waits until the first is
    there."""
    together = [seen(0.0, 100, 2) for _ in range(4)]
    roomy, tight = (
        once(RoleSplit(1, 1), together, linked(1e-2, kv_tokens=room), {"": SloSection(ttft_s=1.0)})
        for room in (1000, 200)
    )
    assert (roomy.attained, tight.attained) == (1.0, 0.5)
    assert roomy.ttft_p90_s == pytest.approx(0.3)
    assert tight.ttft_p90_s == pytest.approx(1.0125 + 0.1)


@pytest.mark.parametrize("link_bytes_per_s", [1e9, 2e9, 20e9])
@pytest.mark.parametrize("split", [RoleSplit(1, 2), RoleSplit(2, 1), RoleSplit(0, 0, 3)])
def test_it_says_of_a_link_what_the_simulator_does(split: RoleSplit, link_bytes_per_s: float) -> None:
    """Three H100, prompts of 3,000 tokens: pairs keep a sixth of the promises at 1 GB/s, most at 2, all at 20."""
    calibration = dataclasses.replace(Calibration(), link_bytes_per_s=link_bytes_per_s)
    trace = shared_prompt(requests=100, rate=7.0, shared_tokens=0, own_tokens=3000, output_tokens=64, seed=1)
    asked = [seen(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in trace.requests]
    promise = SloSection(ttft_s=2.0, itl_s=0.05)
    way = MIXED if split.mixed else "always"
    played = Simulator(setup(calibration, split, promise, way), trace).run().records
    found = once(split, asked, calibrated(calibration, QueueRules()), {"": promise})
    assert found.attained == pytest.approx(attained(played, promise), abs=0.1)
    itl_s = quantile(sorted(one.tpot_s for one in played if one.output_tokens > 1), 0.9)
    assert found.itl_p90_s == pytest.approx(itl_s, rel=0.5)


def test_classes_have_promises_of_their_own() -> None:
    promises = {"fast": SloSection(ttft_s=0.1), "slow": SloSection(ttft_s=9.0)}
    asked = [
        ObservedRequest(arrival_s=0.0, prompt_tokens=500, output_tokens=1, slo=name)
        for name in ("fast", "slow", "none")
    ]
    assert once(RoleSplit(3, 1), asked, HAND, promises).attained == pytest.approx(2 / 3)


def test_of_two_bad_splits_the_nearer_one_scores_higher() -> None:
    together = [seen(0.0, 5000, 1) for _ in range(4)]
    near, far = (once(RoleSplit(count, 1), together, HAND, FAST) for count in (4, 1))
    assert near.attained == far.attained == 0.0
    assert near.score > far.score > 0.0


def test_a_cluster_in_service_is_not_empty() -> None:
    """A request every second with an answer of ten: ten at a time, where an empty cluster would begin with one."""
    rates = Rates(
        prefill=PrefillSpeed(tokens_per_s=1e9), decode_step_s=0.05, decode_sequence_s=0.005, handoff_s=0.0,
        queue=FIRST_COME,
    )  # fmt: skip
    steady = [seen(float(at), 10, 101) for at in range(10)]
    empty, warm = once(RoleSplit(1, 1), steady, rates, {}), forecast(RoleSplit(1, 1), steady, rates, {})
    assert warm.itl_p90_s > 1.1 * empty.itl_p90_s
    assert warm.itl_p90_s == pytest.approx(0.1, rel=0.02)


def test_what_a_split_cannot_do_piles_up() -> None:
    """Half a second of work every 0.4 s: the second minute waits for all that the first one left."""
    steady = [seen(0.4 * at, 500, 1) for at in range(50)]
    assert once(RoleSplit(1, 1), steady, HAND, FAST).attained > 0.0
    assert forecast(RoleSplit(1, 1), steady, HAND, FAST).attained == 0.0


@pytest.mark.parametrize("split", [RoleSplit(0, 3), RoleSplit(2, 0), RoleSplit(0, 0)])
def test_who_cannot_serve_is_not_asked(split: RoleSplit) -> None:
    with pytest.raises(ValueError, match="cannot serve"):
        forecast(split, [seen(0.0, 1, 1)], HAND, {})


requests = st.lists(
    st.builds(
        seen, st.floats(0, 60), st.integers(1, 4000), st.integers(1, 300), st.integers(0, 5000)
    ),
    min_size=1, max_size=40,
).map(lambda found: sorted(found, key=lambda one: one.arrival_s))  # fmt: skip
splits = st.one_of(
    st.builds(RoleSplit, st.integers(1, 5), st.integers(1, 5)),
    st.builds(RoleSplit, st.just(0), st.just(0), st.integers(1, 5)),
    st.builds(RoleSplit, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(recent=requests, split=splits)
def test_every_request_ends_and_takes_at_least_its_own_time(recent: list[ObservedRequest], split: RoleSplit) -> None:
    rates = Rates(
        prefill=PrefillSpeed(tokens_per_s=2000.0, context_s=1e-7), decode_step_s=0.01, decode_sequence_s=0.001,
        decode_context_s=1e-7, kv_tokens=9000, kv_token_bytes=1000, link_bytes_per_s=1e6,
    )  # fmt: skip
    found = forecast(split, recent, rates, {"": SloSection(ttft_s=2.0, itl_s=0.05)})
    assert 0.0 <= found.attained <= 1.0
    assert 0.0 < found.score <= 1.0
    assert 0.0 <= found.prefill_busy <= 1.0
    assert found.ttft_p90_s > 0.0
    assert found.itl_p90_s == 0.0 or found.itl_p90_s >= 0.01
    assert found == forecast(split, recent, rates, {"": SloSection(ttft_s=2.0, itl_s=0.05)})


@settings(max_examples=100, deadline=None)
@given(recent=requests, count=st.integers(1, 4))
def test_one_more_of_each_is_never_worse_for_first_come_first_served(recent: list[ObservedRequest], count: int) -> None:
    """Answers of one token: then all that matters is the queue of prompts, and one more server never hurts there."""
    short = [seen(one.arrival_s, one.prompt_tokens, 1, one.cached_tokens) for one in recent]
    fewer, more = (forecast(RoleSplit(n, 1), short, HAND, FAST) for n in (count, count + 1))
    assert more.attained >= fewer.attained
    assert more.ttft_p90_s <= fewer.ttft_p90_s + 1e-9
