"""What a step is made of: budgets, order, admission, preemption; and the pace that sizes chunks."""

from __future__ import annotations

import pytest

from tandem.core.errors import ConfigError
from tandem.core.ledger import Holder, HoldKind
from tandem.core.prefill_queue import PrefillSpeed, QueueRules, attended
from tandem.engine.pace import TELLING_TOKENS, SchedulerConfig, StepPace
from tandem.engine.request import RequestKind
from tests.unit.engine.arithmetic import BLOCK, Bench, tokens


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
    bench.run()
    for key in bench.requests:
        bench.check_outputs(key)


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
    bench.run()
    for key in bench.requests:
        bench.check_outputs(key)


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


def test_a_preempted_request_returns_before_a_newer_one_is_admitted() -> None:
    bench = Bench(num_blocks=9, max_step_tokens=32)
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
    bench.run()
    for key in bench.requests:
        bench.check_outputs(key)


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
    bench.run()
    bench.check_outputs("a")


def test_no_more_choices_run_than_allowed() -> None:
    bench = Bench(max_sequences=4)
    for i in range(6):
        bench.add(f"r{i}", tokens(3, i), max_tokens=6, n=1 + i % 3, temperature=1.0)
    bench.run()
    assert bench.runner.most_sequences <= 4
    for key in bench.requests:
        bench.check_outputs(key)
    bench.check_idle()


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
    bench.run()
    assert bench.preempted == []
    bench.check_outputs("b")


# ---- pace ------------------------------------------------------------------------------------------------------------


def test_chunks_shrink_to_the_time_budget() -> None:
    bench = Bench(num_blocks=200, max_step_tokens=64, max_step_s=0.02)
    bench.runner.duration_s = lambda batch: 0.001 * len(batch.token_ids)  # 1000 tokens/s
    bench.add("a", tokens(200), max_tokens=2)
    first, second = bench.step(), bench.step()
    assert first.prefill_tokens == 64
    assert second.prefill_tokens == 20


def test_a_speed_is_told_when_it_tells_something_and_counts_by_tokens() -> None:
    """10 ms a step besides 1 ms a token: many short prompts hardly change what long ones say."""
    pace = StepPace(SchedulerConfig(), 16)
    pace.observe(TELLING_TOKENS - 1, 0, 0.521)
    assert pace.prefill_speed == PrefillSpeed()
    for _ in range(10):
        pace.observe(1000, 0, 1.01)
        pace.observe(10, 0, 0.02)
    assert pace.prefill_speed.tokens_per_s == pytest.approx(1000, rel=0.03)


def test_decode_time_is_taken_off_the_budget() -> None:
    pace = StepPace(SchedulerConfig(max_step_s=0.1), 4)
    assert pace.chunk_budget(0) == 512
    pace.observe(100, 0, 0.1)
    assert pace.chunk_budget(0) == 100
    pace.observe(0, 3, 0.06)
    assert pace.chunk_budget(3) == 40
    assert pace.chunk_budget(0) == 100
    pace.observe(40, 3, 0.1)  # 40 tokens in what decoding left: the rate stands
    assert pace.prefill_tokens_per_s == pytest.approx(1000)
    pace.observe(0, 3, 10.0)
    assert pace.chunk_budget(3) == 4, "at least one block"


def test_a_slow_start_recovers() -> None:
    """Small chunks measure a low rate; the rate must still climb to what larger ones reach."""
    pace = StepPace(SchedulerConfig(max_step_s=0.2), 16)
    pace.observe(16, 0, 0.4)
    for _ in range(60):
        chunk = pace.chunk_budget(0)
        pace.observe(chunk, 0, 0.02 + chunk / 4000)
    assert chunk >= 512


def test_steps_of_no_duration_teach_nothing() -> None:
    pace = StepPace(SchedulerConfig(), 16)
    pace.observe(100, 0, 0.0)
    assert pace.prefill_tokens_per_s is None


def test_what_context_costs_is_measured() -> None:
    """Chunks of a long prompt and whole short ones; a step that something held up hardly counts."""
    true, pace = PrefillSpeed(tokens_per_s=5000.0, context_s=1e-7), StepPace(SchedulerConfig(), 16)
    assert pace.prefill_speed == PrefillSpeed()
    for number in range(200):
        start = number % 40 * 500
        pairs = attended(start, start + 500)
        late_s = 2.0 if number % 50 == 7 else 0.0
        pace.observe(500, 0, true.seconds(500, pairs) + late_s, pairs)
    found = pace.prefill_speed
    assert found.tokens_per_s == pytest.approx(true.tokens_per_s, rel=0.05)
    assert found.context_s == pytest.approx(true.context_s, rel=0.1)


def test_steps_that_are_alike_say_nothing_of_context() -> None:
    pace = StepPace(SchedulerConfig(), 16)
    for _ in range(20):
        pace.observe(500, 0, 0.1, attended(0, 500))
    assert pace.prefill_speed.tokens_per_s == pytest.approx(5000)
    assert pace.prefill_speed.context_s == 0.0
    for number in range(20):  # later tokens that are faster are noise
        pace.observe(500, 0, 0.1 - 0.001 * number, attended(500 * number, 500 * number + 500))
    assert pace.prefill_speed.context_s == 0.0


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


@pytest.mark.parametrize("name", ["max_step_tokens", "max_step_s", "max_sequences", "chunk_tokens"])
def test_a_config_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SchedulerConfig(**{name: 0})  # type: ignore[arg-type]
