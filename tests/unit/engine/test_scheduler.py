"""The contents of a step: budgets, order, admission, preemption."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.core.handoff import ChoiceState
from tandem.core.ids import ChoiceIndex
from tandem.core.ledger import Holder, HoldKind, LedgerError
from tandem.core.prefill_queue import FIRST_COME, QueueRules, attended
from tandem.engine.request import EngineRequest, RequestKind
from tandem.engine.scheduler import Scheduler
from tandem.engine.step_budget import TELLING_TOKENS
from tests.unit.engine.arithmetic import BLOCK, Bench, expected, make_request, tokens


def known(request: EngineRequest, *lengths: int) -> tuple[ChoiceState, ...]:
    """Return so many output tokens of its first choices, as a replay brings them."""
    return tuple(
        ChoiceState(choice=ChoiceIndex(choice), tokens=expected(request, choice)[:length])
        for choice, length in enumerate(lengths)
    )


def slices(bench: Bench) -> dict[str, int]:
    """Prompt tokens that one more step computes, by request."""
    return {part.key: part.end - part.start for part in bench.step().prefilled}


def test_decodes_come_first_and_chunks_fill_the_rest_with_whole_blocks() -> None:
    bench = Bench(max_step_tokens=16)
    for i in range(3):
        bench.add(f"d{i}", tokens(4, i), max_tokens=20)
    bench.step()
    bench.add("long", tokens(40, 9), max_tokens=2)
    result = bench.step()
    assert (result.decode_tokens, result.prefill_tokens) == (3, 12)
    assert slices(bench) == {"long": 12}
    bench.finish()


def test_a_waiting_prompt_gets_a_block_even_without_budget() -> None:
    bench = Bench(max_step_tokens=4, num_blocks=200)
    for i in range(4):
        bench.add(f"d{i}", tokens(1, i), max_tokens=30)
    for _ in range(4):
        bench.step()
    bench.add("p", tokens(9, 7), max_tokens=2)
    result = bench.step()
    assert (result.decode_tokens, result.prefill_tokens) == (4, BLOCK)


def test_a_prompt_that_starts_inside_a_block_ends_on_a_boundary() -> None:
    bench = Bench(max_step_tokens=8)
    bench.add("a", tokens(6), max_tokens=8, n=1)
    bench.step()
    bench.engine.cancel("a")
    bench.add("b", tokens(6) + tokens(30, 3), max_tokens=2)
    result = bench.step()
    assert result.admitted == {"b": 4}
    assert [(part.start, part.end) for part in result.prefilled] == [(4, 12)]


def test_several_prompts_share_a_step_in_order_of_arrival() -> None:
    bench = Bench(max_step_tokens=16)
    bench.add("late", tokens(6, 1), arrival_s=2.0)
    bench.add("early", tokens(6, 2), arrival_s=1.0)
    bench.add("last", tokens(20, 3), arrival_s=3.0)
    assert slices(bench) == {"early": 6, "late": 6, "last": 4}


def test_one_request_takes_at_most_a_chunk() -> None:
    bench = Bench(max_step_tokens=32, chunk_tokens=8)
    bench.add("a", tokens(30, 1))
    bench.add("b", tokens(30, 2))
    assert slices(bench) == {"a": 8, "b": 8}


def test_shorter_prompts_go_between_the_chunks_of_longer_ones() -> None:
    bench = Bench(max_step_tokens=8, queue=QueueRules())
    bench.add("long", tokens(40, 1), max_tokens=1)
    assert slices(bench) == {"long": 8}
    bench.add("short", tokens(8, 2), max_tokens=1)
    assert slices(bench) == {"short": 8}
    assert slices(bench) == {"long": 8}
    bench.finish()


def test_who_has_waited_long_enough_is_overtaken_no_more() -> None:
    bench = Bench(max_step_tokens=8, queue=QueueRules(stretch=1000.0, max_overtake_s=5.0))
    bench.add("long", tokens(40, 1), max_tokens=1)
    bench.add("close", tokens(8, 2), max_tokens=1, arrival_s=2.0)
    bench.add("late", tokens(8, 3), max_tokens=1, arrival_s=6.0)
    order = [next(iter(slices(bench))) for _ in range(7)]
    assert order == ["close", *["long"] * 5, "late"]


def test_what_is_cached_is_no_work_that_is_left() -> None:
    bench = Bench(max_step_tokens=8, queue=QueueRules())
    bench.add("first", tokens(32, 1), max_tokens=1)
    bench.run()
    bench.add("half", tokens(16, 2), max_tokens=1)
    bench.add("most", tokens(32, 1) + tokens(4, 3), max_tokens=1)
    assert bench.engine.load().queued_tokens == 16 + 4
    assert next(iter(slices(bench))) == "most"
    bench.run()


def test_an_evicted_prefix_is_work_again() -> None:
    bench = Bench(max_step_tokens=8, queue=QueueRules())
    bench.add("first", tokens(32, 1), max_tokens=1)
    bench.run()
    bench.add("again", tokens(32, 1) + tokens(4, 3), max_tokens=1)
    assert bench.engine.load().queued_tokens == 4
    for ledger in bench.engine.ledgers:
        ledger.evict_cached()
    assert bench.engine.load().queued_tokens == 36
    bench.run()


def test_the_load_says_when_each_prompt_is_due() -> None:
    bench = Bench(max_step_tokens=8, queue=QueueRules(stretch=10.0, max_overtake_s=30.0))
    bench.add("long", tokens(40, 1), max_tokens=1)
    bench.step()
    bench.add("short", tokens(8, 2), max_tokens=1)
    load = bench.engine.load()
    assert sorted(row.tokens for row in load.queue) == [8, 32]
    due_s = {row.tokens: row.due_s for row in load.queue}
    assert due_s[8] < due_s[32]
    assert load.decoding_sequences == 0
    bench.run()


def test_a_prompt_that_cannot_be_done_in_time_comes_last() -> None:
    bench = Bench(max_step_tokens=8, queue=QueueRules())
    bench.add("hopeless", tokens(40, 1), max_tokens=1, deadline_s=-1.0)
    bench.add("other", tokens(40, 2), max_tokens=1, arrival_s=3.0)
    assert slices(bench) == {"other": 8}
    bench.run()


def test_the_first_that_finds_no_room_keeps_younger_ones_out() -> None:
    bench = Bench(num_blocks=10)
    bench.add("a", tokens(20, 1), max_tokens=8)
    bench.add("big", tokens(30, 2), max_tokens=2)
    bench.add("small", tokens(2, 3), max_tokens=2)
    bench.step()
    assert slices(bench) == {}
    bench.run()
    admitted = list(bench.outputs)
    assert admitted.index(("big", 0)) < admitted.index(("small", 0))
    bench.check_idle()


@pytest.mark.parametrize("queue", [FIRST_COME, QueueRules()], ids=["first come", "shortest first"])
def test_a_preempted_request_returns_before_a_newer_one_is_admitted(queue: QueueRules) -> None:
    bench = Bench(num_blocks=9, max_step_tokens=32, queue=queue)
    bench.add("a", tokens(8, 1), max_tokens=20)
    bench.add("b", tokens(8, 2), max_tokens=20)
    while not bench.preempted:
        bench.step()
    assert bench.preempted == ["b"]
    bench.add("new", tokens(1, 3), max_tokens=2)
    while ("new", 0) not in bench.outputs:
        before = len(bench.outputs["b", 0])
        bench.step()
    assert len(bench.outputs["b", 0]) > before or ("b", 0) in bench.ended
    bench.finish()


def test_the_youngest_goes_first() -> None:
    bench = Bench(num_blocks=12, max_step_tokens=32)
    for i in range(3):
        bench.add(f"r{i}", tokens(8, i), max_tokens=24)
    bench.run()
    assert bench.preempted[0] == "r2"
    assert "r0" not in bench.preempted


def test_the_oldest_waits_with_its_blocks_for_blocks_held_elsewhere() -> None:
    bench = Bench(num_blocks=6)
    bench.add("a", tokens(8), max_tokens=10)
    bench.step()
    ticket = Holder(HoldKind.RESERVED, "ticket")
    ledger = bench.engine.ledgers[0]
    assert ledger.allocate(ticket, ledger.available) is not None
    result = bench.step()
    assert (result.decode_tokens, result.preempted) == (0, ())
    assert bench.engine.has_work
    ledger.release(ticket)
    bench.finish("a")


def test_no_more_choices_run_than_allowed() -> None:
    bench = Bench(max_sequences=4)
    for i in range(6):
        bench.add(f"r{i}", tokens(3, i), max_tokens=6, n=1 + i % 3, temperature=1.0)
    bench.finish()
    assert bench.runner.most_sequences == 4


def test_prefill_only_requests_do_not_wait_for_decodes_to_end() -> None:
    bench = Bench(num_blocks=40)
    bench.add("d", tokens(4, 1), max_tokens=30)
    bench.add("p", tokens(12, 2), kind=RequestKind.PREFILL_ONLY)
    bench.step()
    assert ("p", 0) in bench.outputs


def test_load_counts_what_waits_and_runs() -> None:
    bench = Bench(num_blocks=10, max_step_tokens=8)
    bench.add("a", tokens(20, 1), max_tokens=2)
    bench.add("b", tokens(30, 2), max_tokens=2)
    bench.step()
    load = bench.engine.load()
    assert (load.queued_requests, load.running_requests, load.queued_tokens) == (1, 1, 12 + 30)


def test_admission_leaves_room_for_what_runs() -> None:
    bench = Bench(num_blocks=6)
    bench.add("a", tokens(9, 1), max_tokens=6)
    bench.step()
    bench.add("b", tokens(9, 2), max_tokens=8)  # would take the 3 blocks that are left, of which "a" soon needs one
    bench.finish("b")
    assert bench.preempted == []


def test_late_chunks_of_long_prompts_count_as_longer() -> None:
    """Both have 48 tokens left, and the longer one has many before them: the shorter one is due first."""
    rules = QueueRules(stretch=1000.0, max_overtake_s=1e6)
    bench = Bench(num_blocks=400, max_step_tokens=64, max_step_s=10.0, queue=rules)
    bench.runner.duration_s = lambda batch: sum(
        s.query_tokens * (0.001 + 1e-4 * (s.context_tokens - s.query_tokens / 2)) for s in batch.sequences
    )
    for seed in range(20, 20 + -(-TELLING_TOKENS // 192)):
        bench.add(f"earlier-{seed}", tokens(192, seed), max_tokens=1)
        for _ in range(3):
            bench.step()
    bench.add("long", tokens(192 + 48), max_tokens=2)
    for _ in range(3):
        bench.step()
    bench.add("short", tokens(48, 9), max_tokens=2)
    assert [row.tokens for row in sorted(bench.engine.load().queue)] == [48, 48]
    assert sorted(bench.engine.load().queue)[0].attended == attended(0, 48)
    assert bench.step().prefilled[0].key == "short"


def test_who_has_no_chunk_in_a_step_is_not_admitted_in_it() -> None:
    bench = Bench(max_step_tokens=9)
    for seed, (key, length) in enumerate((("a", 8), ("b", 1), ("c", 8))):
        bench.add(key, tokens(length, seed), max_tokens=2)
    result = bench.step()
    assert (result.admitted, result.prefill_tokens) == ({"a": 0, "b": 0}, 9)
    assert bench.step().admitted == {"c": 0}
    bench.run()


def test_who_runs_goes_on_where_the_first_in_the_queue_finds_no_room() -> None:
    bench = Bench(num_blocks=12, max_step_tokens=8, queue=QueueRules())
    bench.add("long", tokens(40, 1), max_tokens=1)
    bench.step()
    bench.add("short", tokens(12, 2), max_tokens=1)
    assert slices(bench) == {"long": 8}
    bench.finish()


def test_a_push_goes_on_in_the_step_that_preempts_somebody_before_it() -> None:
    bench = Bench(num_blocks=18, max_step_tokens=8, chunk_tokens=4)
    bench.add("old", tokens(8, 1), max_tokens=24)
    bench.add("mid", tokens(8, 2), max_tokens=24)
    while bench.step().decode_tokens < 2:
        pass
    bench.add("p", tokens(40, 3), kind=RequestKind.PREFILL_ONLY)
    while not (result := bench.step()).preempted:
        assert result.decode_tokens == 2
    assert result.preempted == ("mid",)
    assert [part.key for part in result.prefilled] == ["p"]


def test_a_prompt_of_hundreds_of_tokens_that_ends_inside_a_block() -> None:
    bench = Bench(num_blocks=120, max_model_len=400, max_step_tokens=150)
    bench.add("a", tokens(301))
    bench.finish("a")


def test_choices_of_a_replay_share_the_budget_of_a_step() -> None:
    options: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 6}
    whole = make_request("x", tokens(4), 12, **options)
    bench = Bench(max_step_tokens=8)
    bench.add("a", tokens(4), 12, forced=known(whole, 7, 7, 7), **options)
    while bench.engine.has_work:
        result = bench.step()
        assert result.prefill_tokens + result.decode_tokens <= 8
    bench.check_outputs("a")


def test_the_load_counts_everything() -> None:
    bench = Bench(max_step_tokens=8)
    bench.add("a", tokens(4, 1), max_tokens=9, n=2, temperature=1.0)
    bench.step()
    bench.add("b", tokens(30, 2), max_tokens=2)
    bench.step()
    bench.add("c", tokens(5, 3), max_tokens=2)
    load = bench.engine.load()
    assert (load.queued_requests, load.running_requests, load.decoding_sequences) == (1, 2, 2)
    assert load.queued_tokens == 26 + 5
    assert sorted((row.tokens, row.requests) for row in load.queue) == [(5, 1), (26, 1)]


def test_who_may_come_besides_those_that_run_wait_and_are_reserved() -> None:
    bench = Bench(max_sequences=4)
    engine = bench.engine
    assert engine.scheduler.has_turn_for(9, 0.0, 0), "alone, anything that the engine takes"
    assert engine.scheduler.has_turn_for(3, 0.0, 1)
    assert not engine.scheduler.has_turn_for(4, 0.0, 1)
    bench.add("runs", tokens(4), max_tokens=20, n=2, temperature=1.0)
    engine.scheduler.reserved_sequences = 0
    bench.step()
    assert engine.scheduler.has_turn_for(2, 5.0, 0)
    assert not engine.scheduler.has_turn_for(3, 5.0, 0)
    assert engine.scheduler.has_turn_for(1, 5.0, 1)
    assert not engine.scheduler.has_turn_for(2, 5.0, 1)
    bench.add("waits", tokens(4, 1), arrival_s=3.0)
    assert engine.scheduler.has_turn_for(1, 5.0, 0)
    assert not engine.scheduler.has_turn_for(2, 5.0, 0)
    assert not engine.scheduler.has_turn_for(2, 3.0, 0), "who came as early counts"
    assert engine.scheduler.has_turn_for(2, 2.9, 0), "who came later does not"


def test_reserved_choices_keep_others_out() -> None:
    bench = Bench(max_sequences=4)
    bench.engine.scheduler.reserved_sequences = 3
    bench.add("two", tokens(4, 1), n=2, temperature=1.0)
    assert bench.step().admitted == {}
    bench.engine.scheduler.reserved_sequences = 2
    assert bench.step().admitted == {"two": 0}
    bench.run()


def test_whose_turn_it_is_that_was_preempted() -> None:
    bench = Bench(num_blocks=9, max_step_tokens=32)
    bench.add("a", tokens(8, 1), max_tokens=20, arrival_s=10.5)
    assert not bench.engine.is_short_of_blocks
    assert bench.engine.scheduler.oldest_preempted_s is None, "it waits for the first time"
    bench.add("b", tokens(8, 2), max_tokens=20, arrival_s=20.5)
    while not bench.preempted:
        assert not bench.engine.is_short_of_blocks
        bench.step()
    bench.add("new", tokens(1, 3), max_tokens=2, arrival_s=30.5)
    assert bench.engine.is_short_of_blocks
    assert bench.engine.scheduler.oldest_preempted_s == 20.5
    bench.run()
    assert not bench.engine.is_short_of_blocks


def test_nobody_starves_who_got_a_block_or_has_gone() -> None:
    for is_cancelled in (True, False):
        bench = Bench(num_blocks=6)
        bench.add("a", tokens(8), max_tokens=12)
        bench.step()
        ledger, ticket = bench.engine.ledgers[0], Holder(HoldKind.RESERVED, "ticket")
        assert ledger.allocate(ticket, ledger.available) is not None
        bench.step()
        assert bench.engine.scheduler.is_starved
        if is_cancelled:
            bench.engine.cancel("a")
        else:
            ledger.release(ticket)
            bench.step()
            assert bench.engine.has_work
        assert not bench.engine.scheduler.is_starved


def test_a_choice_is_ended_once_and_no_other_with_it() -> None:
    bench = Bench()
    bench.add("a", tokens(6), max_tokens=6, n=4, temperature=1.0, seed=8)
    bench.step()
    for choice in (1, 1, 9):
        bench.engine.end_choice("a", choice)
    bench.unwanted.add(("a", 1))
    bench.finish("a")


def test_a_choice_that_is_left_alone_in_the_queue_is_computed_as_if_it_had_come_alone() -> None:
    """Its prompt and its output so far in one go: no other choice needs the prompt."""
    options: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 6}
    whole = make_request("x", tokens(4), 9, **options)
    bench = Bench()
    bench.add("a", tokens(4), 9, forced=known(whole, 5, 2, 3), **options)
    bench.engine.end_choice("a", 0)
    bench.engine.end_choice("a", 2)
    bench.unwanted |= {("a", 0), ("a", 2)}
    assert bench.step().prefill_tokens == 6
    bench.finish("a")


def four_that_run() -> Bench:
    """Each holds 4 blocks of 24, and came a second after the one before."""
    bench = Bench(24, max_step_tokens=64)
    for number in range(4):
        bench.add(f"r{number}", tokens(14, seed=number), 6, arrival_s=float(number))
    bench.step()
    assert bench.engine.ledgers[0].available == 8
    return bench


@pytest.mark.parametrize(
    ("arrival_s", "need", "victims"),
    [
        (0.5, 9, ["r3"]),
        (0.5, 10, ["r3", "r2"]),
        (-1.0, 19, ["r3", "r2", "r1"]),
        (-1.0, 20, []),
        (2.0, 9, ["r3"]),
        (3.0, 9, []),
    ],
    ids=["one", "one is too few", "all but the oldest", "the oldest never", "who came later", "nobody came later"],
)
def test_no_more_make_way_than_must(arrival_s: float, need: int, victims: list[str]) -> None:
    """One block is left for each choice that still runs."""
    bench = four_that_run()
    assert bench.engine.preempt_for(arrival_s, [need]) == victims
    bench.finish()


def test_a_push_that_is_younger_makes_no_way() -> None:
    bench = Bench(40, max_step_tokens=24)
    for number in range(2):
        bench.add(f"r{number}", tokens(14, number), 9, arrival_s=float(number))
    bench.step()
    bench.step()
    bench.add("pushed", tokens(60, 9), kind=RequestKind.PREFILL_ONLY, arrival_s=2.0)
    bench.step()
    assert bench.engine.ledgers[0].available == 17
    assert bench.engine.preempt_for(0.5, [19]) == ["r1"]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda scheduler: scheduler._waiting.pop(), "the waiting queue disagrees"),
        (lambda scheduler: scheduler._running.pop(), "the running queue disagrees"),
        (lambda scheduler: scheduler._running.reverse(), "out of order"),
        (lambda scheduler: scheduler._waiting.reverse(), "out of order"),
    ],
    ids=["one waits nowhere", "one runs nowhere", "running", "waiting"],
)
def test_queues_that_contradict_requests_are_noticed(damage: Callable[[Scheduler], object], what: str) -> None:
    bench = Bench(max_sequences=2)
    for number in range(4):
        bench.add(f"r{number}", tokens(4, number), arrival_s=float(number))
    bench.step()
    damage(bench.engine.scheduler)
    with pytest.raises(LedgerError, match=what):
        bench.engine.scheduler.check_integrity()
