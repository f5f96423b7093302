"""How many prompt tokens a step takes, by the time that steps take."""

import pytest

from tests.unit.engine.arithmetic import Bench, tokens


def test_chunks_shrink_to_the_time_budget() -> None:
    bench = Bench(num_blocks=200, max_step_tokens=64, max_step_s=0.008)
    bench.runner.duration_s = lambda batch: 0.001 * len(batch.token_ids)  # 1000 tokens/s
    bench.add("a", tokens(200), max_tokens=2)
    first, second = bench.step(), bench.step()
    assert first.prefill_tokens == 64
    assert second.prefill_tokens == 20, "0.02 s: no decode waits"


@pytest.mark.parametrize(
    ("chunk", "rest", "chunks"), [(80, 63, [143]), (80, 64, [80, 64]), (320, 64, [384]), (320, 65, [320, 65])]
)
def test_a_short_rest_goes_with_the_chunk_before_it(chunk: int, rest: int, chunks: list[int]) -> None:
    bench = Bench(num_blocks=200, max_model_len=512, max_step_s=chunk / 2500)
    bench.runner.duration_s = lambda batch: 0.001 * len(batch.token_ids)
    bench.add("first", tokens(chunk), max_tokens=1)
    bench.step()
    bench.add("a", tokens(chunk + rest, 1), max_tokens=1)
    steps = []
    while bench.engine.has_work:
        steps.append(bench.step().prefill_tokens)
    assert steps == chunks


def test_a_short_rest_does_not_go_with_a_shorter_chunk() -> None:
    """On a slow machine it would make the step several times as long; and what the budget has left is no chunk."""
    bench = Bench(num_blocks=200, max_step_s=0.4)
    bench.runner.duration_s = lambda batch: 0.03 * len(batch.token_ids)  # 33 tokens/s: a chunk of 32
    bench.add("first", tokens(80), max_tokens=1)
    bench.step()
    bench.add("a", tokens(90, 1), max_tokens=1)
    assert bench.step().prefill_tokens == 32
    bench = Bench(num_blocks=200, max_step_s=0.032)
    bench.runner.duration_s = lambda batch: 0.001 * len(batch.token_ids)
    bench.add("first", tokens(80), max_tokens=1)
    bench.step()
    for seed in range(4):
        bench.add(f"p{seed}", tokens(60, seed + 1), max_tokens=1)
    assert bench.step().prefill_tokens == 80, "not all 60 of the second"


def test_beside_decodes_a_short_rest_waits() -> None:
    bench = Bench(num_blocks=200, max_step_s=0.1)
    bench.runner.duration_s = lambda batch: 0.001 * len(batch.token_ids)
    bench.add("first", tokens(100), max_tokens=50)
    bench.step()
    bench.add("a", tokens(110, 1), max_tokens=1)
    assert bench.step().prefill_tokens == 100, "and not all 110"


def test_a_step_with_a_short_rest_keeps_its_bound_of_tokens() -> None:
    bench = Bench(num_blocks=200, max_step_tokens=100, chunk_tokens=100)
    bench.add("a", tokens(110, 1), max_tokens=1)
    assert [bench.step().prefill_tokens for _ in range(2)] == [100, 10]


def test_a_prompt_alone_is_not_cut_into_small_chunks_where_steps_have_a_fixed_cost() -> None:
    """0.1 s a step besides 2.3 ms a token: half of the time bound is gone before the first token. A short prompt comes
    first, as from a warm-up."""
    bench = Bench(num_blocks=200, max_step_s=0.2)
    bench.runner.duration_s = lambda batch: 0.1 + 0.0023 * len(batch.token_ids)
    bench.add("short", tokens(1, 0), max_tokens=1)
    bench.step()
    for seed in range(6):
        bench.add(f"p{seed}", tokens(252, seed), max_tokens=1)
        steps = [bench.step().prefill_tokens]
        while bench.engine.has_work:
            steps.append(bench.step().prefill_tokens)
        assert sum(steps) == 252
    assert len(steps) == 2
    assert steps[0] == pytest.approx(178, abs=16)
