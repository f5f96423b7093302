"""The planner's rules: when it changes something, how far, and what it never does."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.controlplane.planner import splits
from tandem.controlplane.planner.planner import Planner, window
from tandem.controlplane.planner.records import Decision, Observation, ObservedRequest, Rates, RoleSplit, Rules
from tandem.core.config import PlannerMode, PlannerSection, SloSection
from tandem.core.errors import ConfigError
from tandem.core.prefill_queue import PrefillSpeed

RATES = Rates(prefill=PrefillSpeed(tokens_per_s=2000.0), decode_step_s=0.01, decode_sequence_s=0.001)
PROMISES = {"": SloSection(ttft_s=2.0, itl_s=0.03)}
ACT = Rules(mode=PlannerMode.ACT, window_s=60.0, cool_down_s=60.0)


def load(rate: float, prompt_tokens: int, output_tokens: int, until_s: float, seed: int = 1) -> list[ObservedRequest]:
    """A minute of Poisson arrivals."""
    dice = random.Random(seed)
    found, at_s = [], until_s - 60.0
    while (at_s := at_s + dice.expovariate(rate)) < until_s:
        found.append(ObservedRequest(arrival_s=at_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens))
    return found


def prompts(until_s: float = 60.0) -> list[ObservedRequest]:
    """Wants about six of eight workers for prompts."""
    return load(5.0, 2000, 20, until_s)


def answers(until_s: float = 60.0) -> list[ObservedRequest]:
    """Wants about six of eight workers for answers."""
    return load(8.0, 200, 400, until_s)


def ask(
    planner: Planner, split: RoleSplit, recent: Sequence[ObservedRequest], now_s: float, **changes: object
) -> Decision:
    seen = Observation(split=split, recent=recent, rates=RATES, promises=PROMISES)
    return planner.decide(dataclasses.replace(seen, **changes), now_s)  # type: ignore[arg-type]


def until_it_acts(planner: Planner, split: RoleSplit, kind: object, start_s: float = 60.0) -> Decision:
    for turn in range(20):
        now_s = start_s + 15.0 * turn
        decision = ask(planner, split, kind(now_s), now_s)  # type: ignore[operator]
        if decision.is_to_act:
            return decision
    raise AssertionError(f"it never acts: {decision.reason}")


def test_long_prompts_want_prefill_workers_and_long_answers_decode_workers() -> None:
    more_prefill = until_it_acts(Planner(ACT), RoleSplit(4, 4), prompts)
    assert more_prefill.wanted.prefill > 4
    more_decode = until_it_acts(Planner(ACT), RoleSplit(4, 4), answers)
    assert more_decode.wanted.decode > 4


@pytest.mark.parametrize("tokens", range(400, 2400, 200))
def test_each_flip_gains_what_a_change_has_to_gain(tokens: int) -> None:
    """So a second worker does not follow the first for a hair."""
    rules = dataclasses.replace(ACT, headroom=1.0, most_at_once=1.0, min_gain=0.1, confirmations=1, worth_s=0.0)
    decision = ask(Planner(rules), RoleSplit(2, 6), load(5.0, tokens, 100, 60.0), 60.0)
    score = {one.split: one.score for one in decision.considered}
    for split in score:
        saved = decision.flips - decision.current.flips_to(split)
        assert score[decision.wanted] - score[split] >= 0.1 * saved - 0.001, split


def test_a_decision_says_why_and_what_it_predicts() -> None:
    decision = until_it_acts(Planner(ACT), RoleSplit(3, 5), prompts)
    assert decision.now is not None
    assert decision.then is not None
    assert decision.then.attained > decision.now.attained
    assert decision.now.split == RoleSplit(3, 5)
    assert decision.then.split == decision.wanted
    for figure in (str(decision.wanted), "3P:5D", "would keep", "TTFT p90", "1.1 times the load"):
        assert figure in decision.reason
    assert {one.split for one in decision.considered} >= {RoleSplit(p, 8 - p) for p in range(1, 8)}


def test_off_looks_at_nothing_and_advise_never_acts() -> None:
    off = ask(Planner(dataclasses.replace(ACT, mode=PlannerMode.OFF)), RoleSplit(4, 4), prompts(), 60.0)
    assert (off.is_change, off.is_to_act, off.considered) == (False, False, ())
    advising = Planner(dataclasses.replace(ACT, mode=PlannerMode.ADVISE))
    said = [ask(advising, RoleSplit(3, 5), prompts(60.0 + 15 * n), 60.0 + 15 * n) for n in range(6)]
    assert all(decision.is_change for decision in said)
    assert not any(decision.is_to_act for decision in said)


def test_one_decision_is_not_enough() -> None:
    planner = Planner(dataclasses.replace(ACT, confirmations=3))
    made = [ask(planner, RoleSplit(3, 5), prompts(60.0 + 15 * n), 60.0 + 15 * n) for n in range(3)]
    assert [decision.is_to_act for decision in made] == [False, False, True]
    assert "1 of 3" in made[0].reason


def test_what_is_very_wrong_is_changed_before_what_is_a_little_wrong() -> None:
    """All of the promises are broken by one split, a quarter of them by the other."""

    def acts_at_s(split: RoleSplit, **changes: float) -> float:
        rules = dataclasses.replace(ACT, **changes)  # type: ignore[arg-type]
        return until_it_acts(Planner(rules), split, lambda now_s: load(4.0, 2000, 20, now_s)).at_s

    assert acts_at_s(RoleSplit(1, 7)) == 75.0
    assert acts_at_s(RoleSplit(5, 3)) >= 60.0 + ACT.worth_s / 0.3
    assert acts_at_s(RoleSplit(5, 3), worth_s=0.0) == 75.0


def test_a_wish_that_turns_round_begins_anew() -> None:
    planner = Planner(ACT)
    assert ask(planner, RoleSplit(4, 4), prompts(60.0), 60.0).wanted.prefill > 4
    assert not ask(planner, RoleSplit(4, 4), answers(75.0), 75.0).is_to_act
    assert not ask(planner, RoleSplit(4, 4), prompts(90.0), 90.0).is_to_act
    assert ask(planner, RoleSplit(4, 4), prompts(105.0), 105.0).is_to_act


def test_it_waits_after_a_change() -> None:
    planner = Planner(ACT)
    first = until_it_acts(planner, RoleSplit(2, 6), prompts)
    second = until_it_acts(planner, first.wanted, prompts, first.at_s + 15.0)
    assert second.at_s - first.at_s >= ACT.cool_down_s


def test_somebody_elses_change_is_left_alone_for_a_while() -> None:
    planner = Planner(ACT)
    ask(planner, RoleSplit(5, 3), prompts(60.0), 60.0)
    held = [ask(planner, RoleSplit(3, 5), prompts(60.0 + 15 * n), 60.0 + 15 * n) for n in range(1, 5)]
    assert not any(decision.is_to_act for decision in held)
    assert "changed lately" in held[-1].reason
    assert ask(planner, RoleSplit(3, 5), prompts(150.0), 150.0).is_to_act


def test_no_more_than_a_quarter_flips_at_once() -> None:
    decision = until_it_acts(Planner(ACT), RoleSplit(1, 7), prompts)
    assert decision.flips == 2


def test_while_workers_change_nothing_is_decided() -> None:
    decision = ask(Planner(ACT), RoleSplit(1, 7), prompts(), 60.0, is_settled=False)
    assert not decision.is_change
    assert "still changing" in decision.reason


def test_few_requests_say_nothing() -> None:
    decision = ask(Planner(ACT), RoleSplit(1, 7), prompts()[:29], 60.0)
    assert not decision.is_change
    assert "30 are needed" in decision.reason


def test_where_nothing_is_gained_nothing_changes() -> None:
    quiet = load(1.0, 500, 20, 60.0)
    decision = ask(Planner(ACT), RoleSplit(4, 4), quiet, 60.0)
    assert not decision.is_change
    assert decision.now is not None
    assert decision.now.attained == 1.0


def test_flips_come_before_more_workers() -> None:
    """Eight workers are enough, if they were split well, and there is a budget for twelve."""
    rules = dataclasses.replace(ACT, is_scaling=True, budget=12)
    assert until_it_acts(Planner(rules), RoleSplit(3, 5), prompts).wanted.total == 8


def test_more_workers_where_no_flip_helps_and_never_above_the_budget() -> None:
    rules = dataclasses.replace(ACT, is_scaling=True, budget=6)
    planner = Planner(rules)
    split = RoleSplit(3, 1)
    for turn in range(30):
        now_s = 60.0 + 15 * turn
        decision = ask(planner, split, prompts(now_s), now_s)
        assert decision.wanted.total <= 6
        if decision.is_to_act:
            split = decision.wanted
    assert split.total == 6


@pytest.mark.parametrize(("split", "most"), [(RoleSplit(16, 16), 80), (RoleSplit(40, 24), 100)])
def test_a_look_at_many_workers_costs_few_forecasts(split: RoleSplit, most: int) -> None:
    """Also where no number of workers is enough, so that all are looked at."""
    rules = dataclasses.replace(ACT, is_scaling=True, budget=2 * split.total, max_requests=30)
    hopeless = Observation(split=split, recent=prompts(), rates=RATES, promises={"": SloSection(ttft_s=1e-6)})
    looked_at = Planner(rules).decide(hopeless, 60.0).considered
    assert 2 * split.total in {one.split.total for one in looked_at}
    assert len(looked_at) <= most


def test_the_fewest_of_many_workers_that_are_enough_are_found() -> None:
    """Wider steps do not end at the first number that is enough."""
    rules = dataclasses.replace(ACT, is_scaling=True, budget=80)
    slow = dataclasses.replace(RATES, prefill=PrefillSpeed(tokens_per_s=200.0))
    promises = {"": SloSection(ttft_s=20.0, itl_s=0.03)}
    decision = ask(Planner(rules), RoleSplit(18, 2), load(2.8, 2000, 20, 60.0), 60.0, rates=slow, promises=promises)
    more = decision.wanted.total - 20
    assert 4 < more < 16
    assert more != 8, "or this load tests nothing"
    one_less = [one.attained for one in decision.considered if one.split.total == decision.wanted.total - 1]
    assert one_less
    assert max(one_less) < rules.target


def test_new_workers_among_many_may_all_be_of_one_role() -> None:
    assert splits.totals(4, 8) == [5, 6, 7, 8]
    assert splits.totals(20, 60) == [21, 22, 23, 24, 28, 36, 52, 60]
    assert splits.totals(8, 8) == []
    found = splits.grown(RoleSplit(30, 10), 80)
    assert {RoleSplit(30, 50), RoleSplit(60, 20), RoleSplit(70, 10)} <= set(found)
    assert len(found) < 20
    assert all(split.total == 80 and split.prefill >= 30 and split.decode >= 10 for split in found)


def test_who_has_too_many_workers_gives_one_back_slowly() -> None:
    rules = dataclasses.replace(ACT, is_scaling=True, budget=8, spare_confirmations=4)
    planner, quiet = Planner(rules), lambda now_s: load(1.0, 500, 20, now_s)
    decision = until_it_acts(planner, RoleSplit(4, 4), quiet)
    assert decision.wanted.total == 7
    assert decision.at_s >= 60.0 + 3 * 15.0


def test_a_budget_that_shrank_is_kept_by_who_may_scale() -> None:
    decision = until_it_acts(Planner(dataclasses.replace(ACT, budget=6, is_scaling=True)), RoleSplit(4, 4), prompts)
    assert decision.wanted.total == 6


def test_who_may_not_scale_advises_to_stop_what_is_above_the_budget() -> None:
    planner = Planner(dataclasses.replace(ACT, budget=4))
    made = [ask(planner, RoleSplit(3, 3), prompts(60.0 + 15 * n), 60.0 + 15 * n) for n in range(8)]
    assert not any(decision.is_to_act for decision in made)
    assert (made[-1].is_due, made[-1].is_advice, made[-1].wanted.total) == (True, True, 4)
    assert "6 workers are above the budget of 4, and without `is_scaling`" in made[-1].reason


def test_a_budget_for_nobody_is_an_error() -> None:
    with pytest.raises(ConfigError, match="budget is 1"):
        ask(Planner(dataclasses.replace(ACT, budget=1)), RoleSplit(1, 1), prompts(), 60.0)


@pytest.mark.parametrize(("name", "value"), [("headroom", 0.0), ("min_gain", 1.5), ("budget", -1), ("window_s", -1.0)])
def test_rules_have_bounds(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        Rules(**{name: value})  # type: ignore[arg-type]


def test_the_window_keeps_the_youngest() -> None:
    rules = Rules(window_s=10.0, max_requests=3)
    found = window(
        [ObservedRequest(arrival_s=float(at), prompt_tokens=1, output_tokens=1) for at in range(20)], 12.0, rules
    )
    assert [one.arrival_s for one in found] == [10.0, 11.0, 12.0]


def test_splits_of_many_workers_are_looked_at_from_where_they_are() -> None:
    found = splits.of_total(400, RoleSplit(100, 300))
    assert RoleSplit(100, 300) in found
    assert {RoleSplit(99, 301), RoleSplit(101, 299)} <= set(found)
    assert len(found) < 40


counts = st.builds(RoleSplit, st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)).filter(
    lambda split: split.can_serve
)


@settings(max_examples=40, deadline=None)
@given(
    split=counts, budget=st.integers(2, 10), is_scaling=st.booleans(), is_mixed=st.booleans(),
    kinds=st.lists(st.sampled_from([prompts, answers]), min_size=3, max_size=6),
)  # fmt: skip
def test_it_never_goes_above_the_budget_and_always_serves(
    split: RoleSplit, budget: int, is_scaling: bool, is_mixed: bool, kinds: list[object]
) -> None:
    """From any start; only a start above the budget is above it, until the first change."""
    rules = dataclasses.replace(
        ACT, budget=budget, is_scaling=is_scaling, is_mixed_allowed=is_mixed, confirmations=1, cool_down_s=0.0,
        max_requests=60,
    )  # fmt: skip
    planner = Planner(rules)
    for turn, kind in enumerate(kinds):
        now_s = 60.0 + 15.0 * turn
        decision = ask(planner, split, kind(now_s), now_s)  # type: ignore[operator]
        assert decision.current == split
        assert decision.wanted.can_serve
        assert decision.reason
        if decision.is_change:
            assert decision.wanted.total <= budget
            if not is_scaling:
                assert not (decision.is_to_act and decision.wanted.total != split.total)
                assert decision.wanted.total == min(split.total, budget)
            if not decision.wanted.mixed:
                assert decision.wanted.prefill >= 1
                assert decision.wanted.decode >= 1
        if decision.is_to_act:
            split = decision.wanted


def test_a_change_of_others_counts_from_when_it_was_made() -> None:
    acted = until_it_acts(Planner(ACT), RoleSplit(4, 4), prompts)
    assert (acted.is_due, acted.waits_s) == (True, 0.0)
    advising = Planner(dataclasses.replace(ACT, mode=PlannerMode.ADVISE))
    advising.note_change(75.0)
    held = ask(advising, RoleSplit(4, 4), prompts(90.0), 90.0)
    assert (held.is_due, held.waits_s) == (False, 45.0)
    assert "45 s to wait" in held.reason
    advising.note_change(10.0)
    assert ask(advising, RoleSplit(4, 4), prompts(90.0), 90.0).waits_s == 45.0, "an older change takes nothing back"


def test_what_was_wanted_before_a_gap_counts_no_more() -> None:
    planner = Planner(ACT)
    ask(planner, RoleSplit(4, 4), prompts(60.0), 60.0)
    planner.forget_wishes()
    assert "1 of 2 decisions in a row" in ask(planner, RoleSplit(4, 4), prompts(600.0), 600.0).reason


def test_rules_are_as_configured_and_never_above_what_may_run() -> None:
    section = PlannerSection(mode=PlannerMode.ACT, budget=9, min_gain=0.2, is_scaling=True)
    rules = Rules.configured(section, 6)
    assert (rules.mode, rules.budget, rules.min_gain, rules.is_scaling) == (PlannerMode.ACT, 6, 0.2, True)
    assert Rules.configured(section).budget == 9
    assert Rules.configured(PlannerSection(), 6).budget == 6
    assert Rules.configured(PlannerSection()) == Rules()
