"""The cost in seconds: what it counts, what it never does, and that a hot prefix spreads."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tandem.core.config import Disaggregation
from tandem.core.prefill_queue import ASSUMED_TOKENS_PER_S, PrefillSpeed, QueuedWork, QueueRules, attended
from tandem.router.routing.cost_model import (
    ANSWER_TOKENS,
    ASSUMED_BYTES_PER_S,
    ASSUMED_SEQUENCES,
    CHUNK_TOKENS,
    FETCH_SETUP_S,
    HANDOFF_S,
    Estimates,
    with_sources,
)
from tandem.router.routing.plan import Candidate, Cost, Job, Plan
from tandem.router.routing.policies.cost import TOP, CostPolicy
from tests.unit.router.candidates import at, d, m, of_kv, p

ALWAYS, AUTO = Disaggregation.ALWAYS, Disaggregation.AUTO
TOKEN_BYTES = 2 * 2 * 8 * 4
RULES = QueueRules(stretch=10.0, max_overtake_s=30.0)


def plan(*candidates: Candidate, mode: Disaggregation = ALWAYS, **job: Any) -> Plan:
    wanted = Job(**{"prompt_tokens": 1000, "max_tokens": 10} | job)
    return CostPolicy(mode).plan(wanted, candidates)


def cost(*candidates: Candidate, mode: Disaggregation = ALWAYS, **job: Any) -> Cost:
    found = plan(*candidates, mode=mode, **job).cost
    assert found is not None
    return found


# ---- what it counts ------------------------------------------------------------------------------------------------


def test_seconds_of_every_part() -> None:
    prefill = p(
        prefill_speed=at(1000.0), queued_tokens=500, reusable_tokens=200, profile=of_kv("float32"),
        link_speed=lambda to: 1000.0 * TOKEN_BYTES,
    )  # fmt: skip
    decode = d(
        profile=of_kv("float32"), held_tokens=400, in_flight=3, decode_step_s=0.02, decode_sequence_s=0.001,
        total_blocks=100, free_blocks=29, link_speed=lambda to: 1.0,
    )  # fmt: skip
    found = cost(prefill, decode)
    assert found.queue_s == 0.5
    assert found.compute_s == 0.8
    assert found.move_s == pytest.approx(HANDOFF_S + CHUNK_TOKENS / 1000), (
        "600 tokens in 0.6 s, all but the last chunk hidden"
    )
    assert found.room_s == pytest.approx((38 + 1 - 29) / 100 * ANSWER_TOKENS * 0.02)
    assert found.decode_s == pytest.approx(10 * 0.001 * 3)
    assert found.others_s == pytest.approx(10 * 0.001 * 3)
    assert found.first_token_s == pytest.approx(1.3)
    slow = dataclasses.replace(prefill, link_speed=lambda to: 100.0 * TOKEN_BYTES)
    assert cost(slow, decode).move_s == pytest.approx(HANDOFF_S + 6.0 - 0.8), "what the wire is slower by"


def test_a_long_prompts_last_tokens_take_longer() -> None:
    """Both to compute and to wait for: 800 tokens behind 200 others look at 480,000 pairs."""
    slower = at(1000.0, 1e-6)
    ahead = QueuedWork(0.0, 500, attended=attended(4000, 4500))
    found = cost(p(prefill_speed=slower, queue=(ahead,), queued_tokens=500, reusable_tokens=200), d())
    assert found.compute_s == pytest.approx(0.8 + 0.48)
    assert found.queue_s == pytest.approx(0.5 + 500 * 4250 * 1e-6)


def test_only_what_is_due_first_is_waited_for_and_what_is_put_off_counts() -> None:
    queue = (QueuedWork(101.0, 700), QueuedWork(150.0, 5000, 2))
    found = cost(
        p(prefill_speed=at(1000.0), queue=queue, queued_tokens=5700, rules=RULES), d(), now_s=100.0, prompt_tokens=500
    )
    assert found.queue_s == 0.7, "due at 105"
    assert found.others_s == pytest.approx(2 * 0.5), "half a second each"
    unlisted = cost(
        p(prefill_speed=at(1000.0), queue=queue, queued_tokens=6000, rules=RULES), d(), now_s=100.0, prompt_tokens=500
    )
    assert unlisted.queue_s == pytest.approx(1.0)


def test_a_worker_of_which_nothing_is_known_is_taken_for_the_slowest() -> None:
    assert cost(p(), d()).compute_s == 1000 / ASSUMED_TOKENS_PER_S
    chosen = plan(
        p("p0", prefill_speed=at(900.0)),
        p("p1", prefill_speed=at(400.0), queued_tokens=9000),
        p("p2", queued_tokens=10),
        d(),
    )
    costs = {str(one.prefill): one.cost.compute_s for one in chosen.options if one.prefill and one.cost}
    assert costs["p2"] == 1000 / 400


def test_decode_workers_do_not_say_how_fast_a_prefill_worker_is() -> None:
    found = plan(p("p0"), p("p1", prefill_speed=at(900.0), queued_tokens=9000), d(prefill_speed=at(10.0)))
    assert found.cost is not None
    assert (found.prefill, found.cost.compute_s) == ("p0", 1000 / 900)


def test_a_decode_worker_of_which_nothing_is_known_is_taken_for_the_slowest_decode_worker() -> None:
    workers = [p(prefill_speed=at(10.0)), m(prefill_speed=at(20.0)), d(prefill_speed=at(900.0)), d("d1")]
    found = Estimates(Job(prompt_tokens=9, max_tokens=9), workers)
    assert found.prefill_speed(workers[-1]) == at(900.0)


@pytest.mark.parametrize("count", [2 * TOP, 64])
def test_the_slowest_by_a_hair_has_its_turn_too(count: int) -> None:
    """All are within 5 ms, more than are paired: the one that was used least recently is taken."""
    workers = [p(f"p{i:02}", prefill_speed=at(1000.0 + 0.1 * i), last_used=1 + i) for i in range(count)]
    assert plan(*workers, d(), prompt_tokens=100).prefill == "p00"


def test_a_popular_prefix_is_copied_before_its_holder_has_a_queue() -> None:
    holder = p(
        "p0", prefill_speed=at(1000.0), reusable_tokens=512, held_tokens=512, last_used=2, profile=of_kv("float32")
    )
    idle = p("p1", prefill_speed=at(1000.0), last_used=1, profile=of_kv("float32"))
    decode = d(profile=of_kv("float32"))
    assert plan(holder, idle, decode).prefill == "p0"
    assert cost(idle, decode, dataclasses.replace(holder, queued_tokens=9000)).reuse_s == 0.0, "nobody follows"
    assert plan(holder, idle, decode, followers=1.0).prefill == "p0", "two thirds of fetching it are above 5 ms"
    chosen = plan(holder, idle, decode, followers=1000.0)
    assert chosen.prefill == "p1"
    assert chosen.cost is not None
    fetch_s = FETCH_SETUP_S + 512 * TOKEN_BYTES / ASSUMED_BYTES_PER_S
    assert chosen.cost.compute_s == pytest.approx(0.488 + fetch_s)
    assert chosen.cost.reuse_s == pytest.approx(-fetch_s * 500 / 501)
    assert plan(holder, idle, decode, followers=1000.0, is_kept_together=True).prefill == "p0", "it has a home"


def test_conditional_disaggregation() -> None:
    """A decode worker extends its own prefix where that costs less than a pair: little is left to compute, and few
    sequences wait for it."""
    profile = of_kv("float32")
    prefill = p(prefill_speed=at(5000.0), profile=profile)
    holder = d(prefill_speed=at(5000.0), profile=profile, held_tokens=992, reusable_tokens=992)
    assert plan(prefill, holder, mode=AUTO).workers == ("d0",)
    assert plan(prefill, holder, mode=ALWAYS).workers == ("p0", "d0")
    cold = dataclasses.replace(holder, held_tokens=0, reusable_tokens=0)
    assert plan(prefill, cold, mode=AUTO).workers == ("p0", "d0"), "idle, but hand-overs may come"
    assert plan(prefill, cold, mode=AUTO, prompt_tokens=20).workers == ("d0",), "sooner computed than handed over"
    busy = dataclasses.replace(holder, held_tokens=0, reusable_tokens=0, running=20)
    assert plan(prefill, busy, mode=AUTO).workers == ("p0", "d0"), "a long chunk would stop twenty answers"
    queue = dataclasses.replace(prefill, queued_tokens=100_000)
    assert plan(queue, dataclasses.replace(busy, running=1), mode=AUTO).workers == ("d0",), "P is too busy"


def test_who_waits_in_the_router_loses_a_share_of_what_a_prefill_worker_computes() -> None:
    prefills = [p(f"p{n}", prefill_speed=at(1000.0), queued_tokens=1) for n in range(4)]
    decode = d(prefill_speed=at(1000.0), running=10)
    alone, waited = cost(*prefills, decode), cost(*prefills, decode, waiting=40)
    assert waited.others_s - alone.others_s == pytest.approx(40 / 4 * 1.0)
    assert waited.first_token_s == alone.first_token_s, "it waits no longer itself"
    assert plan(*prefills, decode, mode=AUTO, waiting=40).workers == ("p0", "d0"), "eleven lose more"
    assert plan(*prefills, decode, mode=AUTO, waiting=50).workers == ("d0",)
    assert plan(*prefills, decode, mode=ALWAYS, waiting=500).workers == ("p0", "d0")


def test_mixed_workers_and_pairs_by_one_cost() -> None:
    assert plan(p(queued_tokens=5000), d(), m(), mode=AUTO).workers == ("m0",)
    assert plan(p(), d(in_flight=2), m(running=30, in_flight=30), mode=AUTO).workers in {("p0", "d0"), ("d0",)}


def test_least_queue_least_batch_and_room_decide() -> None:
    assert plan(p("p0", queued_tokens=500), p("p1", queued_tokens=20), d()).prefill == "p1"
    assert plan(p(), d("d0", in_flight=4), d("d1", in_flight=3)).decode == "d1"
    assert plan(p(), d("d0", total_blocks=99, free_blocks=5), d("d1", total_blocks=99, free_blocks=90)).decode == "d1"
    assert plan(p(), d("d0", total_blocks=1, free_blocks=0), d("d1", total_blocks=99, free_blocks=90)).decode == "d1"
    assert (
        plan(p("p0", prefill_speed=at(1000.0)), p("p1", prefill_speed=at(2000.0), queued_tokens=500), d()).prefill
        == "p1"
    )


def test_the_faster_link_and_the_prefix_at_the_decode_worker_save_bytes() -> None:
    profile = of_kv("float32")
    speeds = {"d0": 1e6, "d1": 1e9}
    prefill = p(profile=profile, link_speed=speeds.get)
    assert plan(prefill, d("d0", profile=profile), d("d1", profile=profile)).decode == "d1"
    even = p(profile=profile, link_speed=lambda to: 1e5)
    assert plan(even, d("d0", profile=profile), d("d1", profile=profile, held_tokens=512)).decode == "d1"


def test_a_prefix_that_is_cheap_to_fetch_counts_where_the_prompt_goes() -> None:
    """p1 holds nothing, but d0's blocks come over its fast link; the plan's sources agree."""
    profile = of_kv("float32")
    holder = d("d0", profile=profile, held_tokens=9600, link_speed={"p1": 1e9}.get)
    first, second = (
        p("p0", profile=profile, prefill_speed=at(1000.0)),
        p("p1", profile=profile, prefill_speed=at(1000.0)),
    )
    job = Job(prompt_tokens=10_000, max_tokens=10)
    workers = (first, second, holder)
    chosen = with_sources(CostPolicy(ALWAYS).plan(job, workers), job, workers)
    assert (chosen.prefill, [source.worker for source in chosen.sources]) == ("p1", ["d0"])
    assert chosen.cost is not None
    assert chosen.cost.compute_s == pytest.approx(0.4 + FETCH_SETUP_S + 9600 * TOKEN_BYTES / 1e9)


def test_many_workers_are_weighed_by_the_best_of_each_side() -> None:
    prefills = [p(f"p{i:03}", queued_tokens=10 * i) for i in range(64)]
    decodes = [d(f"d{i:03}", in_flight=i, held_tokens=512 * (i == 60), profile=None) for i in range(64)]
    chosen = plan(*prefills, *decodes)
    assert chosen.workers == ("p000", "d000")
    assert {option.prefill for option in chosen.options if option.prefill} <= {p.worker for p in prefills[:TOP]}


def test_fetching_is_weighed_for_the_cheapest_of_many_alone() -> None:
    """How long each of them would take is a question about the holder's link to it."""
    profile, asked = of_kv("float32"), set[str]()

    def speed(to: str) -> float:
        asked.add(to)
        return 1e9

    prefills = [p(f"p{i:02}", profile=profile, queued_tokens=10_000 * i) for i in range(40)]
    assert plan(*prefills, d(profile=profile, held_tokens=992, link_speed=speed)).prefill == "p00"
    assert asked == {f"p{i:02}" for i in range(2 * TOP)}


def test_who_looks_dearer_at_first_may_be_the_cheapest_of_many() -> None:
    """Three are idle, but could fetch the prefix over slow links alone; its holder has a short queue."""
    more: dict[str, Any] = {
        "prefill_speed": at(1000.0), "profile": of_kv("float32"), "link_speed": {"d0": 1e9}.get,
    }  # fmt: skip
    idle = [p(f"p{i}", **more) for i in range(3)]
    holder = p("p3", held_tokens=992, reusable_tokens=992, queued_tokens=100, **more)
    slow = dataclasses.replace(holder, link_speed=lambda to: 1e9 if to == "d0" else 1e3)
    busy = [p(f"p{i}", queued_tokens=5000, **more) for i in range(4, 2 * TOP + 2)]
    assert plan(*idle, slow, *busy, d(profile=of_kv("float32"))).prefill == "p3"


@pytest.mark.parametrize("count", [TOP + 1, 2 * TOP])
def test_few_decode_workers_are_all_weighed(count: int) -> None:
    """The fullest one is by far the nearest to the prefill worker."""
    profile, nearest = of_kv("float32"), f"d{count - 1}"
    prefill = p(profile=profile, link_speed=lambda to: 1e9 if to == nearest else 1e4)
    assert plan(prefill, *(d(f"d{i}", in_flight=i, profile=profile) for i in range(count))).decode == nearest


def test_where_nothing_is_known_or_asked_nothing_else_costs() -> None:
    assert cost(p(), d()) == Cost(compute_s=1000 / ASSUMED_TOKENS_PER_S, move_s=HANDOFF_S)
    assert Cost().total_s == Cost().first_token_s == 0.0
    parts = Cost(queue_s=1.0, compute_s=2.0, move_s=4.0, room_s=8.0, decode_s=16.0, others_s=32.0, reuse_s=-0.5)
    assert (parts.total_s, parts.first_token_s) == (62.5, 3.0)


def test_the_last_token_is_computed_whatever_is_held() -> None:
    for held in (999, 1000, 2000):
        assert cost(p(prefill_speed=at(1000.0), reusable_tokens=held), d()).compute_s == 0.001
    assert cost(p(prefill_speed=at(1000.0), reusable_tokens=998), d()).compute_s == 0.002


def test_a_very_slow_worker_is_known_to_be_one() -> None:
    assert cost(p(prefill_speed=at(0.5)), d()).compute_s == 2000.0
    found = Estimates(Job(prompt_tokens=9, max_tokens=9), [p(prefill_speed=at(0.5)), p("p1")])
    assert found.prefill_speed(p("p1")).tokens_per_s == 0.5


def test_a_row_that_is_due_at_the_same_time_goes_first() -> None:
    slow = p(prefill_speed=at(1000.0), rules=RULES, queued_tokens=700)
    for due_s, ahead in ((10.0, True), (10.1, False)):
        found = cost(dataclasses.replace(slow, queue=(QueuedWork(due_s, 700),)), d())
        assert (found.queue_s, found.others_s) == ((0.7, 0.0) if ahead else (0.0, 0.7))
    assert (
        cost(dataclasses.replace(slow, queue=(QueuedWork(10.1, 1200, 2),), queued_tokens=1200), d()).others_s == 1.2
    ), "two lose no more than computing them first would have cost"


def test_what_a_queue_does_not_list_has_nothing_before_it() -> None:
    slower = at(1000.0, 1e-3)
    found = cost(p(prefill_speed=slower, queue=(QueuedWork(-1.0, 10, 1, 0.0),), queued_tokens=30), d(), prompt_tokens=1)
    assert found.queue_s == pytest.approx(0.01 + 0.02)


def test_who_decodes_where_a_prompt_is_computed_loses_that_time() -> None:
    speed = at(1000.0)
    assert cost(p(prefill_speed=speed, running=2), d()).others_s == 2.0
    sequence_s = 10 * 0.02 / ASSUMED_SEQUENCES
    alone = cost(d(prefill_speed=speed, running=3, in_flight=5), mode=AUTO)
    assert alone == Cost(compute_s=1.0, decode_s=5 * sequence_s, others_s=6.0 + 5 * sequence_s)
    running = cost(d(prefill_speed=speed, running=7, in_flight=5), mode=AUTO, choices=3)
    assert running.others_s == pytest.approx(8.0 + 3 * 7 * sequence_s)
    assert cost(m(prefill_speed=speed, running=3, in_flight=5), mode=AUTO).others_s == pytest.approx(
        3.0 + 5 * sequence_s
    )


def test_one_token_costs_its_prompt_alone() -> None:
    busy: dict[str, Any] = {"running": 2, "in_flight": 9, "total_blocks": 9, "queued_tokens": 500}
    found = cost(p(prefill_speed=at(1000.0), **busy), max_tokens=1)
    assert found == Cost(queue_s=0.5, compute_s=1.0, others_s=2.0)


def test_the_batch_slows_an_answer_for_as_long_as_it_may_be() -> None:
    busy = d(in_flight=2, decode_step_s=0.064)
    assert cost(p(), busy, max_tokens=10).decode_s == pytest.approx(10 * 0.001 * 2)
    assert cost(p(), busy, max_tokens=5000).decode_s == pytest.approx(ANSWER_TOKENS * 0.001 * 2)
    assert cost(p(), dataclasses.replace(busy, running=4), max_tokens=10).decode_s == pytest.approx(10 * 0.001 * 4)


def test_bytes_on_the_wire() -> None:
    """Of a short prompt the whole, of one that D holds none, and over an unmeasured link as over a gigabit."""
    sender, receiver = p(prefill_speed=at(1000.0), profile=of_kv("float32")), d(profile=of_kv("float32"))
    wire_s = TOKEN_BYTES / ASSUMED_BYTES_PER_S
    assert cost(sender, receiver, prompt_tokens=100).move_s == pytest.approx(HANDOFF_S + 100 * wire_s, rel=1e-9)
    assert cost(sender, receiver, prompt_tokens=4096).move_s == pytest.approx(HANDOFF_S + 512 * wire_s, rel=1e-9)
    held = dataclasses.replace(receiver, held_tokens=1024)
    assert cost(sender, held, prompt_tokens=1024).move_s == HANDOFF_S
    assert cost(sender, held, prompt_tokens=1000).move_s == HANDOFF_S
    assert cost(sender, held, prompt_tokens=1025).move_s == pytest.approx(HANDOFF_S + wire_s, rel=1e-9)


@pytest.mark.parametrize(("free", "short"), [(64, 0), (65, 0), (63, 1), (0, 64)])
def test_room_for_the_prompt_and_a_block_a_choice(free: int, short: int) -> None:
    """1,000 tokens are 63 blocks of 16, which is the assumed size where none is reported."""
    found = cost(p(), d(total_blocks=200, free_blocks=free, decode_step_s=0.01))
    assert found.room_s == pytest.approx(short / 200 * ANSWER_TOKENS * 0.01)
    assert cost(p(), d(total_blocks=200, free_blocks=free), choices=2).room_s == pytest.approx(
        max(0, 65 - free) / 200 * ANSWER_TOKENS * 0.02
    )
    whole = d(total_blocks=200, held_tokens=5000, decode_step_s=0.01)
    assert cost(p(), whole).room_s == pytest.approx(1 / 200 * ANSWER_TOKENS * 0.01)
    kept = d(profile=of_kv("bfloat16"), total_blocks=200, decode_step_s=0.01, lossy_tokens={"float32>bfloat16": 160})
    assert cost(p(profile=of_kv("float32")), kept).room_s == pytest.approx((53 + 1) / 200 * ANSWER_TOKENS * 0.01)
    large = of_kv("float32", 100)
    assert cost(p(profile=large), d(profile=large, total_blocks=200, decode_step_s=0.01)).room_s == pytest.approx(
        11 / 200 * ANSWER_TOKENS * 0.01
    )


def test_who_holds_much_without_saying_in_which_form_gives_no_credit() -> None:
    job = Job(prompt_tokens=1000, max_tokens=10, followers=100.0)
    idle, secret = p(prefill_speed=at(1000.0), profile=of_kv("float32")), d(held_tokens=512)
    assert Estimates(job, [idle, secret]).prefill(idle).reuse_s == 0.0
    told = dataclasses.replace(secret, profile=of_kv("float32"))
    assert Estimates(job, [idle, told]).prefill(idle).reuse_s < 0.0
    assert Estimates(dataclasses.replace(job, followers=0.0), [idle, told]).prefill(idle).reuse_s == 0.0
    assert Estimates(dataclasses.replace(job, skips_cache=True), [idle, told]).prefill(idle).compute_s == 1.0


def test_what_waits_in_the_router_is_all_lost_at_the_only_worker() -> None:
    assert cost(p(prefill_speed=at(1000.0), queued_tokens=1), d(), waiting=7).others_s == 7.0


def test_a_decode_worker_far_behind_that_holds_the_prompt_is_weighed_too() -> None:
    """Of 64, it is not among the cheapest to decode at; but the link is slow, and it has nearly all."""
    profile = of_kv("float32")
    slow = p(prefill_speed=at(1000.0), profile=profile, link_speed=lambda to: 1e4)
    decodes = [d(f"d{i:02}", in_flight=i, profile=profile) for i in range(64)]
    decodes[50] = dataclasses.replace(decodes[50], held_tokens=992)
    decodes[51:60] = [dataclasses.replace(one, held_tokens=16) for one in decodes[51:60]]
    assert plan(slow, *decodes).workers == ("p0", "d50")


def test_the_only_idle_one_of_many_mixed_workers_is_found() -> None:
    busy = [m(f"m{i:02}", in_flight=20 + i) for i in range(40)]
    assert plan(*busy[:20], m("mm"), *busy[20:], mode=AUTO).workers == ("mm",)


# ---- what it never does --------------------------------------------------------------------------------------------

TOKENS = st.integers(0, 20_000)
WORK = st.builds(QueuedWork, st.floats(-60, 60), st.integers(1, 20_000), st.integers(1, 4), st.floats(0, 1e8))
WORKERS = st.builds(
    p,
    queue=st.lists(WORK, max_size=8).map(tuple),
    queued_tokens=TOKENS,
    running=st.integers(0, 40),
    prefill_speed=st.builds(
        PrefillSpeed, tokens_per_s=st.just(0.0) | st.floats(1, 50_000), context_s=st.just(0.0) | st.floats(0, 1e-6)
    ),
    rules=st.sampled_from([RULES, QueueRules(), QueueRules(stretch=0.0, max_overtake_s=0.0)]),
)
JOBS = st.builds(
    Job, prompt_tokens=st.integers(1, 20_000), max_tokens=st.integers(2, 500), deadline_s=st.floats(0.1, 600)
)


def total_s(job: Job, *workers: Candidate) -> float:
    prefill, decode, *_ = workers
    estimates = Estimates(job, workers)
    return estimates.pair(prefill, decode, estimates.prefill(prefill)).total_s


@given(JOBS, WORKERS, WORK)
def test_more_queue_never_becomes_cheaper(job: Job, one: Candidate, work: QueuedWork) -> None:
    assume(sum(row.tokens for row in one.queue) <= one.queued_tokens)
    longer = dataclasses.replace(one, queue=(*one.queue, work), queued_tokens=one.queued_tokens + work.tokens)
    assert total_s(job, longer, d()) >= total_s(job, one, d())
    busier = dataclasses.replace(one, queued_tokens=one.queued_tokens + work.tokens, running=one.running + 1)
    assert total_s(job, busier, d()) >= total_s(job, one, d())


@given(JOBS, WORKERS, TOKENS, TOKENS, st.integers(0, 20_000), st.floats(1e4, 1e10))
def test_fewer_uncached_tokens_are_never_dearer(
    job: Job, one: Candidate, some: int, more: int, held: int, speed: float
) -> None:
    few, many = sorted((min(some, job.prompt_tokens - 1), min(more, job.prompt_tokens - 1)))
    one = dataclasses.replace(one, profile=of_kv("float32", 1), link_speed=lambda to: speed)
    decode = d(profile=of_kv("float32", 1), held_tokens=min(held, job.prompt_tokens), link_speed=lambda to: speed)
    with_few, with_many = (dataclasses.replace(one, reusable_tokens=tokens) for tokens in (few, many))
    assert total_s(job, with_many, decode) <= total_s(job, with_few, decode) + 1e-9


@given(JOBS, st.integers(0, 200), st.integers(0, 200), st.integers(0, 500), st.integers(0, 500), st.floats(0, 0.1))
def test_a_fuller_decode_worker_never_becomes_cheaper(
    job: Job, one: int, two: int, free: int, other: int, step_s: float
) -> None:
    def decode(in_flight: int, free_blocks: int) -> Candidate:
        return d(in_flight=in_flight, free_blocks=free_blocks, total_blocks=500, decode_step_s=step_s)

    idle, busy = decode(min(one, two), max(free, other)), decode(max(one, two), min(free, other))
    assert total_s(job, p(), busy) >= total_s(job, p(), idle)


HOLDERS = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([None, 1e4, 1e6, 1e9])), max_size=4)


@given(JOBS, WORKERS, HOLDERS, st.integers(0, 300), st.floats(0, 50))
def test_a_quick_look_never_shows_more_than_the_cost(
    job: Job, one: Candidate, holders: list[tuple[int, float | None]], reusable: int, followers: float
) -> None:
    """With it the dearest of many workers are left out unseen. Where no worker holds anything, it is the cost."""
    kv = of_kv("float32")
    one = dataclasses.replace(one, reusable_tokens=16 * reusable, profile=kv)
    others = [
        d(f"d{i}", held_tokens=16 * blocks, profile=kv, link_speed=lambda to, speed=speed: speed)
        for i, (blocks, speed) in enumerate(holders)
    ]
    estimates = Estimates(dataclasses.replace(job, followers=followers), [one, *others])
    least_s, whole_s = estimates.least_prefill_s(one), estimates.prefill(one).total_s
    assert least_s <= whole_s * (1 + 1e-9) + 1e-9
    if not any(blocks for blocks, _ in holders):
        assert least_s == pytest.approx(whole_s)


@given(JOBS, WORKERS, st.integers(0, 50), st.integers(0, 50), st.integers(0, 500), st.integers(1, 4))
def test_what_decoding_costs_is_part_of_a_pair(
    job: Job, one: Candidate, running: int, in_flight: int, free: int, choices: int
) -> None:
    """By it, decode workers are left out unseen."""
    decode = d(running=running, in_flight=in_flight, free_blocks=free, total_blocks=500, held_tokens=48)
    estimates = Estimates(dataclasses.replace(job, choices=choices), [one, decode])
    done = estimates.prefill(one)
    found = estimates.pair(one, decode, done)
    assert estimates.decode_s(decode) == pytest.approx(found.room_s + found.decode_s + found.others_s - done.others_s)


def test_costs_that_differ_by_a_hair_take_turns() -> None:
    """A millisecond of a second is less than any estimate knows; ten are a reason."""
    fast, like, slow = p("p0", prefill_speed=at(1000.0), last_used=3), at(999.0), at(990.0)
    assert plan(fast, p("p1", prefill_speed=like, last_used=2), d()).prefill == "p1"
    assert plan(fast, p("p1", prefill_speed=slow, last_used=2), d()).prefill == "p0"
    found = plan(fast, p("p1", prefill_speed=like, last_used=2), d())
    assert [one.prefill for one in found.options if one.prefill] == ["p1", "p0"], "the choice is named first"


# ---- bounded affinity ----------------------------------------------------------------------------------------------


def test_a_hot_prefix_spreads_over_eight_workers() -> None:
    """A burst of prompts that share 2,000 tokens and have 100 of their own: a holder of the prefix is taken until its
    queue costs more than computing the prefix elsewhere; in the end all hold it and do the same."""
    shared, own, rate = 2000, 100, 5000.0
    queued, holds = Counter[str](), {"p0"}
    done = Counter[str]()
    hits = 0
    for number in range(1200):
        workers = [
            p(f"p{i}", prefill_speed=at(rate), queued_tokens=queued[f"p{i}"], last_used=done[f"p{i}"],
              reusable_tokens=shared if f"p{i}" in holds else 0)
            for i in range(8)
        ]  # fmt: skip
        chosen = plan(*workers, d(), prompt_tokens=shared + own).prefill
        assert chosen is not None
        hits += chosen in holds
        queued[chosen] += own if chosen in holds else shared + own
        done[chosen] += 1
        holds.add(chosen)
        if number % 2:  # eight workers compute while requests arrive
            for name in queued:
                queued[name] = max(0, queued[name] - 25)
    assert len(done) == 8
    assert max(done.values()) <= 1.3 * min(done.values())
    assert hits >= 0.98 * 1200
