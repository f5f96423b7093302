"""KV that left a sliding window goes back while the sequence runs; the output stays the same."""

from collections.abc import Sequence
from typing import Any

import pytest

from tandem.core.block_hash import BlockHash, chain
from tandem.core.handoff import ChoiceState
from tandem.core.ids import ChoiceIndex
from tandem.core.ledger import BlockLedger, Holder, HoldKind
from tandem.engine.block_manager import longest_hit
from tandem.engine.request import RequestKind
from tests.unit.engine.arithmetic import BLOCK, ROOT, VOCAB, Bench, Windows, layout, make_request, tokens

WINDOW = 10
MOST_BLOCKS = 4
"""Of a sequence that decodes with this window: ten tokens touch three blocks of four at most, or four between steps."""


def held(bench: Bench, group: int = 0) -> int:
    return bench.engine.ledgers[group].counts().request


def hashes(prompt: Sequence[int]) -> list[BlockHash]:
    return chain(ROOT, prompt, BLOCK)


def test_what_is_first_needed_is_the_block_of_the_first_token_in_the_window() -> None:
    (spec,) = layout(1, windows=(6,)).groups
    assert [spec.first_needed(computed) for computed in (0, 5, 8, 9, 12, 13, 40)] == [0, 0, 0, 1, 1, 2, 8]
    (narrow,) = layout(1, windows=(1,)).groups
    assert [narrow.first_needed(computed) for computed in (3, 4, 5)] == [0, 1, 1], "a token sees itself alone"
    (whole,) = layout(1).groups
    assert whole.first_needed(1000) == 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_long_answer_holds_no_more_than_its_window(n: int) -> None:
    bench = Bench(64, windows=(WINDOW,), max_model_len=256)
    bench.add("a", tokens(30), 60, n=n, temperature=1.0 if n > 1 else 0.0, seed=5)
    bench.step()
    most = 0
    while bench.engine.has_work:
        bench.step()
        most = max(most, held(bench))
    assert 0 < most <= n * MOST_BLOCKS
    bench.check_outputs("a")
    bench.check_idle()


def test_a_prompt_gives_back_what_its_chunks_left_behind() -> None:
    bench = Bench(16, windows=(WINDOW,), max_step_tokens=8, chunk_tokens=8, max_model_len=256)
    bench.add("a", tokens(60), 4)
    sizes: list[int] = []
    while len(sizes) < 8:
        bench.step()
        sizes.append(held(bench))
    assert sizes == [15, 14, 12, 10, 8, 6, 4, 3]
    assert bench.engine.ledgers[0].counts().cached == 12, "what came back can still be found"
    bench.finish("a")


def test_others_use_the_blocks_while_the_sequence_runs() -> None:
    """Sixteen blocks hold two long answers that together write forty."""
    bench = Bench(16, windows=(WINDOW,), max_model_len=256)
    for key in ("a", "b"):
        bench.add(key, tokens(8, ord(key)), 50)
    bench.run()
    assert not bench.preempted
    bench.check_outputs("a", "b")
    bench.check_idle()


@pytest.mark.parametrize("windows", [(WINDOW,), (None, WINDOW), (WINDOW, 3)])
def test_a_group_without_a_window_keeps_everything(windows: Windows) -> None:
    bench = Bench(64, groups=len(windows), windows=windows)
    bench.add("a", tokens(50), 3)
    bench.step()
    counts = [held(bench, group) for group in range(len(windows))]
    assert counts == [13 if window is None else {WINDOW: 3, 3: 1}[window] for window in windows]
    bench.finish("a")


def test_a_hit_needs_the_last_window_only() -> None:
    bench = Bench(16, windows=(WINDOW,))
    prompt = tokens(33)
    bench.add("a", prompt, 1)
    bench.run()
    ledger = bench.engine.ledgers[0]
    head = [block for block_hash in hashes(prompt)[:5] if (block := ledger.lookup(block_hash)) is not None]
    ledger.unpublish(head)  # as if others had needed them
    bench.add("again", (*prompt, *tokens(3, 9)), 4)
    assert bench.step().prefill_tokens == 36 - 32
    assert bench.engine.cached_tokens("again") == 32
    bench.finish("again")


def test_a_hole_in_the_window_ends_the_hit_before_it() -> None:
    bench = Bench(16, windows=(WINDOW,))
    prompt = tokens(33)
    bench.add("a", prompt, 1)
    bench.run()
    ledger, known = bench.engine.ledgers[0], hashes(prompt)
    specs = bench.engine.layout.groups
    for lost, hit, whole in ((7, 7, 7), (6, 6, 6), (1, 6, 1), (4, 1, 1), (0, 0, 0)):
        ledger.unpublish([block for block in [ledger.lookup(known[lost])] if block is not None])
        assert longest_hit((ledger,), specs, known, is_whole=False) == hit
        assert longest_hit((ledger,), specs, known, is_whole=True) == whole


def test_all_groups_must_have_what_they_need() -> None:
    bench = Bench(32, groups=2, windows=(None, WINDOW))
    prompt = tokens(33)
    bench.add("a", prompt, 1)
    bench.run()
    (whole, windowed), known = bench.engine.ledgers, hashes(prompt)

    def forget(ledger: BlockLedger, place: int) -> None:
        block = ledger.lookup(known[place])
        assert block is not None
        ledger.unpublish([block])

    def hit() -> int:
        return longest_hit(bench.engine.ledgers, bench.engine.layout.groups, known, is_whole=False)

    assert hit() == 8
    forget(windowed, 0)
    assert hit() == 8
    forget(whole, 6)
    assert hit() == 6
    forget(windowed, 4)
    assert hit() == 4
    forget(windowed, 1)
    assert hit() == 0
    assert longest_hit((whole,), bench.engine.layout.groups[:1], known, is_whole=False) == 6


def test_a_prompt_that_is_to_be_pushed_is_kept_whole() -> None:
    bench = Bench(32, windows=(WINDOW,), chunk_tokens=8)
    request = bench.add("a", tokens(40), 4, kind=RequestKind.PREFILL_ONLY)
    bench.run()
    table = bench.engine.block_table("a", bench.engine.ledgers[0].group)
    assert len(set(table)) == 10 == held(bench)
    bench.engine.cancel("a")
    bench.check_idle()
    assert request.prompt == tokens(40)


@pytest.mark.parametrize("n", [1, 2])
def test_a_handed_over_request_takes_no_more_than_the_window(n: int) -> None:
    """Nothing was reserved, sent or written of what lies behind it."""
    options: dict[str, Any] = {"n": n, "temperature": 1.0 if n > 1 else 0.0, "seed": 11}
    sender, receiver = Bench(windows=(WINDOW,)), Bench(windows=(WINDOW,))
    sender.add("a", tokens(37), 9, kind=RequestKind.PREFILL_ONLY, **options)
    sender.run()
    engine, holder = receiver.engine, Holder(HoldKind.RESERVED, "a/77")
    (spec,) = engine.layout.groups
    room = engine.reserve(holder, hashes(tokens(37)), spec.blocks_for(37), [spec.first_to_hand_over(37)])
    assert room is not None
    assert (room[0].left, room[0].hits, len(room[0].blocks)) == (6, 6, 10)
    assert engine.ledgers[0].counts().reserved == 4
    source = sender.engine.block_table("a", spec.group)
    for place in range(room[0].hits, 10):
        receiver.runner.pools[0][room[0].blocks[place]] = list(sender.runner.pools[0][source[place]])
    choices = tuple(ChoiceState(choice=ChoiceIndex(c), tokens=tuple(sender.outputs["a", c])) for c in range(n))
    receiver.requests["a"] = make_request("a", tokens(37), 9, forced=choices, **options)
    engine.add_prefilled(make_request("a", tokens(37), 9, **options), holder, (room[0].blocks,), choices)
    assert held(receiver) == 3
    receiver.run()
    receiver.check_outputs("a")
    receiver.check_idle()
    assert longest_hit(engine.ledgers, (spec,), hashes(tokens(37)), is_whole=False) == 9, "for who asks the same again"
    said = (*tokens(37), *choices[0].tokens, *receiver.outputs["a", 0])
    receiver.add("b", (*said, *tokens(5, 3)), 3)
    assert receiver.step().prefill_tokens == len(said) + 5 - 44, "the next turn of the conversation"
    receiver.run()
    receiver.check_outputs("b")


def test_nobody_finds_what_a_bad_computation_left_behind_its_window() -> None:
    poison, prompt, others = VOCAB - 1, tokens(40), Holder(HoldKind.PUSHING, "others")
    bench = Bench(64, windows=(WINDOW,), max_step_tokens=8, chunk_tokens=8, poison=poison)
    bench.add("bad", (*prompt[:-1], poison), 4)
    bench.step()
    (ledger,), known = bench.engine.ledgers, hashes(prompt)
    ledger.share(others, ledger.match(known))
    while not bench.failed:
        bench.step()
    assert len(ledger.blocks_of(others)) == 2, "which the request had left behind"
    assert ledger.hashes() == []
    ledger.release(others)
    bench.check_idle()
