"""Preempted requests with KV that waits in host memory answer the same as recomputed ones, and cost no step."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tandem.core.ledger import LedgerError
from tandem.core.prefill_queue import ASSUMED_TOKENS_PER_S, PrefillSpeed, attended
from tandem.engine.swapping import Swap
from tests.unit.engine.arithmetic import BLOCK, ArithmeticRunner, Bench, Windows, tokens

QUICK = 1e12
BLOCK_BYTES = 2 * BLOCK * 4 * 4
"""Of a group: two planes of BLOCK tokens of four numbers of four bytes."""


class Copies:
    """Of an arithmetic runner's pools, which stand for a device's. `shift`: a copy that comes back to wrong places.
    `has_memory`: whether the host has any."""

    def __init__(self, runner: ArithmeticRunner, shift: int = 0) -> None:
        self._runner, self._shift = runner, shift
        self.has_memory = True
        self.saved_blocks = self.restored_blocks = 0
        self.takes_s = 0.0

    def save(self, group: int, blocks: Sequence[int]) -> list[list[int]] | None:
        if not self.has_memory:
            return None
        self.saved_blocks += len(blocks)
        self._runner.clock.advance(self.takes_s)
        return [list(self._runner.pools[group][block]) for block in blocks]

    def restore(self, group: int, blocks: Sequence[int], saved: list[list[int]], first: int) -> None:
        self.restored_blocks += len(blocks)
        self._runner.clock.advance(self.takes_s / 2)
        for place, block in enumerate(blocks):
            self._runner.pools[group][block] = list(saved[(first + place + self._shift) % len(saved)])


def swap_of(
    runner: ArithmeticRunner, capacity: int = 1 << 30, speed: float = QUICK, shift: int = 0
) -> tuple[Swap, Copies]:
    copies = Copies(runner, shift)
    swap = Swap(copies, runner.layout, capacity, runner.clock, save_bytes_per_s=speed, restore_bytes_per_s=speed)
    return swap, copies


def bench_of(
    groups: int = 1, num_blocks: int = 10, windows: Windows = (), **options: Any
) -> tuple[Bench, Swap, Copies]:
    """Three answers of which two fit at once."""
    made: list[tuple[Swap, Copies]] = []

    def make(runner: ArithmeticRunner) -> Swap:
        made.append(swap_of(runner, **options))
        return made[0][0]

    bench = Bench(num_blocks=num_blocks, groups=groups, windows=windows, max_step_tokens=16, swap=make)
    return bench, *made[0]


def run_three(bench: Bench, **sampling: Any) -> tuple[int, int]:
    """Prompt tokens computed, and tokens computed again."""
    for i in range(3):
        bench.add(f"r{i}", tokens(8, i), max_tokens=16, **sampling)
    computed = recomputed = 0
    while bench.engine.has_work:
        result = bench.step()
        assert result.prefill_tokens or result.decode_tokens, "an empty step"
        computed, recomputed = computed + result.prefill_tokens, recomputed + result.recomputed_tokens
    bench.check_outputs()
    bench.check_idle()
    return computed, recomputed


@pytest.mark.parametrize("groups", [1, 2])
def test_what_was_kept_is_not_computed_again(groups: int) -> None:
    bench, swap, copies = bench_of(groups)
    computed, recomputed = run_three(bench)
    assert bench.preempted
    assert (computed, recomputed) == (3 * 8, 0)
    assert swap.requests == len(bench.preempted)
    assert swap.tokens > 0
    assert 0 < copies.restored_blocks <= copies.saved_blocks
    assert not swap.keys


def test_a_copy_that_comes_back_to_wrong_places_changes_the_answer() -> None:
    """So the test above would notice."""
    bench, _, _ = bench_of(shift=1)
    with pytest.raises(AssertionError):
        run_three(bench)


def test_what_is_still_cached_is_not_brought_back() -> None:
    bench, _, copies = bench_of(num_blocks=16)
    for key, seed in (("old", 1), ("young", 2)):
        bench.add(key, tokens(8, seed), max_tokens=16)
    for _ in range(4):
        bench.step()
    assert bench.engine.preempt_for(-1.0, [bench.engine.ledgers[0].available + 1]) == ["young"]
    assert copies.saved_blocks == 3
    bench.finish()
    assert copies.restored_blocks == 1, "full blocks are found, the last one is not full"


@pytest.mark.parametrize("is_cheaper", [True, False])
def test_the_cheaper_way_is_taken(is_cheaper: bool) -> None:
    """No prompt was measured: the worker's speed is what every one is assumed to have."""
    per_token_s = 1 / ASSUMED_TOKENS_PER_S
    limit = 2 * (BLOCK_BYTES / BLOCK) / per_token_s  # full blocks, both ways
    bench, swap, _ = bench_of(speed=limit * (1.5 if is_cheaper else 0.99))
    _, recomputed = run_three(bench)
    assert bench.preempted
    assert bool(swap.requests) is is_cheaper
    if not is_cheaper:
        assert recomputed > 0


def test_the_cost_counts_what_is_attended_to_and_whole_blocks() -> None:
    runner = ArithmeticRunner(64)
    swap, _ = swap_of(runner, speed=1000.0)
    assert swap.seconds(BLOCK) == swap.seconds(1) == pytest.approx(2 * BLOCK_BYTES / 1000.0)
    assert swap.seconds(BLOCK + 1) == pytest.approx(4 * BLOCK_BYTES / 1000.0)
    speed = PrefillSpeed(tokens_per_s=100.0, context_s=0.001)
    assert speed.seconds(100, attended(0, 100)) == pytest.approx(1.0 + 5.0)


def test_speeds_are_measured_at_the_start_and_with_every_copy() -> None:
    runner = ArithmeticRunner(64)
    swap, copies = swap_of(runner, speed=0.0)
    assert swap.seconds(1) == float("inf"), "nothing is known yet"
    copies.takes_s = 0.5
    swap.try_speeds(8)
    assert (swap.save_bytes_per_s, swap.restore_bytes_per_s) == (8 * BLOCK_BYTES / 0.5, 8 * BLOCK_BYTES / 0.25)
    bench, swap, copies = bench_of(speed=QUICK)
    copies.takes_s = 0.001
    run_three(bench)
    assert swap.save_bytes_per_s < QUICK
    assert swap.restore_bytes_per_s < QUICK


def test_what_does_not_fit_is_computed_again() -> None:
    bench, swap, copies = bench_of(capacity=BLOCK_BYTES)
    _, recomputed = run_three(bench)
    assert bench.preempted
    assert recomputed > 0
    assert (swap.requests, copies.saved_blocks) == (0, 0)


def test_a_host_without_memory_costs_nobody_an_answer() -> None:
    bench, swap, copies = bench_of()
    copies.has_memory = False
    _, recomputed = run_three(bench)
    assert bench.preempted
    assert recomputed > 0
    assert not swap.requests


def test_room_comes_back() -> None:
    """For one request at a time, again and again."""
    bench, swap, _ = bench_of(capacity=6 * BLOCK_BYTES)
    for turn in range(4):
        for i in range(3):
            bench.add(f"{turn}-{i}", tokens(8, 3 * turn + i), max_tokens=16)
        bench.finish()
    assert swap.requests >= 4


def test_requests_of_several_choices_are_computed_again() -> None:
    bench, swap, _ = bench_of(num_blocks=14)
    bench.add("old", tokens(8, 1), max_tokens=24)
    bench.add("two", tokens(8, 2), max_tokens=20, n=2, temperature=1.0)
    bench.finish()
    assert bench.preempted == ["two"] * len(bench.preempted) != []
    assert not swap.requests


def until_kept(bench: Bench, swap: Swap) -> str:
    for i in range(3):
        bench.add(f"r{i}", tokens(8, i), max_tokens=16)
    while not swap.keys:
        bench.step()
    (key,) = swap.keys
    return key


@pytest.mark.parametrize(
    "leave", [lambda engine, key: engine.cancel(key), lambda engine, key: engine.end_choice(key, 0)]
)
def test_who_leaves_meanwhile_leaves_nothing_behind(leave: Callable[[Any, str], Any]) -> None:
    bench, swap, _ = bench_of()
    key = until_kept(bench, swap)
    leave(bench.engine, key)
    assert not swap.keys
    bench.run()
    for other in set(bench.requests) - {key}:
        bench.check_outputs(other)
    bench.check_idle()


def test_a_copy_of_nobody_is_noticed() -> None:
    bench, swap, _ = bench_of()
    key = until_kept(bench, swap)
    swap._saved["nobody"] = swap._saved[key]
    with pytest.raises(LedgerError, match="nobody"):
        bench.engine.scheduler.check_integrity()


@pytest.mark.parametrize(("windows", "blocks", "most"), [((10,), 10, 4), ((None, 10), 18, 13), ((3, 10), 9, 6)])
def test_what_is_kept_is_what_is_in_the_window(windows: Windows, blocks: int, most: int) -> None:
    bench, swap, copies = bench_of(len(windows), num_blocks=blocks, windows=windows)
    for i in range(5):
        bench.add(f"r{i}", tokens(4, i), 30)
    while bench.engine.has_work:
        bench.step()
        for key in bench.requests:
            bench.check_findable(key)  # not the blocks between a hit and the window, which were not written again
    assert swap.requests > 0
    assert 0 < copies.saved_blocks <= most * swap.requests
    assert copies.restored_blocks > 0
    bench.check_outputs()
    bench.check_idle()
