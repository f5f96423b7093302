"""Test the planner's inputs: reports merged, and rates observed."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.controlplane.planner.inputs import Unclear, Watch, loads, split_of, unsettled
from tandem.controlplane.planner.observer import MeasuredRates, RecentRequests
from tandem.controlplane.planner.records import Observation, Rates, RoleSplit, Rules
from tandem.core.config import SloSection
from tandem.core.demand import Demand, DemandSample, RouterDemand, WorkerSeen
from tandem.core.desired import DesiredState, Pool
from tandem.core.desired_changes import WorkerLoad
from tandem.core.ids import RouterId, WorkerId
from tandem.core.prefill_queue import UNMEASURED, PrefillSpeed
from tandem.core.state_enums import RoleName

PREFILL, DECODE = RoleName.PREFILL, RoleName.DECODE
RULES = Rules(window_s=60.0, min_requests=4)
CHAT = {"chat": SloSection(ttft_s=1.0)}
SPEED = PrefillSpeed(tokens_per_s=1000.0)


def state(prefill: int = 1, decode: int = 1) -> DesiredState:
    counts = ((PREFILL, prefill), (DECODE, decode))
    return DesiredState(
        version=1, pools=tuple(Pool(name=role.value, model="m", role=role, count=count) for role, count in counts)
    ).filled()


def worker(name: str, role: RoleName, **more: object) -> WorkerSeen:
    return replace(WorkerSeen(worker=WorkerId(name), role=role), **more)  # type: ignore[arg-type]


BOTH = (worker("prefill-0", PREFILL, prefill_speed=SPEED), worker("decode-0", DECODE))


def ask(age_s: float, **more: object) -> DemandSample:
    one = DemandSample(age_s=age_s, prompt_tokens=100, output_tokens=10, has_ended=True, slo="chat")
    return replace(one, **more)  # type: ignore[arg-type]


def said(
    asked: Sequence[DemandSample] = (), workers: Sequence[WorkerSeen] = BOTH, age_s: float = 0.0,
    name: str = "router-0",
    link_bytes_per_s: float = 0.0,
) -> RouterDemand:  # fmt: skip
    demand = Demand(
        asked=tuple(asked), workers=tuple(workers), promises=CHAT, link_bytes_per_s=link_bytes_per_s
    )  # fmt: skip
    return RouterDemand(router=RouterId(name), age_s=age_s, demand=demand)


def observe(every: Sequence[RouterDemand], watch: Watch | None = None) -> Observation:
    found = (watch or Watch(RULES, Rates(), "m")).observe(state(), every, 1000.0)
    assert isinstance(found, Observation), found
    return found


def why(every: Sequence[RouterDemand]) -> str:
    found = Watch(RULES, Rates(), "m").observe(state(), every, 1000.0)
    assert isinstance(found, Unclear), found
    return found.reason


def test_requests_of_all_routers_are_one_load_by_arrival() -> None:
    """An age counts from the time of its report; requests older than the window are out."""
    one = said([ask(50.0), ask(10.0, slo="")], age_s=2.0)
    other = said([ask(70.0), ask(30.0), ask(20.0), ask(1.0)], age_s=1.0, name="router-1")
    found = observe([one, other])
    assert [round(seen.arrival_s, 3) for seen in found.recent] == [948.0, 969.0, 979.0, 988.0, 999.0 - 1.0]
    assert [seen.slo for seen in found.recent].count("") == 1
    assert found.promises == CHAT
    assert found.split == RoleSplit(1, 1)
    assert found.is_settled


def test_choices_count_as_answers_that_share_a_prompt() -> None:
    found = observe([said([ask(5.0 + n, choices=3, cached_tokens=20) for n in range(4)])])
    assert len(found.recent) == 12
    assert sorted(one.cached_tokens for one in found.recent) == [20] * 4 + [100] * 8


def test_who_has_not_ended_is_taken_to_go_on() -> None:
    """Eight made 10 tokens each and ended, two have 40 and go on: 20 more are to come of each."""
    rows = [ask(20.0 - n) for n in range(8)] + [ask(3.0, output_tokens=40, has_ended=False) for _ in range(2)]
    watch = Watch(RULES, Rates(), "m")
    assert [one.output_tokens for one in observe([said(rows)], watch).recent][-2:] == [60, 60]
    few = [ask(3.0, output_tokens=1, has_ended=False) for _ in range(4)]
    assert {one.output_tokens for one in observe([said(few)], watch).recent} == {21}, "as usual before"


def test_rates_are_those_that_workers_measured_and_the_smallest_pool_counts() -> None:
    workers = (
        BOTH[0],
        worker("decode-0", DECODE, decoding_sequences=5, decode_step_s=0.03, decode_sequence_s=0.002, kv_tokens=900),
    )
    rates = observe([said([ask(5.0)] * 4, workers)]).rates
    assert rates.prefill == SPEED
    assert rates.decode_step_s == pytest.approx(0.02)
    assert rates.decode_sequence_s == pytest.approx(0.002)
    assert rates.kv_tokens == 900


def test_links_are_those_that_were_measured_if_it_is_known_what_travels() -> None:
    asked, names = [ask(5.0)] * 4, ("router-0", "router-1", "router-2")
    sized = (replace(BOTH[0], kv_token_bytes=7), replace(BOTH[1], kv_token_bytes=2000))
    heard = [
        said(asked, sized, name=name, link_bytes_per_s=speed) for name, speed in zip(names, (1e6, 0, 3e6), strict=True)
    ]
    found = observe(heard).rates
    assert (found.link_bytes_per_s, found.kv_token_bytes) == (2e6, 2000), "as those who generate keep it"
    assert found.wire_token_s == 1e-3
    for other in (observe([said(asked, sized)]), observe([said(asked, link_bytes_per_s=1e6)])):
        assert other.rates.wire_token_s == 0.0


def test_without_anything_to_go_by_it_says_so() -> None:
    assert "no router" in why([])
    assert "3 requests of the last 60 s were promised anything: 4 are needed" in why([said([ask(1.0)] * 3)])
    assert "were promised anything" in why([said([ask(1.0, slo="")] * 9)])
    nothing = replace(said([ask(1.0)] * 9), demand=Demand(asked=(ask(1.0),) * 9, workers=BOTH))
    assert "no SLO class promises anything" in why([nothing])
    unmeasured = (worker("prefill-0", PREFILL), worker("decode-0", DECODE))
    assert "has measured" in why([said([ask(1.0)] * 9, unmeasured)])


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        (BOTH, ""),
        (BOTH[:1], "decode-0 is not there yet"),
        ((BOTH[0], worker("decode-0", PREFILL)), "decode-0 is to become a decode worker"),
        ((BOTH[0], worker("decode-0", DECODE, takes_work=False)), "decode-0 takes no work"),
        ((*BOTH, worker("decode-7", DECODE)), "decode-7 is to leave"),
    ],
)
def test_whoever_is_not_as_wished_for_is_named(workers: Sequence[WorkerSeen], reason: str) -> None:
    """One router that sees it is enough."""
    assert unsettled(state(), [said(), said(workers=workers, name="router-1")]) == reason
    found = observe([said([ask(1.0)] * 4), said(workers=workers, name="router-1")])
    assert found.is_settled is (reason == "")


def test_a_worker_that_somebody_drained_is_left_to_them() -> None:
    wished = state(1, 2)
    cordoned = replace(wished.members[1], is_cordoned=True)
    wished = replace(wished, members=(wished.members[0], cordoned, wished.members[2]))
    assert unsettled(wished, [said()]) == "decode-0 is to have no work"


def test_the_word_of_the_router_that_spoke_last_counts_for_a_worker() -> None:
    old = said(workers=[worker("decode-0", DECODE, in_flight=9, unique_prefix_bytes=1)], age_s=9.0)
    new = said(workers=[worker("decode-0", DECODE, in_flight=2, unique_prefix_bytes=5)], age_s=1.0, name="router-1")
    assert loads([new, old]) == {WorkerId("decode-0"): WorkerLoad(in_flight=2, unique_prefix_bytes=5)}


def test_a_split_is_counted_for_one_model() -> None:
    pools = (*state(2, 3).pools, Pool(name="other", model="n", role=RoleName.MIXED, count=4))
    assert split_of(DesiredState(version=1, pools=pools), "m") == RoleSplit(2, 3)
    assert split_of(DesiredState(version=1, pools=pools), "n") == RoleSplit(0, 0, 4)


def test_answers_that_go_on_are_taken_to_go_on_as_long_as_they_do_for_each_that_ended() -> None:
    """Eight ended with 10 tokens, two go on with 40: 160 tokens for eight ends, so each has 20 to come."""
    recent = RecentRequests(60.0)
    for number in range(10):
        recent.came(str(number), float(number), 100 + number, "chat")
    recent.started("0", 40)
    for number in range(8):
        recent.ended(str(number), 10)
    recent.ended("gone", 20)
    recent.progressed("0", 99)
    recent.progressed("8", 40)
    recent.progressed("9", 40)
    found = recent.seen()
    assert [one.output_tokens for one in found] == [10] * 8 + [60] * 2
    assert (found[0].prompt_tokens, found[0].cached_tokens, found[0].slo) == (100, 40, "chat")


def test_until_some_have_ended_nothing_is_known_of_lengths() -> None:
    recent = RecentRequests(60.0)
    for number in range(10):
        recent.came(str(number), float(number), 100)
    recent.ended("3", 500)
    assert [one.output_tokens for one in recent.seen()] == [1, 1, 1, 500, 1, 1, 1, 1, 1, 1]


def test_only_the_last_minute_is_kept() -> None:
    recent = RecentRequests(60.0)
    for number in range(100):
        recent.came(str(number), 2.0 * number, 10)
    assert [one.arrival_s for one in recent.seen()] == [2.0 * number for number in range(69, 100)]
    recent.started("0", 5)
    recent.ended("0", 5)
    assert len(recent.seen()) == 31


def report(
    role: RoleName, sequences: int = 0, step_s: float = 0.0, speed: float = 0.0, more: float = 0.0
) -> WorkerSeen:
    measured = PrefillSpeed(tokens_per_s=speed) if speed else UNMEASURED
    return WorkerSeen(
        worker=WorkerId("w"),
        role=role,
        prefill_speed=measured,
        decoding_sequences=sequences,
        decode_step_s=step_s,
        decode_sequence_s=more,
    )


def test_steps_of_different_workers_tell_what_a_sequence_adds() -> None:
    rates = MeasuredRates(Rates())
    rates.note([report(RoleName.DECODE, count, 0.01 + 0.002 * count) for count in (1, 5, 9, 20)])
    assert rates.rates.decode_step_s == pytest.approx(0.01)
    assert rates.rates.decode_sequence_s == pytest.approx(0.002)


def test_alike_steps_leave_it_to_what_workers_say() -> None:
    rates = MeasuredRates(Rates())
    rates.note([report(RoleName.DECODE, 10, 0.03, more=0.001)] * 3)
    assert rates.rates.decode_step_s == pytest.approx(0.02)
    assert rates.rates.decode_sequence_s == pytest.approx(0.001)


def test_prompts_are_as_fast_as_at_workers_that_compute_them() -> None:
    rates = MeasuredRates(Rates(handoff_s=0.5))
    computing = [report(RoleName.PREFILL, speed=speed) for speed in (900.0, 1000.0, 0.0)]
    rates.note([*computing, report(RoleName.MIXED, speed=1100.0), report(RoleName.DECODE, speed=1.0)])
    assert rates.rates.prefill.tokens_per_s == 1000.0
    assert rates.rates.handoff_s == 0.5


def test_without_reports_all_stays_as_known() -> None:
    rates = MeasuredRates(Rates(decode_step_s=0.5))
    rates.note([report(RoleName.DECODE), report(RoleName.PREFILL)])
    assert rates.rates == Rates(decode_step_s=0.5)
