"""KV that is not exactly the context's gives another digest, so another token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.simulation import layout, new_runner, prefill, prompt_of, say_again

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
