"""The pace that sizes chunks: how fast prompts are computed, as measured, and how many of their tokens fit a step."""

import random
from dataclasses import dataclass, replace

import pytest

from tandem.core.config import WorkerSection
from tandem.core.errors import ConfigError
from tandem.core.prefill_queue import PrefillSpeed, QueueRules, attended
from tandem.engine.step_budget import TELLING_TOKENS, WITHOUT_DECODES, SchedulerConfig, StepPace


def test_a_speed_is_told_when_it_tells_something_and_counts_by_tokens() -> None:
    """10 ms a step besides 1 ms a token: many short prompts hardly change the speed from long ones."""
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
    assert (pace.chunk_budget(1), pace.chunk_budget(0)) == (100, 248)
    pace.observe(0, 3, 0.06)
    assert pace.chunk_budget(3) == 40
    assert pace.chunk_budget(0) == 300, "five times 0.06 s: of a step of 0.25 s a quarter would be fixed cost"
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


@pytest.mark.parametrize("name", ["max_step_tokens", "max_step_s", "max_sequences", "chunk_tokens"])
def test_a_config_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SchedulerConfig(**{name: 0})  # type: ignore[arg-type]


def test_an_engine_that_is_told_nothing_has_the_budgets_of_the_settings() -> None:
    section = WorkerSection()
    assert SchedulerConfig() == SchedulerConfig(
        max_step_tokens=section.max_step_tokens,
        max_step_s=section.max_step_s,
        max_sequences=section.max_sequences,
        chunk_tokens=section.chunk_tokens,
    )
    assert QueueRules() == QueueRules(stretch=section.queue_stretch, max_overtake_s=section.queue_max_overtake_s)


def test_chunks_are_whole_blocks() -> None:
    pace = StepPace(SchedulerConfig(max_step_s=0.1), 16)
    pace.observe(200, 0, 0.2)
    assert (pace.chunk_budget(1), pace.chunk_budget(0)) == (96, 240), "100 and 250 tokens fit"


def test_decodes_of_which_nothing_is_known_take_no_time() -> None:
    pace = StepPace(SchedulerConfig(max_step_s=0.1), 4)
    pace.observe(100, 7, 0.1)
    assert pace.prefill_tokens_per_s == pytest.approx(1000)
    assert pace.chunk_budget(3) == 100
    assert pace.chunk_budget(500) == 12, "512 tokens a step, decodes first"


def test_a_decode_step_that_was_held_up_makes_no_rate_out_of_bounds() -> None:
    pace = StepPace(SchedulerConfig(), 4)
    pace.observe(0, 3, 10.0)
    pace.observe(80, 3, 0.1)
    assert pace.prefill_tokens_per_s == pytest.approx(80 / 0.01), "a tenth of the step at least was prefill"


def test_one_step_alone_changes_a_rate_only_a_little() -> None:
    pace = StepPace(SchedulerConfig(), 4)
    pace.observe(100, 0, 0.1)
    pace.observe(100, 0, 0.05)
    assert pace.prefill_tokens_per_s is not None
    assert 1000 < pace.prefill_tokens_per_s < 1500


def test_a_time_that_ran_backwards_teaches_nothing() -> None:
    pace = StepPace(SchedulerConfig(), 16)
    pace.observe(1000, 0, -0.5)
    assert (pace.prefill_tokens_per_s, pace.prefill_speed) == (None, PrefillSpeed())


def test_as_soon_as_a_speed_is_told_it_is_what_was_measured() -> None:
    pace = StepPace(SchedulerConfig(), 16)
    pace.observe(TELLING_TOKENS, 0, TELLING_TOKENS / 2.5)
    assert pace.prefill_speed.tokens_per_s == pytest.approx(2.5)
    assert pace.prefill_speed.context_s == 0.0


def test_steps_that_agree_with_each_other_tell_exactly_what_they_cost() -> None:
    true, pace = PrefillSpeed(tokens_per_s=2.5, context_s=0.125), StepPace(SchedulerConfig(), 16)
    for tokens, pairs in ((400, 100.0), (400, 9000.0)):
        pace.observe(tokens, 0, true.seconds(tokens, pairs), pairs)
    assert pace.prefill_speed.tokens_per_s == pytest.approx(true.tokens_per_s)
    assert pace.prefill_speed.context_s == pytest.approx(true.context_s)


def test_what_was_slow_for_long_is_told_as_slow() -> None:
    """A machine that is throttled, or shared, from some moment on."""
    pace = StepPace(SchedulerConfig(), 16)
    for _ in range(500):
        pace.observe(500, 0, 0.1)
    for _ in range(4000):
        pace.observe(500, 0, 0.5)
    assert pace.prefill_speed.tokens_per_s == pytest.approx(1000, rel=0.02)
    assert pace.prefill_tokens_per_s == pytest.approx(1000, rel=0.001)


def test_no_token_is_taken_to_cost_less_than_nothing() -> None:
    """Long contexts were so slow that short ones would have to be computed in advance: then only the rate is
    reported."""
    pace = StepPace(SchedulerConfig(), 16)
    for _ in range(6):
        pace.observe(100, 0, 1.0, 100.0)
        pace.observe(100, 0, 200.0, 10_000.0)
    found = pace.prefill_speed
    assert found.context_s == 0.0
    assert 0.5 < found.tokens_per_s <= 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A prefill step takes `fixed_s` and `token_s` a token, `pair_s` for each token before it. With decodes it takes
    `decode_s` more, less `shared_s`."""

    fixed_s: float = 0.0
    token_s: float = 0.0023
    pair_s: float = 0.0
    decode_s: float = 0.06
    shared_s: float = 0.0
    noise: float = 0.0

    def serve(self, pace: StepPace, prompt_tokens: int, decodes: int = 0, seed: int = 1) -> list[tuple[int, float]]:
        """Compute a prompt in the chunks that `pace` allows; returns their tokens and seconds."""
        steps, start, draws = [], 0, random.Random(seed)
        while start < prompt_tokens:
            budget = pace.chunk_budget(decodes)
            assert 16 <= budget <= max(16, 512 - decodes)
            assert budget % 16 == 0 or budget == 512 - decodes
            end = min(prompt_tokens, (start + budget) // 16 * 16)
            pairs = attended(start, end)
            took_s = self.fixed_s + self.token_s * (end - start) + self.pair_s * pairs
            took_s += self.decode_s - self.shared_s if decodes else 0.0
            took_s *= 1 + self.noise * abs(draws.gauss(0, 1))
            pace.observe(end - start, decodes, took_s, pairs)
            steps.append((end - start, took_s))
            start = end
        if decodes:
            pace.observe(0, decodes, self.decode_s)
        return steps


SLOW = Machine(fixed_s=0.1)
WARM_UP = [(3, 0, 0.14), (1, 0, 0.1023)]
STARTS = {
    "nothing known": [],
    "warm": WARM_UP,
    "slow first step": [*WARM_UP, (409, 0, 5.0)],
    "slow first steps": [*WARM_UP, *[(409, 0, 5.0)] * 20],
    "slow small step": [*WARM_UP, (16, 0, 5.0)],
    "fast first step": [*WARM_UP, (409, 0, 0.01)],
    "short prompts alone": [*WARM_UP, *[(16, 0, 0.137)] * 50],
    "beside decodes alone": [*WARM_UP, *[(16, 3, 0.2)] * 50],
}


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("start", STARTS)
def test_from_no_start_do_chunks_end_small_where_steps_have_a_fixed_cost(start: str, noise: float) -> None:
    """A prompt soon takes at most a third longer than in one step, besides the noise."""
    machine, pace = replace(SLOW, noise=noise), StepPace(SchedulerConfig(), 16)
    for tokens, decodes, took_s in STARTS[start]:
        pace.observe(tokens, decodes, took_s)
    runs = [machine.serve(pace, 409, seed=seed) for seed in range(40)]
    whole_s = SLOW.fixed_s + 409 * SLOW.token_s
    times = [sum(took_s for _, took_s in steps) / whole_s for steps in runs]
    assert max(times[8:]) < 1.4
    assert pace.chunk_budget(0) >= 144, "176 tokens take four times the fixed cost"


@pytest.mark.parametrize("token_s", [0.01, 0.002, 0.0005])
def test_without_a_fixed_cost_every_step_keeps_the_time_bound(token_s: float) -> None:
    """Longer ones without decodes."""
    machine, pace = Machine(token_s=token_s, decode_s=0.02), StepPace(SchedulerConfig(), 16)
    pace.observe(1, 0, token_s)
    pace.observe(0, 3, machine.decode_s)
    for number in range(4):
        machine.serve(pace, 300 + 50 * number)
    fits = min(512, int(WITHOUT_DECODES * 0.2 / token_s) // 16 * 16)
    assert pace.chunk_budget(0) == pytest.approx(fits, abs=16)
    for decodes, bound_s in ((3, 0.2), (0, WITHOUT_DECODES * 0.2)):
        steps = [step for number in range(20) for step in machine.serve(pace, 1000 + number, decodes=decodes)]
        assert max(took_s for _, took_s in steps) <= bound_s + 1e-9


def test_with_decodes_the_time_bound_holds() -> None:
    """However much of what is left goes into the fixed cost; a single block goes in any case."""
    machine, pace = replace(SLOW, shared_s=0.06), StepPace(SchedulerConfig(), 16)
    for tokens, decodes, took_s in WARM_UP:
        pace.observe(tokens, decodes, took_s)
    machine.serve(pace, 409)
    for number in range(40):
        steps = machine.serve(pace, 200 + 37 * number % 300, decodes=3)
    assert max(took_s for tokens, took_s in steps if tokens > 16) <= 0.2


def test_after_a_warm_up_the_time_bound_holds_beside_decodes() -> None:
    """The rate of its small steps is all that is known; alone, a prompt shows another."""
    pace = StepPace(SchedulerConfig(), 16)
    for tokens, decodes, took_s in WARM_UP:
        pace.observe(tokens, decodes, took_s)
    assert (pace.chunk_budget(0), pace.chunk_budget(3)) == (512, 16)
    pace.observe(0, 3, SLOW.decode_s)
    steps = [step for _ in range(5) for step in SLOW.serve(pace, 409, decodes=3)]
    assert max(took_s for _, took_s in steps) <= 0.2 + SLOW.decode_s


def test_one_held_up_step_is_forgotten_by_small_ones_too() -> None:
    """A small step lowers no rate, but it shows that tokens are faster than was thought."""
    pace = StepPace(SchedulerConfig(), 16)
    pace.observe(1, 0, 0.002)
    pace.observe(512, 0, 20.0)
    assert pace.chunk_budget(0) == 16
    for _ in range(60):
        tokens = pace.chunk_budget(0)
        pace.observe(tokens, 0, 0.002 + tokens / 2000)
    assert pace.chunk_budget(0) >= 368


def test_a_reset_pace_knows_no_fixed_cost() -> None:
    pace = StepPace(SchedulerConfig(max_step_tokens=256, max_step_s=0.08), 16)
    for tokens, decodes, took_s in (*WARM_UP, *[(256, 0, 0.6888)] * 10):
        pace.observe(tokens, decodes, took_s)
    assert pace.chunk_budget(0) == pytest.approx(192, abs=16)
    pace.forget()
    assert (pace.chunk_budget(0), pace.prefill_tokens_per_s) == (256, None)
    pace.observe(256, 0, 0.6888)
    assert pace.chunk_budget(0) == 64, "by the time bound alone"
