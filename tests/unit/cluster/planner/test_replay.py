"""Playing the last minutes again: cases computed by hand, and what must hold of any requests."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.planner.records import Rates, Seen, Split
from tandem.cluster.planner.replay import forecast
from tandem.core.config import SloSection
from tandem.core.prefill_queue import FIRST_COME, PrefillSpeed

HAND = Rates(prefill=PrefillSpeed(tokens_per_s=1000.0), decode_step_s=0.01, handoff_s=0.0, queue=FIRST_COME)
FAST = {"": SloSection(ttft_s=1.0, itl_s=0.02)}


def seen(arrival_s: float, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> Seen:
    return Seen(
        arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens
    )


once = partial(forecast, is_warm=False)


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    found = once(Split(1, 1), [seen(0.0, 500, 11)], HAND, FAST)
    assert (found.attained, found.score) == (1.0, 1.0)
    assert found.ttft_p90_s == pytest.approx(0.5)
    assert found.itl_p90_s == pytest.approx(0.01)
    assert found.prefill_busy == pytest.approx(0.5 / 0.6)


def test_prompts_wait_for_each_other_and_two_workers_halve_it() -> None:
    """Four prompts of half a second at once, 1 s promised: two are in time with one worker, all with two."""
    together = [seen(0.0, 500, 1) for _ in range(4)]
    assert once(Split(1, 1), together, HAND, FAST).attained == 0.5
    assert once(Split(2, 1), together, HAND, FAST).attained == 1.0


def test_what_is_cached_need_not_be_computed() -> None:
    assert once(Split(1, 1), [seen(0.0, 500, 1, 400)], HAND, FAST).ttft_p90_s == pytest.approx(0.1)


def test_sequences_slow_each_other_down_and_more_workers_make_them_faster() -> None:
    """Ten answers at once; each adds 2 ms to a step of 10 ms: 30 ms a token at one worker, 20 at two, 20 promised."""
    rates = Rates(
        prefill=PrefillSpeed(tokens_per_s=1e9), decode_step_s=0.01, decode_sequence_s=0.002, handoff_s=0.0,
        queue=FIRST_COME,
    )  # fmt: skip
    together = [seen(0.0, 100, 101) for _ in range(10)]
    one, two = (once(Split(1, count), together, rates, {"": SloSection(itl_s=0.0201)}) for count in (1, 2))
    assert one.itl_p90_s == pytest.approx(0.03, rel=0.01)
    assert two.itl_p90_s == pytest.approx(0.02, rel=0.01)
    assert (one.attained, two.attained) == (0.0, 1.0)


def test_a_mixed_worker_gives_a_token_a_chunk_while_it_computes() -> None:
    """A prompt of 1 s in chunks of 0.2 s beside one answer: 0.21 s a token for five tokens, else 0.01."""
    found = once(Split(0, 0, 1), [seen(0.0, 1, 41), seen(0.1, 1000, 1)], HAND, {})
    first_s = 0.001
    before = (0.1 - first_s) / 0.01
    assert found.itl_p90_s == pytest.approx((0.1 - first_s + 5 * 0.21 + (40 - before - 5) * 0.01) / 40, rel=1e-3)
    assert found.ttft_p90_s == pytest.approx(0.001)


def test_an_answer_that_finds_no_room_waits() -> None:
    rates = Rates(
        prefill=PrefillSpeed(tokens_per_s=1e9), decode_step_s=0.01, handoff_s=0.0, kv_tokens=250, queue=FIRST_COME
    )
    found = once(Split(1, 1), [seen(0.0, 100, 101), seen(0.0, 100, 101)], rates, {"": SloSection(itl_s=0.011)})
    assert found.attained == 0.5


def test_classes_have_promises_of_their_own() -> None:
    promises = {"fast": SloSection(ttft_s=0.1), "slow": SloSection(ttft_s=9.0)}
    asked = [Seen(arrival_s=0.0, prompt_tokens=500, output_tokens=1, slo=name) for name in ("fast", "slow", "none")]
    assert once(Split(3, 1), asked, HAND, promises).attained == pytest.approx(2 / 3)


def test_of_two_bad_splits_the_nearer_one_scores_higher() -> None:
    together = [seen(0.0, 5000, 1) for _ in range(4)]
    near, far = (once(Split(count, 1), together, HAND, FAST) for count in (4, 1))
    assert near.attained == far.attained == 0.0
    assert near.score > far.score > 0.0


def test_a_cluster_in_service_is_not_empty() -> None:
    """A request every second whose answer takes ten: ten at a time, where an empty cluster would begin with one."""
    rates = Rates(
        prefill=PrefillSpeed(tokens_per_s=1e9), decode_step_s=0.05, decode_sequence_s=0.005, handoff_s=0.0,
        queue=FIRST_COME,
    )  # fmt: skip
    steady = [seen(float(at), 10, 101) for at in range(10)]
    empty, warm = once(Split(1, 1), steady, rates, {}), forecast(Split(1, 1), steady, rates, {})
    assert warm.itl_p90_s > 1.1 * empty.itl_p90_s
    assert warm.itl_p90_s == pytest.approx(0.1, rel=0.02)


def test_what_a_split_cannot_do_piles_up() -> None:
    """Half a second of work every 0.4 s: the second minute waits for all that the first one left."""
    steady = [seen(0.4 * at, 500, 1) for at in range(50)]
    assert once(Split(1, 1), steady, HAND, FAST).attained > 0.0
    assert forecast(Split(1, 1), steady, HAND, FAST).attained == 0.0


@pytest.mark.parametrize("split", [Split(0, 3), Split(2, 0), Split(0, 0)])
def test_who_cannot_serve_is_not_asked(split: Split) -> None:
    with pytest.raises(ValueError, match="cannot serve"):
        forecast(split, [seen(0.0, 1, 1)], HAND, {})


requests = st.lists(
    st.builds(
        seen, st.floats(0, 60), st.integers(1, 4000), st.integers(1, 300), st.integers(0, 5000)
    ),
    min_size=1, max_size=40,
).map(lambda found: sorted(found, key=lambda one: one.arrival_s))  # fmt: skip
splits = st.one_of(
    st.builds(Split, st.integers(1, 5), st.integers(1, 5)), st.builds(Split, st.just(0), st.just(0), st.integers(1, 5)),
    st.builds(Split, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(recent=requests, split=splits)
def test_every_request_ends_and_takes_at_least_its_own_time(recent: list[Seen], split: Split) -> None:
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
def test_one_more_of_each_is_never_worse_for_first_come_first_served(recent: list[Seen], count: int) -> None:
    """Answers of one token: then all that matters is the queue of prompts, and one more server never hurts there."""
    short = [seen(one.arrival_s, one.prompt_tokens, 1, one.cached_tokens) for one in recent]
    fewer, more = (forecast(Split(n, 1), short, HAND, FAST) for n in (count, count + 1))
    assert more.attained >= fewer.attained
    assert more.ttft_p90_s <= fewer.ttft_p90_s + 1e-9
