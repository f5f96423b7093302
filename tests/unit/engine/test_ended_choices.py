"""A cancelled choice: it stops, its blocks come back, and the others never notice."""

from typing import Any

import pytest

from tandem.core.handoff import ChoiceState
from tandem.core.ids import ChoiceIndex
from tandem.engine.request import RequestKind
from tests.unit.engine.arithmetic import BLOCK, Bench, expected, make_request, tokens

RANDOM: dict[str, Any] = {"temperature": 1.0, "seed": 5}


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_the_others_go_on(ended: int) -> None:
    bench = Bench()
    bench.add("a", tokens(6), max_tokens=20, n=3, **RANDOM)
    for _ in range(6):
        bench.step()
    held = bench.engine.ledgers[0].counts().request
    bench.engine.end_choice("a", ended)
    bench.engine.scheduler.check_integrity()
    assert bench.engine.ledgers[0].counts().request < held
    before = len(bench.outputs["a", ended])
    bench.unwanted.add(("a", ended))
    bench.finish("a")
    assert len(bench.outputs["a", ended]) == before == 6
    assert ("a", ended) not in bench.ended


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_choice_that_computes_the_prompt_ends(groups: int, steps: int) -> None:
    """In a replay a choice may end before the prompt is computed: the next one takes that over."""
    bench = Bench(groups=groups, chunk_tokens=BLOCK)
    plain = make_request("a", tokens(14), 12, n=3, **RANDOM)
    forced = tuple(
        ChoiceState(choice=ChoiceIndex(choice), tokens=expected(plain, choice, groups)[:5]) for choice in (0, 2)
    )
    bench.add("a", tokens(14), max_tokens=12, n=3, forced=forced, **RANDOM)
    for _ in range(steps):
        bench.step()
    bench.engine.end_choice("a", 0)
    bench.unwanted.add(("a", 0))
    bench.finish("a")
    assert bench.runner.tokens < 2 * 14 + 3 * 12, "the prompt was computed once"
    assert ("a", 0) not in bench.outputs


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_the_last_choice_takes_the_request_with_it(steps: int) -> None:
    bench = Bench(chunk_tokens=BLOCK)
    bench.add("a", tokens(14), max_tokens=20, n=2, **RANDOM)
    for _ in range(steps):
        bench.step()
    for choice in (1, 0, 0, 7):
        bench.engine.end_choice("a", choice)
    assert bench.engine.in_flight() == []
    bench.check_idle()


def test_a_preempted_request_returns_without_the_choice() -> None:
    bench = Bench(num_blocks=12)
    bench.add("old", tokens(8, 1), max_tokens=30)
    bench.add("a", tokens(6, 2), max_tokens=10, n=3, arrival_s=1.0, **RANDOM)
    while "a" not in bench.preempted:
        bench.step()
    bench.engine.end_choice("a", 0)
    bench.unwanted.add(("a", 0))
    bench.finish("a", "old")


def test_a_prompt_that_is_pushed_stays_until_its_release() -> None:
    bench = Bench()
    bench.add("a", tokens(6), max_tokens=20, n=2, kind=RequestKind.PREFILL_ONLY, **RANDOM)
    bench.step()
    table = bench.engine.block_table("a", bench.engine.layout.groups[0].group)
    bench.engine.end_choice("a", 0)
    bench.engine.end_choice("a", 1)
    assert bench.engine.block_table("a", bench.engine.layout.groups[0].group) == table
    bench.engine.scheduler.check_integrity()
    bench.engine.cancel("a")
    bench.check_idle()


def test_a_prefill_that_only_waited_for_that_choice_is_done() -> None:
    bench = Bench(chunk_tokens=BLOCK, max_step_tokens=2 * BLOCK)
    plain = make_request("a", tokens(6), 40, n=2, **RANDOM)
    forced = (ChoiceState(choice=ChoiceIndex(1), tokens=expected(plain, 1)[:20]),)
    bench.add("a", tokens(6), max_tokens=40, n=2, kind=RequestKind.PREFILL_ONLY, forced=forced, **RANDOM)
    while ("a", 0) not in bench.outputs:
        bench.step()
    assert ("a", 1) not in bench.outputs, "it still computes its forced tokens"
    bench.engine.end_choice("a", 1)
    assert not bench.engine.has_work
    bench.engine.cancel("a")
    bench.check_idle()
