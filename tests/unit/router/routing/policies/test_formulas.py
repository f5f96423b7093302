"""The published formulas, by hand-made numbers."""

import pytest

from tandem.core.config import Disaggregation, PolicyName
from tandem.router.routing.plan import Candidate, Job
from tandem.router.routing.policies import create_policy, dynamo, llm_d, sglang
from tandem.router.routing.policies.by_role import LEAST_LOADED, PREFIX_ONLY, ROUND_ROBIN
from tests.unit.router.candidates import d, m, p

JOB = Job(prompt_tokens=160, max_tokens=9)
least_loaded, prefix_only, round_robin = LEAST_LOADED, PREFIX_ONLY, ROUND_ROBIN


def test_least_loaded_sees_no_prefix() -> None:
    workers = [p(queued_tokens=50, reusable_tokens=160), p("p1", queued_tokens=20)]
    assert least_loaded.prefill_scores(JOB, workers) == [50, 20]
    assert least_loaded.decode_scores(JOB, [d(in_flight=4, held_tokens=160), d(in_flight=3)]) == [4, 3]


def test_prefix_only_sees_no_load() -> None:
    workers = [p(queued_tokens=50, reusable_tokens=144), p("p1")]
    assert prefix_only.prefill_scores(JOB, workers) == [16, 160]
    assert prefix_only.decode_scores(JOB, [d(in_flight=4, held_tokens=160), d()]) == [0, 160]


def test_round_robin_sees_nothing() -> None:
    workers = [p(queued_tokens=50, reusable_tokens=144), p("p1")]
    assert len(set(round_robin.prefill_scores(JOB, workers) + round_robin.decode_scores(JOB, workers))) == 1


def test_dynamo_adds_blocks_to_prefill_and_blocks_in_use() -> None:
    """160 tokens are ten blocks."""
    workers = [
        p(queued_tokens=32, reusable_tokens=80, total_blocks=100, free_blocks=90),
        p("p1", total_blocks=100, free_blocks=100),
        p("p2", reusable_tokens=160, total_blocks=100, free_blocks=40),
    ]
    assert dynamo.prefill_scores(JOB, workers) == [2 + 5 + 10 + 10, 10 + 10, 60 + 10]
    assert dynamo.decode_scores(JOB, workers) == [20, 10, 70], "no overlap where the answer is decoded"


def test_llm_d_weighs_queue_free_blocks_and_prefix() -> None:
    workers = [
        p(queued_requests=4, total_blocks=100, free_blocks=50, reusable_tokens=160),
        p("p1", queued_requests=0, total_blocks=100, free_blocks=100),
        p("p2", queued_requests=1, total_blocks=100, free_blocks=0, reusable_tokens=80),
    ]
    assert llm_d.prefill_scores(JOB, workers) == pytest.approx([-(0 + 1 + 3), -(2 + 2 + 0), -(1.5 + 0 + 1.5)])
    assert llm_d.decode_scores(JOB, [d(), d("d1", held_tokens=160)]) == [-4, -7], "equal queues, nothing known"


@pytest.mark.parametrize(
    ("loads", "held", "wanted"),
    [
        ((65, 0), (160, 0), (65, 0)),
        ((64, 0), (160, 0), (-160, 0)),
        ((300, 230), (160, 0), (-160, 0)),
        ((9, 3), (48, 0), (9, 3)),
        ((9, 3), (49, 0), (-49, 0)),
    ],
    ids=["out of balance", "in balance", "in balance by ratio", "too short a match", "long enough a match"],
)
def test_sglang_switches(loads: tuple[int, int], held: tuple[int, int], wanted: tuple[float, float]) -> None:
    able = list(zip(loads, held, strict=True))
    prefills = [p(f"p{i}", in_flight=load, reusable_tokens=tokens) for i, (load, tokens) in enumerate(able)]
    decodes = [d(f"d{i}", in_flight=load, held_tokens=tokens) for i, (load, tokens) in enumerate(able)]
    assert tuple(sglang.prefill_scores(JOB, prefills)) == wanted
    assert tuple(sglang.decode_scores(JOB, decodes)) == wanted


def chosen(policy: PolicyName, *workers: Candidate) -> tuple[str, ...]:
    return create_policy(policy, Disaggregation.AUTO).plan(JOB, workers).workers


def test_roles_are_chosen_one_after_the_other() -> None:
    workers = (p(queued_tokens=9), p("p1"), d(in_flight=2), d("d1"))
    assert chosen(PolicyName.LEAST_LOADED, *workers) == ("p1", "d1")
    assert chosen(PolicyName.LEAST_LOADED, p(queued_tokens=9), d(), m(queued_tokens=8)) == ("m0",)
    assert chosen(PolicyName.LEAST_LOADED, p(queued_tokens=7), d(), m(queued_tokens=8)) == ("p0", "d0")
    assert chosen(PolicyName.LEAST_LOADED, d(queued_tokens=9), d("d1")) == ("d1",), "nobody else can compute"


def test_a_worker_that_nothing_is_known_of() -> None:
    """Dynamo counts no block in use, llm-d neither queue nor pool; no formula fails where there are no candidates."""
    assert dynamo.prefill_scores(JOB, [p(free_blocks=9)]) == [20]
    assert dynamo.prefill_scores(JOB, [p(reusable_tokens=176)]) == [10]
    assert llm_d.prefill_scores(JOB, [p(queued_requests=3)]) == [-4]
    assert llm_d.prefill_scores(JOB, [p(reusable_tokens=320)]) == [-7]
    assert llm_d.prefill_scores(Job(prompt_tokens=0, max_tokens=1), [p(reusable_tokens=1)]) == [-7]
    for formula in (dynamo, llm_d, sglang, least_loaded, prefix_only, round_robin):
        assert formula.prefill_scores(JOB, []) == formula.decode_scores(JOB, []) == []


def test_a_pair_is_weighed_where_decode_workers_are_there_to_pair_with() -> None:
    assert create_policy(PolicyName.ROUND_ROBIN, Disaggregation.NEVER).plan(JOB, (p(), d())).workers == ("d0",)
    reasons = {
        option.reason for option in create_policy(PolicyName.LLM_D, Disaggregation.AUTO).plan(JOB, (p(), d())).options
    }
    assert reasons == {"llm_d: pair"}
