"""Test the simulated engine and its KV against the oracle."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.clock import ManualClock, MonotonicClock
from tandem.core.config import SimSection
from tandem.core.errors import ConfigError
from tandem.core.sampling import SamplingParams
from tandem.engine.runner_protocol import SampleRow, SeqSlice, StepBatch
from tandem.engine.sampling_state import ChoiceSampling
from tandem.engine.sim.arithmetic import choose, expected_tokens
from tests.unit.engine.simulation import (
    EOS,
    VOCAB,
    layout,
    new_engine,
    new_runner,
    oracle,
    prefill,
    prompt_of,
    request,
    run,
    say_again,
)

requests = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt tokens
        st.integers(0, 2),  # seed of the prompt
        st.integers(1, 12),  # tokens to generate
        st.integers(1, 3),  # choices
        st.sampled_from([0.0, 0.8]),
        st.integers(0, 3),  # forced tokens of choice 0
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(
    asked=requests, groups=st.integers(1, 2), block_tokens=st.sampled_from([1, 4, 16]), spare=st.integers(0, 20),
    chunk=st.integers(1, 40), step=st.integers(4, 64),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]), layer_group=st.integers(0, 3),
)  # fmt: skip
def test_any_schedule_gives_the_oracles_tokens(
    asked: list[tuple[int, int, int, int, float, int]], groups: int, block_tokens: int, spare: int, chunk: int,
    step: int, dtype: str, layer_group: int,
) -> None:  # fmt: skip
    """Few blocks make preemptions, equal seeds make prefix hits, n > 1 makes copies on write."""
    wanted = []
    for number, (length, seed, count, n, temperature, forced) in enumerate(asked):
        outputs = prompt_of(min(forced, count - 1), seed=99)
        options = {"max_tokens": count, "n": n, "temperature": temperature, "seed": seed}
        wanted.append(request(f"r{number}", prompt_of(length, seed), outputs, **options))
    need = max(r.sampling.n * -(-(len(r.prompt) + r.sampling.max_tokens) // block_tokens) + 1 for r in wanted)
    shape = layout(groups=groups, block_tokens=block_tokens, dtype=dtype)
    engine = new_engine(
        new_runner(shape, need + spare, layer_group=layer_group), chunk_tokens=chunk, max_step_tokens=step
    )
    for _ in range(2):  # the second time over what the first left in the cache
        said = run(engine, wanted)
        assert said == {(r.key, c): oracle(r, c, groups) for r in wanted for c in range(r.sampling.n)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [8, 12, 64])
@pytest.mark.parametrize("block_tokens", [4, 16, 32])
def test_the_shape_of_kv_does_not_matter(block_tokens: int, width: int, dtype: str) -> None:
    shape = layout(block_tokens=block_tokens, width=width, dtype=dtype, layers=3, heads=1)
    one = request("r", prompt_of(70), max_tokens=20)
    assert run(new_engine(new_runner(shape)), [one]) == {("r", 0): oracle(one)}


def test_the_oracle_does_not_change() -> None:
    """Recorded answers of proofs stay comparable."""
    assert expected_tokens([1, 2, 3], 5, 4096) == EXPECTED


EXPECTED = [141, 1926, 2071, 949, 192]


def test_sampling_is_a_function_of_seed_choice_and_index() -> None:
    hot = [request("r", prompt_of(20), n=2, temperature=1.0, seed=seed, max_tokens=6) for seed in (1, 1, 2)]
    said = [run(new_engine(new_runner(layout())), [one]) for one in hot]
    assert said[0] == said[1]
    assert said[0] != said[2]
    assert said[0]["r", 0] != said[0]["r", 1]


def test_end_tokens_are_avoided_unless_forced_by_bias() -> None:
    def say(bias: tuple[tuple[int, float], ...], vocab: int = 13) -> list[int]:
        params = SamplingParams(max_tokens=50, temperature=0.0, logit_bias=bias)
        return expected_tokens([1, 2], 300, vocab, eos_token_ids=EOS, sampling=params)

    assert set(say(())) == set(range(13)) - set(EOS)
    assert not set(say(((3, -100.0),))) & {3, *EOS}
    assert set(say(((7, 100.0),))) == {7}
    assert choose(5, SamplingParams(max_tokens=1), 0, 0, vocab_size=2, eos_token_ids=(0, 1)) in (0, 1)


def test_an_end_token_and_a_stop_token_end_the_answer() -> None:
    engine = new_engine(new_runner(layout()))
    free = request("free", prompt_of(9), max_tokens=9)
    stop = request("stop", prompt_of(9), max_tokens=9, stop_token_ids=(oracle(free)[3],))
    end = request("end", prompt_of(9), max_tokens=9, logit_bias=((EOS[0], 100.0),))
    said = run(engine, [free, stop, end])
    assert said == {("free", 0): oracle(free), ("stop", 0): oracle(free)[:4], ("end", 0): [EOS[0]]}


def test_drafts_give_the_tokens_of_steps_one_after_the_other() -> None:
    """As sequences of a token each that follow each other in one table."""
    prompt, tables = prompt_of(9), ([3, 1, 2],)
    alone, together = (new_runner(layout(block_tokens=4)) for _ in range(2))
    tokens = [prefill(alone, prompt, tables)]
    assert prefill(together, prompt, tables) == tokens[0]
    state = ChoiceSampling(SamplingParams(max_tokens=9, temperature=0.0), 0, prompt)
    for place in range(9, 12):
        batch = StepBatch([tokens[-1]], [place], [SeqSlice(1, place + 1, tables)], [0])
        (said,) = alone.step(batch, [SampleRow(0, place - 8, state)])
        tokens.append(said.token)
    batch = StepBatch(tokens[:3], [9, 10, 11], [SeqSlice(1, end, tables) for end in (10, 11, 12)], [0, 1, 2])
    assert [
        said.token for said in together.step(batch, [SampleRow(row, row + 1, state) for row in range(3)])
    ] == tokens[1:]


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_are_valid(count: int) -> None:
    runner = new_runner(layout(), vocab_size=50)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=count)
    batch = StepBatch([3], [0], [SeqSlice(1, 1, ([0],))], [0])
    (sampled,) = runner.step(batch, [SampleRow(0, 0, ChoiceSampling(params, 0, (3,)))])
    assert sampled.logprob is not None
    assert sampled.logprob.token == sampled.token
    assert len({token for token, _ in sampled.logprob.top}) == count
    assert all(value <= sampled.logprob.logprob < 0 for _, value in sampled.logprob.top)


def test_layers_are_written_when_the_hook_hears_of_them() -> None:
    runner = new_runner(layout(layers=5, block_tokens=4), layer_group=2)
    heard: list[tuple[int, int]] = []
    layer_bytes = runner.layout.groups[0].layer_bytes()

    def hook(first: int, last: int) -> None:
        heard.append((first, last))
        written = [any(runner.pool_bytes(0)[at : at + layer_bytes]) for at in range(0, 5 * layer_bytes, layer_bytes)]
        assert written == [layer < last for layer in range(5)]

    runner.step(StepBatch([1, 2, 3], [0, 1, 2], [SeqSlice(3, 3, ([0],))]), [], hook)
    assert heard == [(0, 2), (2, 4), (4, 5)]


def test_steps_take_the_modelled_time() -> None:
    """At least; the layers of a chunk come one after the other."""
    timing = SimSection(prefill_tokens_per_s=1000.0, decode_step_s=0.02, decode_sequence_s=0.005)
    clock = MonotonicClock()
    runner = new_runner(layout(layers=4), layer_group=1, timing=timing, clock=clock)
    times: list[float] = [clock.now_s()]
    chunk = SeqSlice(40, 40, (list(range(10)),))
    decode = SeqSlice(1, 1, ([10],))
    batch = StepBatch([1, *range(40)], [0, *range(40)], [decode, chunk])
    runner.step(batch, [], lambda first, last: times.append(clock.now_s()))
    times.append(clock.now_s())
    since = [time - times[0] for time in times[1:]]
    assert all(a >= b for a, b in zip(since, [0.01, 0.02, 0.03, 0.04, 0.065], strict=True))


def test_batches_that_contradict_themselves_are_refused() -> None:
    runner = new_runner(layout(), max_model_len=8)
    wrong: list[tuple[Any, ...]] = [
        ([1], [0, 1], [SeqSlice(1, 1, ([0],))]),
        ([1], [8], [SeqSlice(1, 9, ([0, 1, 2],))]),
        ([1], [1], [SeqSlice(1, 1, ([0],))]),
        ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [SeqSlice(5, 5, ([0],))]),
        ([1], [0], [SeqSlice(1, 1, ([64],))]),
        ([VOCAB], [0], [SeqSlice(1, 1, ([0],))]),
        ([], [], []),
    ]
    for parts in wrong:
        with pytest.raises(ValueError, match=r"token|position|block"):
            runner.step(StepBatch(*parts), [])


def test_shapes_that_cannot_be_simulated_are_refused() -> None:
    with pytest.raises(ConfigError, match="width 4"):
        new_runner(layout(width=4))


def test_a_copied_block_says_the_same() -> None:
    runner, prompt = new_runner(layout()), prompt_of(11)
    said = prefill(runner, prompt, ([5, 3, 9],))
    runner.copy_blocks(0, [(3, 20), (9, 21)])
    assert say_again(runner, prompt, ([5, 20, 21],)) == said
    assert said == expected_tokens(prompt, 1, VOCAB, eos_token_ids=EOS)[0]


@pytest.mark.slow
def test_no_torch() -> None:
    code = "import sys, tandem.engine.engine, tandem.engine.sim.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_virtual_clock_waits_for_nobody() -> None:
    """Without modelled durations nothing asks the clock to move."""
    runner = new_runner(layout(), clock=ManualClock())
    assert prefill(runner, prompt_of(9), ([0, 1, 2],))


TOKENS = 23
TABLES = ([4, 1, 7, 2, 9, 3], [3, 9, 2, 5, 8, 1])


@settings(max_examples=300, deadline=None)
@given(
    group=st.integers(0, 1), place=st.integers(0, 5), byte=st.integers(0), flip=st.integers(1, 255),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)  # fmt: skip
def test_any_wrong_byte_of_the_context_changes_the_token(
    group: int, place: int, byte: int, flip: int, dtype: str
) -> None:
    shape = layout(groups=2, dtype=dtype, width=12)
    runner, prompt = new_runner(shape), prompt_of(TOKENS)
    said = prefill(runner, prompt, TABLES)
    spec = shape.groups[group]
    at = byte % spec.block_bytes()
    runner.pool_bytes(group)[TABLES[group][place] * spec.block_bytes() + at] ^= flip
    slot = at % spec.head_bytes() // (spec.head_bytes() // spec.block_tokens)
    token = place * spec.block_tokens + slot
    if token == TOKENS - 1 or token >= TOKENS:  # written again by the step that reads it
        assert say_again(runner, prompt, TABLES) == said
    else:
        assert say_again(runner, prompt, TABLES) != said
    prefill(runner, prompt, TABLES)
    assert say_again(runner, prompt, TABLES) == said, "repaired"


@settings(max_examples=200, deadline=None)
@given(row=st.integers(0, 7), place=st.integers(0, 4), other=st.integers(0, 4), kind=st.sampled_from("zs"))
def test_a_missing_or_stale_slice_of_a_block_changes_the_token(row: int, place: int, other: int, kind: str) -> None:
    """One head of one plane of one layer: zeroed, or what the same place of another block holds."""
    shape = layout()
    runner, prompt = new_runner(shape), prompt_of(TOKENS)
    said = prefill(runner, prompt, TABLES[:1])
    spec, data = shape.groups[0], runner.pool_bytes(0)
    start, size = row * spec.head_bytes(), spec.head_bytes()
    at, source = (TABLES[0][p] * spec.block_bytes() + start for p in (place, other))
    before = bytes(data[at : at + size])
    data[at : at + size] = bytes(size) if kind == "z" else bytes(data[source : source + size])
    is_changed = bytes(data[at : at + size]) != before
    assert (say_again(runner, prompt, TABLES[:1]) != said) == is_changed


def test_heads_and_blocks_that_are_swapped_change_the_token() -> None:
    shape = layout()
    spec = shape.groups[0]
    runner, prompt = new_runner(shape), prompt_of(TOKENS)
    said = prefill(runner, prompt, TABLES[:1])
    table = list(TABLES[0])
    table[1], table[2] = table[2], table[1]
    assert say_again(runner, prompt, (table,)) != said
    prefill(runner, prompt, TABLES[:1])
    data, size = runner.pool_bytes(0), spec.head_bytes()
    for block in TABLES[0]:
        at = block * spec.block_bytes()
        first, second = bytes(data[at : at + size]), bytes(data[at + size : at + 2 * size])
        data[at : at + 2 * size] = second + first
    assert say_again(runner, prompt, TABLES[:1]) != said


def test_another_requests_blocks_change_the_token() -> None:
    runner, prompt = new_runner(layout()), prompt_of(TOKENS)
    said = prefill(runner, prompt, TABLES[:1])
    prefill(runner, prompt_of(TOKENS, seed=5), ([20, 21, 22, 23, 24, 25],))
    for place in range(5):
        table = list(TABLES[0])
        table[place] = 20 + place
        assert say_again(runner, prompt, (table,)) != said


def test_equal_bytes_are_judged_once_and_the_memory_of_it_is_bounded() -> None:
    runner = new_runner(layout(), 8)
    for seed in range(40):
        prefill(runner, prompt_of(TOKENS, seed), ([0, 1, 2, 3, 4, 5],))
    assert len(runner.pools[0]._judged) <= 4 * 8 + 1


@pytest.mark.parametrize("digest", range(6))
def test_a_mask_leaves_its_tokens_alone(digest: int) -> None:
    mask = bytes([0b0010_0100, 0b0000_0001])
    plain, only = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, allowed_token_ids=(5, 6))
    chosen = choose(digest, plain, 0, 0, vocab_size=10, eos_token_ids=(8,), mask=mask)
    assert chosen in (2, 5), "an end is avoided"
    assert choose(digest, only, 0, 0, vocab_size=10, eos_token_ids=(8,), mask=mask) == 5
    ended = bytes([0, 0b0000_0001])
    assert choose(digest, only, 0, 0, vocab_size=10, eos_token_ids=(8,), mask=ended) == 8, "the grammar wins"
