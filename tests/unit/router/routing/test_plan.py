"""Workers that can serve a request, under any policy: the rules that every policy must keep."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.config import Disaggregation, PolicyName, RouterSection
from tandem.core.errors import InvalidRequestError, UnavailableError
from tandem.core.kv_compatibility import ALWAYS_BYTES_PER_S
from tandem.router.dispatch.retry_policy import RetryPolicy
from tandem.router.routing.plan import MAX_OPTIONS, Candidate, Job, Plan, chosen, form, option_of, pairs, refusal
from tandem.router.routing.policies import create_policy
from tests.unit.router.candidates import d, m, of_kv, p, profile

ALWAYS, AUTO, NEVER = Disaggregation.ALWAYS, Disaggregation.AUTO, Disaggregation.NEVER


@pytest.fixture(params=list(PolicyName))
def policy(request: pytest.FixtureRequest) -> PolicyName:
    return PolicyName(request.param)


def plan(policy: PolicyName, mode: Disaggregation, *candidates: Candidate, **job: Any) -> Plan:
    wanted = Job(**{"prompt_tokens": 100, "max_tokens": 10} | job)
    return create_policy(policy, mode).plan(wanted, candidates)


def test_a_pair_where_answers_must_cross(policy: PolicyName) -> None:
    chosen = plan(policy, ALWAYS, p(), d(held_tokens=32), m())
    assert (chosen.workers, chosen.policy) == (("p0", "d0"), policy)
    assert (chosen.prefill_hit_tokens, chosen.decode_hit_tokens) == (0, 32)
    assert chosen.options[0].prefill is not None


def test_modes_without_a_pair(policy: PolicyName) -> None:
    assert plan(policy, AUTO, m()).workers == ("m0",)
    assert plan(policy, AUTO, m(), d(in_flight=9)).workers == ("m0",)
    assert plan(policy, AUTO, d()).workers == ("d0",), "the prefill workers are gone, the decode worker is not"
    assert plan(policy, NEVER, p(), d()).workers == ("d0",)
    assert plan(policy, NEVER, p(), d(), m()).workers == ("m0",)
    with pytest.raises(UnavailableError, match="no prefill and no decode worker"):
        plan(policy, ALWAYS, m())
    with pytest.raises(UnavailableError, match="no prefill worker"):
        plan(policy, ALWAYS, d())
    with pytest.raises(UnavailableError, match="no decode worker"):
        plan(policy, AUTO, p())
    with pytest.raises(UnavailableError, match="no mixed or decode"):
        plan(policy, NEVER, p())
    with pytest.raises(UnavailableError, match="no prefill and no decode worker"):
        plan(policy, AUTO)


def test_one_token_needs_no_decode_worker(policy: PolicyName) -> None:
    assert plan(policy, ALWAYS, p(), d(), max_tokens=1).workers == ("p0",)
    assert plan(policy, AUTO, p(), d(), max_tokens=1).workers == ("p0",)
    assert plan(policy, NEVER, p(), d(), max_tokens=1).workers == ("d0",)


def test_equals_take_turns(policy: PolicyName) -> None:
    chosen = plan(policy, ALWAYS, p("p0", last_used=9), p("p1", last_used=3), d("d0", last_used=9), d("d1"))
    assert chosen.workers == ("p1", "d1")
    assert plan(policy, ALWAYS, p("p0", last_used=1), p("p1"), d()).prefill == "p1", "it was never used"
    assert plan(policy, ALWAYS, p("p0", last_used=0), p("p1"), d()).prefill == "p0", "nor was this one"


def test_a_decode_worker_alone_has_one_hit(policy: PolicyName) -> None:
    chosen = plan(policy, NEVER, d(held_tokens=64, reusable_tokens=48))
    assert (chosen.prefill_hit_tokens, chosen.decode_hit_tokens) == (48, 48)
    cold = plan(policy, NEVER, d())
    assert (cold.prefill_hit_tokens, cold.decode_hit_tokens) == (0, 0)


@pytest.mark.parametrize(("score", "wanted"), [(2.0, "d1"), (2.1, "d0")])
def test_who_is_no_further_from_the_best_takes_turns_with_it(score: float, wanted: str) -> None:
    used, other = d("d0", last_used=5), d("d1")
    options = [
        option_of(used, None, "", 1.0),
        option_of(other, None, "", score),
    ]
    assert chosen(PolicyName.COST, NEVER, options, [used, other], alike=1.0).decode == wanted


def test_a_worker_that_reported_nothing_counts_as_idle() -> None:
    assert m() == m(queued_tokens=0, queued_requests=0, in_flight=0, running=0, held_tokens=0)


def test_among_those_that_take_turns_a_decode_worker_is_left_to_decode() -> None:
    used, other = m("m0", last_used=5), d("d0")
    options = [
        option_of(used, None, "", 1.5),
        option_of(other, None, "", 1.0),
    ]
    assert chosen(PolicyName.COST, AUTO, options, [used, other], alike=1.0).decode == "m0"


def test_two_tokens_need_a_pair(policy: PolicyName) -> None:
    assert plan(policy, ALWAYS, p(), d(), max_tokens=2).workers == ("p0", "d0")


def test_exact_hits_of_a_decode_worker_do_not_count_where_blocks_change_on_their_way(policy: PolicyName) -> None:
    sender = p(profile=of_kv("float32"))
    held: dict[str, Any] = {"held_tokens": 64, "lossy_tokens": {"float32>bfloat16": 16}}
    assert plan(policy, ALWAYS, sender, d(profile=of_kv("float32", 8), **held)).decode_hit_tokens == 64
    assert plan(policy, ALWAYS, sender, d(profile=of_kv("bfloat16"), **held)).decode_hit_tokens == 16
    assert plan(policy, ALWAYS, sender, d(profile=of_kv("float16"), **held)).decode_hit_tokens == 0


def test_a_codec_that_is_always_on_changes_blocks_too(policy: PolicyName) -> None:
    always: dict[str, Any] = {"offers": ("int8",), "offers_below_bytes_per_s": ALWAYS_BYTES_PER_S}
    receiver = d(profile=of_kv("float32"), held_tokens=64, lossy_tokens={"int8": 48})
    sender = p(profile=of_kv("float32", **always))
    assert plan(policy, ALWAYS, sender, receiver).decode_hit_tokens == 48
    assert form(sender, receiver) == "codec int8"
    measured = p(profile=of_kv("float32", offers=("int8",), offers_below_bytes_per_s=125e6))
    assert plan(policy, ALWAYS, measured, receiver).decode_hit_tokens == 64
    assert form(measured, receiver) == "exact"


def test_what_is_missing_names_the_reasons_once(policy: PolicyName) -> None:
    others = [d(f"d{i}", profile=profile(fingerprint="other")) for i in range(9)]
    with pytest.raises(UnavailableError) as refused:
        plan(policy, ALWAYS, p(profile=profile()), p("p1", profile=profile()), *others)
    assert refused.value.message.count("revision differs: abc and other") == 1
    assert "p0 and d0: revision differs" in refused.value.message


def test_three_reasons_are_enough(policy: PolicyName) -> None:
    others = [d(f"d{i}", profile=profile(fingerprint=f"other{i}")) for i in range(5)]
    with pytest.raises(UnavailableError) as refused:
        plan(policy, ALWAYS, p(profile=profile()), *others)
    assert refused.value.message.count("revision differs") == 3


def test_only_workers_that_fit_are_paired_however_good_the_others_are(policy: PolicyName) -> None:
    one, other = profile("abc"), profile("other")
    busy: dict[str, Any] = {"queued_tokens": 9000, "in_flight": 90, "last_used": 9}
    prefills = [p(f"p{i}", profile=other) for i in range(9)] + [p("fits", profile=one, **busy)]
    decodes = [d(f"d{i}", profile=profile("third")) for i in range(9)] + [d("too", profile=one, **busy)]
    assert plan(policy, ALWAYS, *prefills, *decodes).workers == ("fits", "too")


def test_what_was_weighed_is_kept_best_first_and_bounded(policy: PolicyName) -> None:
    workers = [p(f"p{i}") for i in range(6)] + [d(f"d{i}") for i in range(12)]
    chosen = plan(policy, ALWAYS, *workers)
    assert len(chosen.options) == MAX_OPTIONS
    assert [option.order for option in chosen.options] == sorted(option.order for option in chosen.options)
    assert (chosen.options[0].decode, chosen.reason) == (chosen.decode, chosen.options[0].reason)


def test_incompatible_pairs() -> None:
    one = p(profile=profile(transports=("shm",)))
    other = d(profile=profile(fingerprint="other"))
    assert "revision differs: abc and other" in refusal(one, other)
    assert "no common transport" in refusal(one, d(profile=profile(transports=("grpc",))))
    assert "did not say" in refusal(one, d())
    fits = d("d1", profile=profile(transports=("grpc", "shm")))
    assert pairs([one, other, fits]) == [(one, fits)]


def test_a_retry_policy_changes_its_policy_and_refuses_what_is_none() -> None:
    settings = replace(RouterSection(), disaggregation=ALWAYS)
    switch = RetryPolicy(create_policy(PolicyName.COST, ALWAYS), settings, ManualClock())
    workers = (p("p0", queued_tokens=10**6, reusable_tokens=96), p("p1"), d())
    job = Job(prompt_tokens=100, max_tokens=10)
    assert switch.policy.plan(job, workers).prefill == "p1"
    switch.select("prefix_only")
    assert (switch.policy.name, switch.policy.plan(job, workers).prefill) == (PolicyName.PREFIX_ONLY, "p0")
    with pytest.raises(InvalidRequestError, match="the policies are cost, least_loaded") as refused:
        switch.select("fastest")
    assert (refused.value.param, switch.policy.name) == ("policy", PolicyName.PREFIX_ONLY)
