"""The engine over arithmetic: under any schedule, the tokens are those of a computation without blocks."""

from typing import Any

import pytest

from tandem.core.block_hash import chain
from tandem.core.errors import ContextLengthError, InternalError, InvalidRequestError, WorkerLostError
from tandem.core.handoff import ChoiceState
from tandem.core.ids import ChoiceIndex, GroupId
from tandem.core.ledger import Holder, HoldKind
from tandem.core.state_enums import FinishReason
from tandem.engine.request import PrefillSlice, RequestKind
from tests.unit.engine.arithmetic import BLOCK, EOS, ROOT, Bench, cached_blocks, expected, make_request, tokens

G0 = GroupId(0)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 16, 33])
def test_tokens_do_not_depend_on_chunks(groups: int, chunk: int, prompt: int) -> None:
    bench = Bench(groups=groups, chunk_tokens=chunk, max_step_tokens=max(chunk, 8))
    bench.add("a", tokens(prompt))
    bench.finish("a")


def test_many_at_once_share_steps_and_prefixes() -> None:
    bench = Bench(num_blocks=200, max_step_tokens=16)
    for i in range(12):
        bench.add(f"r{i}", tokens(9 + i, seed=i % 3), max_tokens=5 + i % 4)
    bench.finish()
    assert bench.runner.most_sequences > 4


def test_a_repeated_prompt_hits_all_full_blocks_but_computes_one_token() -> None:
    bench = Bench(groups=2)
    bench.add("a", tokens(12), max_tokens=2)
    bench.run()
    computed = bench.runner.tokens
    bench.add("b", tokens(12), max_tokens=2)
    result = bench.step()
    assert result.admitted == {"b": 8}
    assert bench.engine.cached_tokens("b") == 8
    bench.finish("b")
    assert bench.runner.tokens - computed == 4 + 1


def test_generated_blocks_are_cached_too() -> None:
    bench = Bench()
    first = bench.add("a", tokens(5), max_tokens=8)
    bench.run()
    answer = tuple(bench.outputs["a", 0])
    bench.add("b", (*first.prompt, *answer, 9, 9), max_tokens=3)
    assert bench.step().admitted == {"b": 12}
    bench.finish("b")


def test_a_hit_needs_every_group() -> None:
    bench = Bench(groups=2)
    bench.add("a", tokens(13), max_tokens=2)
    bench.run()
    bench.engine.ledgers[1].evict_cached()
    bench.add("b", tokens(13), max_tokens=2)
    assert bench.step().admitted == {"b": 0}
    bench.finish("b")


def test_blocks_are_published_only_after_their_step() -> None:
    bench = Bench()
    bench.add("a", tokens(8), max_tokens=2)
    seen: list[int] = []

    def hook(slices: tuple[PrefillSlice, ...], first: int, last: int) -> None:
        seen.append(len(cached_blocks(bench.engine, ROOT, tokens(8), G0)))

    bench.engine.step(hook)
    assert seen == [0, 0]
    assert len(cached_blocks(bench.engine, ROOT, tokens(8), G0)) == 2
    events = bench.engine.blocks.take_events()
    assert [event.hash for event in events if event.is_stored] == chain(ROOT, tokens(8), BLOCK)
    assert bench.engine.blocks.take_events() == []


def test_the_layer_hook_hears_of_every_chunk() -> None:
    bench = Bench(chunk_tokens=8)
    bench.add("a", tokens(11), max_tokens=1)
    heard: list[tuple[int, int, bool, int, int]] = []
    while bench.engine.has_work:
        bench.engine.step(lambda s, first, last: heard.extend((p.start, p.end, p.is_last, first, last) for p in s))
    assert heard == [(0, 8, False, 0, 0), (0, 8, False, 0, 1), (8, 11, True, 0, 0), (8, 11, True, 0, 1)]


def test_the_finishing_eos_is_reported_with_stop() -> None:
    bench = Bench()
    for seed in range(40):
        bench.add(f"r{seed}", tokens(6, seed), max_tokens=40, ignore_eos=False)
    bench.run()
    stopped = [place for place, reason in bench.ended.items() if reason is FinishReason.STOP]
    assert stopped
    assert all(bench.outputs[place][-1] == EOS for place in stopped)
    bench.check_outputs()


def test_stop_token_ids_end_a_choice() -> None:
    plain = expected(make_request("x", tokens(6), 8))
    bench = Bench()
    bench.add("a", tokens(6), max_tokens=8, stop_token_ids=(plain[3],))
    bench.run()
    assert bench.ended["a", 0] is FinishReason.STOP
    assert tuple(bench.outputs["a", 0]) == plain[: plain.index(plain[3]) + 1]


@pytest.mark.parametrize("prompt", [3, 4, 6, 8])
@pytest.mark.parametrize("groups", [1, 2])
def test_choices_share_the_prompt_and_copy_its_tail(prompt: int, groups: int) -> None:
    bench = Bench(groups=groups)
    bench.add("a", tokens(prompt), max_tokens=7, n=3, temperature=1.0, seed=5)
    bench.step()
    assert bench.runner.tokens == prompt
    held = bench.engine.ledgers[0].counts().request
    assert held == -(-prompt // BLOCK), "full and partial prompt blocks are shared until somebody writes"
    bench.finish("a")
    assert bench.runner.copies == (2 * groups if prompt % BLOCK else 0)
    assert len({tuple(bench.outputs["a", c]) for c in range(3)}) > 1


def test_preempted_requests_come_back_and_say_the_same() -> None:
    bench = Bench(num_blocks=10, max_step_tokens=16)
    for i in range(3):
        bench.add(f"r{i}", tokens(8, i), max_tokens=16)
    bench.finish()
    assert bench.preempted
    assert "r0" not in bench.preempted, "the oldest is never preempted"


def test_what_a_preempted_request_computes_again_is_told() -> None:
    bench = Bench(num_blocks=10, max_step_tokens=16)
    for i in range(3):
        bench.add(f"r{i}", tokens(8, i), max_tokens=16)
    computed = recomputed = 0
    while bench.engine.has_work:
        result = bench.step()
        computed, recomputed = computed + result.prefill_tokens, recomputed + result.recomputed_tokens
    assert bench.preempted
    assert recomputed > 0
    # Besides what it had, a request that returns computes the token that it was about to.
    assert computed == 3 * 8 + recomputed + len(bench.preempted)


def test_choices_survive_preemption() -> None:
    bench = Bench(num_blocks=14, max_step_tokens=16)
    bench.add("old", tokens(8, 1), max_tokens=24)
    bench.add("a", tokens(6, 2), max_tokens=12, n=3, temperature=1.0, seed=9)
    bench.finish()
    assert "a" in bench.preempted


def _forced(request_outputs: dict[int, tuple[int, ...]]) -> tuple[ChoiceState, ...]:
    return tuple(ChoiceState(choice=ChoiceIndex(c), tokens=t) for c, t in request_outputs.items())


@pytest.mark.parametrize("lengths", [{0: 1}, {0: 5}, {0: 3, 1: 6}, {1: 2}, {0: 1, 1: 1}])
def test_forced_outputs_are_computed_but_not_reported(lengths: dict[int, int]) -> None:
    n = 2 if 1 in lengths else 1
    options: dict[str, Any] = {"n": n, "temperature": 0.8, "seed": 3, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    whole = make_request("x", tokens(7), 9, **options)
    known = _forced({c: expected(whole, c)[:length] for c, length in lengths.items()})
    bench = Bench()
    bench.add("a", tokens(7), 9, forced=known, **options)
    bench.finish("a")
    for choice in range(n):
        assert expected(bench.requests["a"], choice) == expected(whole, choice)
    bench.check_idle()


def test_forced_choices_that_ended_stay_ended() -> None:
    known = (ChoiceState(choice=ChoiceIndex(0), tokens=(5, 6), finish=FinishReason.STOP),)
    bench = Bench()
    bench.add("a", tokens(7), 4, n=2, temperature=1.0, forced=known)
    bench.run()
    assert [choice for _, choice in bench.outputs] == [1]
    bench.check_idle()
    with pytest.raises(InvalidRequestError, match="finished"):
        bench.add("b", tokens(7), 4, forced=known)


def test_a_replay_at_its_limit_tells_its_last_token_again() -> None:
    request = make_request("a", tokens(5), 3, forced=_forced({0: (5, 6, 7)}))
    bench = Bench()
    bench.engine.add(request)
    assert bench.engine.has_work
    (output,) = bench.engine.step().outputs
    assert (output.index, output.token, output.finish) == (2, 7, FinishReason.LENGTH)
    assert bench.engine.cached_tokens("a") == 0
    bench.check_idle()


def test_cancel_in_every_phase_returns_all_blocks() -> None:
    for steps in range(8):
        bench = Bench(num_blocks=10, max_step_tokens=8)
        bench.add("old", tokens(8, 1), max_tokens=20)
        bench.add("a", tokens(10, 2), max_tokens=10, n=2, temperature=1.0)
        for _ in range(steps):
            bench.step()
        assert bench.engine.cancel("a") is True
        assert bench.engine.cancel("a") is False
        bench.engine.scheduler.check_integrity()
        assert "a" not in bench.engine.in_flight()
        bench.finish("old")


def test_release_inside_a_layer_hook() -> None:
    bench = Bench()
    bench.add("a", tokens(8, 1), max_tokens=2)
    bench.add("b", tokens(8, 2), max_tokens=2)

    def hook(slices: tuple[PrefillSlice, ...], first: int, last: int) -> None:
        bench.engine.cancel("a")

    result = bench.engine.step(hook)
    assert {output.key for output in result.outputs} == {"b"}
    bench.engine.scheduler.check_integrity()
    bench.engine.cancel("b")
    bench.check_idle()


def test_prefill_only_keeps_its_blocks_until_release() -> None:
    bench = Bench(groups=2, chunk_tokens=4)
    bench.add("a", tokens(10), max_tokens=5, kind=RequestKind.PREFILL_ONLY)
    bench.step()
    table = bench.engine.block_table("a", G0)
    assert len(table) == 3, "all prompt blocks are there from the first chunk on"
    bench.run()
    assert bench.engine.block_table("a", G0) == table
    assert tuple(bench.outputs["a", 0]) == expected(bench.requests["a"], groups=2)[:1]
    assert bench.engine.in_flight() == ["a"]
    assert not bench.engine.has_work
    bench.engine.cancel("a")
    bench.check_idle()
    assert len(cached_blocks(bench.engine, ROOT, tokens(10), GroupId(1))) == 2
    with pytest.raises(KeyError):
        bench.engine.block_table("a", G0)


@pytest.mark.parametrize("lengths", [{}, {0: 2}, {0: 5, 1: 1}, {0: 2, 1: 3, 2: 9}])
def test_prefill_only_replays_sample_one_token_a_choice(lengths: dict[int, int]) -> None:
    whole = make_request("x", tokens(6), 12, n=3, temperature=1.0, seed=4)
    known = _forced({c: expected(whole, c)[:length] for c, length in lengths.items()})
    bench = Bench(num_blocks=16)
    bench.add(
        "a", tokens(6), 12, n=3, temperature=1.0, seed=4, forced=known, kind=RequestKind.PREFILL_ONLY
    )  # fmt: skip
    bench.run()
    for choice in range(3):
        index = lengths.get(choice, 0)
        assert bench.outputs["a", choice] == [expected(whole, choice)[index]]
    bench.engine.cancel("a")
    bench.check_idle()


def test_prefill_only_is_never_preempted() -> None:
    bench = Bench(num_blocks=11, max_step_tokens=12)
    bench.add("old", tokens(8, 1), max_tokens=20)
    bench.add("mid", tokens(8, 2), max_tokens=20)
    bench.add("p", tokens(12, 3), kind=RequestKind.PREFILL_ONLY)
    for _ in range(40):
        bench.step()
    assert "p" not in bench.preempted
    bench.engine.cancel("p")
    bench.finish("old", "mid")


def test_a_device_that_is_broken_for_good_ends_the_engine() -> None:
    bench = Bench(broken=31)
    bench.add("bad", (*tokens(8, 2), 31), max_tokens=6)
    bench.run()
    bench.engine.probe()  # it was the request: one token is computed, and leaves nothing behind
    bench.check_idle()
    bench.runner.broken = 0
    with pytest.raises(WorkerLostError, match="cannot compute even one token"):
        bench.engine.probe()
    bench.check_idle()


def test_nan_logits_fail_one_request_and_forget_what_it_cached() -> None:
    bench = Bench(poison=31, chunk_tokens=4)  # two blocks are cached before the bad token is seen
    bench.add("good", tokens(9, 1), max_tokens=6)
    bench.add("bad", (*tokens(8, 2), 31), max_tokens=6)
    bench.finish("good")
    assert list(bench.failed) == ["bad"]
    assert isinstance(bench.failed["bad"], InternalError)
    assert cached_blocks(bench.engine, ROOT, tokens(8, 2), G0) == []


def test_bad_blocks_are_not_found_while_a_push_holds_them_nor_afterwards() -> None:
    bench = Bench(poison=31, chunk_tokens=4)
    bench.add("bad", (*tokens(8, 2), 31), max_tokens=6)
    bench.step()
    bench.step()
    (ledger,), push = bench.engine.ledgers, Holder(HoldKind.PUSHING, "bad")
    ledger.share(push, bench.engine.block_table("bad", G0)[:2])
    assert len(cached_blocks(bench.engine, ROOT, tokens(8, 2), G0)) == 2
    bench.run()
    assert list(bench.failed) == ["bad"]
    assert len(ledger.blocks_of(push)) == 2
    assert cached_blocks(bench.engine, ROOT, tokens(8, 2), G0) == []
    ledger.release(push)
    assert cached_blocks(bench.engine, ROOT, tokens(8, 2), G0) == []
    bench.check_idle()


def test_an_exception_of_the_runner_fails_that_step_only() -> None:
    bench = Bench(broken=31)
    bench.add("bad", (*tokens(8, 2), 31), max_tokens=6)
    bench.run()
    assert isinstance(bench.failed["bad"], InternalError)
    assert "a broken step" in str(bench.failed["bad"])
    bench.add("good", tokens(9, 1), max_tokens=6)
    bench.finish("good")


def test_what_can_never_fit_is_refused_at_once() -> None:
    bench = Bench(num_blocks=8, max_model_len=64, max_sequences=8)
    with pytest.raises(ContextLengthError, match="context length"):
        bench.add("a", tokens(60), max_tokens=5)
    with pytest.raises(ContextLengthError, match="KV blocks"):
        bench.add("a", tokens(30), max_tokens=4)
    bench.engine.check(make_request("a", tokens(30), 3))
    with pytest.raises(ContextLengthError, match="KV blocks"):
        bench.add("a", tokens(6), max_tokens=20, n=2)
    with pytest.raises(InvalidRequestError, match="empty"):
        bench.add("a", ())
    with pytest.raises(InvalidRequestError, match="token ids"):
        bench.add("a", (3, 99))
    with pytest.raises(InvalidRequestError, match="choices run at once"):
        bench.add("a", tokens(3), n=9)
    with pytest.raises(InvalidRequestError, match="forced"):
        bench.add("a", tokens(3), forced=_forced({1: (4,)}))
    bench.check_idle()
    bench.add("a", tokens(3))
    with pytest.raises(InternalError, match="already"):
        bench.add("a", tokens(3))


def test_what_just_fits_runs() -> None:
    bench = Bench(num_blocks=8)
    bench.add("a", tokens(30), max_tokens=3)
    bench.add("b", tokens(6), max_tokens=11, n=2, temperature=1.0)  # 1 shared block, 3 + 3 of their own, 1 spare
    bench.add("c", tokens(6), max_tokens=7, n=3, temperature=1.0)
    bench.finish()


def test_logprobs_come_out_with_tokens() -> None:
    bench = Bench()
    bench.engine.add(make_request("a", tokens(3), 2, logprobs=3))
    (output,) = bench.engine.step().outputs
    assert output.logprob is not None
    assert output.logprob.token == output.token == output.logprob.top[0][0]
    assert len(output.logprob.top) == 3


def test_replays_set_their_blocks_aside_and_cannot_lock_each_other_out() -> None:
    whole = make_request("x", tokens(4), 14, n=2, temperature=1.0)
    known = _forced({c: expected(whole, c)[:12] for c in range(2)})
    bench = Bench(num_blocks=10, chunk_tokens=4, max_step_tokens=16)
    for key in ("a", "b"):  # 7 blocks each
        bench.add(key, tokens(4), 14, n=2, temperature=1.0, forced=known, kind=RequestKind.PREFILL_ONLY)
    for _ in range(20):
        bench.step()
    assert bench.engine.in_flight() == ["a", "b"]
    assert len(bench.outputs) == 2
    bench.engine.cancel("a")
    bench.run()
    assert len(bench.outputs) == 4
    bench.engine.cancel("b")
    bench.check_idle()


def test_results_count_tokens_and_time() -> None:
    bench = Bench()
    bench.runner.duration_s = lambda batch: 0.5
    bench.add("a", tokens(6), max_tokens=3)
    results = [bench.step() for _ in range(3)]
    assert [(r.prefill_tokens, r.decode_tokens) for r in results] == [(6, 0), (0, 1), (0, 1)]
    assert [r.ended_s - r.started_s for r in results] == [0.5] * 3
    empty = bench.step()
    assert (empty.outputs, empty.prefill_tokens, empty.decode_tokens) == ((), 0, 0)


def test_results_count_what_a_step_attends_to() -> None:
    bench = Bench(max_step_tokens=8)
    bench.add("a", tokens(6), max_tokens=3)
    bench.add("b", tokens(7, 1), max_tokens=2, n=2)

    def counts() -> tuple[int, int, int, float]:
        step = bench.step()
        computed = step.prefill_tokens + step.decode_tokens
        return computed, step.logit_rows, step.context_tokens, step.attended + computed / 2

    # Positions 0 to 5 of a, which attend to 1 to 6 tokens: its budget's whole blocks leave 2 tokens, less than a block.
    assert counts() == (6, 1, 6, 21)
    # a's position 6, all of b: one row for both choices.
    assert counts() == (8, 2, 7 + 7, 7 + 28)
    # a's position 7, and 7 of either choice of b; then no sequence is left.
    assert counts() == (3, 3, 3 * 8, 3 * 8)
    assert counts() == (0, 0, 0, 0)


def test_the_youngest_make_way_for_an_older_ticket_and_still_answer() -> None:
    bench = Bench(24, max_step_tokens=64)
    for number in range(4):
        bench.add(f"r{number}", tokens(14, seed=number), 6, arrival_s=float(number))
    bench.step()
    assert bench.engine.growth_blocks == 4
    available = bench.engine.ledgers[0].available
    assert bench.engine.preempt_for(9.0, [1]) == [], "nobody is younger"
    assert bench.engine.preempt_for(0.5, [24]) == [], "not even all of them would do"
    assert bench.engine.ledgers[0].available == available
    assert bench.engine.preempt_for(0.5, [available]) == ["r3"], "one is enough"
    assert bench.engine.scheduler.oldest_preempted_s == 3.0
    bench.finish()


def test_the_oldest_that_cannot_grow_is_known_until_it_can() -> None:
    bench = Bench(6)
    bench.add("a", tokens(8), 12)
    bench.step()
    ledger = bench.engine.ledgers[0]
    tickets = Holder(HoldKind.RESERVED, "b/1")
    assert ledger.allocate(tickets, ledger.available) is not None
    for _ in range(8):
        bench.step()
    assert bench.engine.scheduler.is_starved
    assert bench.engine.is_short_of_blocks
    ledger.release(tickets)
    bench.finish("a")
    assert not bench.engine.scheduler.is_starved
