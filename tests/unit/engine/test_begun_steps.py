"""Decode steps that begin before the tokens of the one before are known: the same tokens, and no block too early."""

import math
from typing import Any

import pytest

from tandem.core.handoff import ChoiceState
from tandem.core.ids import ChoiceIndex
from tandem.core.ledger import Holder, HoldKind
from tests.unit.engine.arithmetic import BLOCK, EOS, Bench, expected, make_request, slot_value, tokens

WHEN = pytest.mark.parametrize("ahead", ["early", "late"])
RANDOM: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8}


@WHEN
def test_the_same_tokens_with_one_step_begun_behind_the_other(ahead: str) -> None:
    bench = Bench(num_blocks=200, groups=2, windows=(None, 6), ahead=ahead)
    for i in range(6):
        bench.add(f"r{i}", tokens(5 + 3 * i, seed=i), max_tokens=6 + 5 * i, **(RANDOM | {"seed": i} if i % 2 else {}))
    bench.add("many", tokens(9), max_tokens=12, n=3, **RANDOM, logprobs=2)
    bench.add("ends", tokens(7, seed=4), max_tokens=60, ignore_eos=False, temperature=1.0, seed=11)
    bench.finish()
    assert bench.outputs["ends", 0][-1] == EOS, "one that the step behind did not foresee"
    assert bench.runner.begun > 20


@WHEN
def test_a_block_that_a_begun_step_writes_goes_to_nobody_else(ahead: str) -> None:
    bench = Bench(num_blocks=7, ahead=ahead)
    bench.add("a", tokens(2 * BLOCK - 1), max_tokens=20)
    bench.step()
    bench.step()  # the next step, which has begun, is the first to write the third block
    assert bench.runner.begun == 1
    bench.engine.cancel("a")
    assert bench.engine.has_work, "the step is still under way"
    (ledger,) = bench.engine.ledgers
    holder = Holder(HoldKind.RESERVED, "b")
    assert bench.engine.reserve(holder, [], 7) is None
    room = bench.engine.reserve(holder, [], 6)  # for KV that comes from another worker meanwhile
    assert room is not None
    prompt, value = tokens(6 * BLOCK, seed=9), 0
    for position, token in enumerate(prompt):
        value = slot_value(0, value, token)
        bench.runner.pools[0][room[0].blocks[position // BLOCK]][position % BLOCK] = value
    result = bench.step()
    assert result.decode_tokens == 1
    assert not result.outputs
    assert ledger.counts().free == 1
    request = make_request("b", prompt, max_tokens=3)
    first = ChoiceState(choice=ChoiceIndex(0), tokens=expected(request)[:1])
    bench.requests["b"] = make_request("b", prompt, max_tokens=3, forced=(first,))
    bench.engine.add_prefilled(request, holder, (room[0].blocks,), (first,))
    bench.finish("b")


@WHEN
def test_preempted_choices_come_back_with_the_right_tokens(ahead: str) -> None:
    bench = Bench(num_blocks=16, ahead=ahead)
    for i in range(3):
        bench.add(f"r{i}", tokens(9, seed=i), max_tokens=14, arrival_s=float(i))
    for _ in range(4):
        bench.step()
    begun = bench.runner.begun
    assert begun
    assert bench.engine.preempt_for(0.0, [8]) == ["r2", "r1"]
    holder = Holder(HoldKind.RESERVED, "x")
    assert bench.engine.reserve(holder, [], 8) is not None
    bench.step()
    assert ("r1", 0) in bench.outputs
    bench.engine.blocks.release_holder(holder)
    bench.finish()


@WHEN
def test_whoever_comes_waits_for_one_step_more_at_most(ahead: str) -> None:
    bench = Bench(ahead=ahead)
    bench.add("a", tokens(6), max_tokens=30)
    for _ in range(3):
        bench.step()
    bench.add("b", tokens(10, seed=5), max_tokens=3, arrival_s=1.0)
    begun = bench.runner.begun
    assert bench.step().prefill_tokens == 0
    assert bench.runner.begun == begun, "nothing begins while somebody waits"
    assert bench.step().prefill_tokens == 10
    bench.finish("a", "b")


@WHEN
@pytest.mark.parametrize("max_model_len", [256, 16])
def test_no_step_begins_behind_the_one_that_brings_the_last_token(ahead: str, max_model_len: int) -> None:
    """Even where the context ends there too."""
    bench = Bench(max_model_len=max_model_len, ahead=ahead)
    bench.add("a", tokens(6), max_tokens=10)
    bench.finish("a")
    assert bench.runner.steps == 10, "a step a token"
    assert bench.runner.begun == 8, "all but the prompt's and the first of the decodes"


@WHEN
@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.3}, {"logit_bias": ((5, 2.0),)}, {"min_tokens": 4}, {"presence_penalty": 0.5}]
)
def test_choices_that_depend_on_tokens_before_wait_for_them(ahead: str, settings: dict[str, Any]) -> None:
    bench = Bench(ahead=ahead)
    bench.add("a", tokens(6), max_tokens=12, **settings)
    bench.add("b", tokens(5, seed=1), max_tokens=12)
    for _ in range(6):
        bench.step()
    assert bench.runner.begun == 0
    bench.engine.cancel("a")
    bench.finish("b")
    assert bench.runner.begun > 0


@WHEN
def test_a_begun_step_that_fails_ends_its_own_requests_after_the_tokens_before(ahead: str) -> None:
    request = make_request("a", tokens(6), 20)
    answer = expected(request)
    place = next(i for i in range(4, 19) if answer[i] not in answer[:i] + request.prompt)
    bench = Bench(ahead=ahead, broken=answer[place])
    bench.add("a", request.prompt, max_tokens=20)
    bench.run()
    assert list(bench.failed) == ["a"]
    assert bench.outputs["a", 0] == list(answer[: place + 1])
    bench.engine.probe()
    bench.check_idle()


@WHEN
def test_a_begun_step_behind_one_that_fails_is_forgotten(ahead: str) -> None:
    request = make_request("a", tokens(6), 20)
    answer = expected(request)
    place = next(i for i in range(4, 19) if answer[i] not in answer[:i] + request.prompt)
    bench = Bench(ahead=ahead, poison=answer[place])
    bench.add("a", request.prompt, max_tokens=20)
    others = (make_request("b", tokens(6, seed=seed), 20) for seed in range(1, 99))
    other = next(one for one in others if answer[place] not in one.prompt + expected(one))
    bench.add("b", other.prompt, max_tokens=20)
    while not bench.step().failed:
        assert bench.engine.has_work
    bench.engine.probe()  # beside the step that has begun for the other one
    bench.finish("b")
    assert list(bench.failed) == ["a"]
    assert bench.outputs["a", 0] == list(answer[: place + 1])


@WHEN
def test_a_begun_steps_time_runs_from_the_end_of_the_one_before(ahead: str) -> None:
    bench = Bench(ahead=ahead)
    bench.runner.duration_s = lambda batch: 0.25
    bench.add("a", tokens(6), max_tokens=8)
    before = bench.step()
    while bench.engine.has_work:
        bench.runner.clock.advance(0.125)  # what the host does between two steps
        result = bench.step()
        if bench.runner.begun > 1:
            assert result.started_s == before.ended_s
        assert result.ended_s > result.started_s
        before = result
    assert bench.engine.pace.prefill_speed.tokens_per_s >= 0


@WHEN
def test_who_is_older_than_all_disturbs_nobody(ahead: str) -> None:
    bench = Bench(ahead=ahead)
    bench.add("a", tokens(6), max_tokens=12)
    for _ in range(3):
        bench.step()
    assert bench.engine.preempt_for(math.inf, [1]) == []
    bench.finish("a")
