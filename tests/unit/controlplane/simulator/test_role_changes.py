"""Flips on virtual time: drained first, nothing lost, the cache stays; and the planner that asks for them."""

import dataclasses
from functools import partial

import pytest

from tandem.controlplane.planner.records import RoleSplit, Rules
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.setup import Setup
from tandem.controlplane.simulator.simulator import Outcome, Simulator
from tandem.controlplane.simulator.summary import attained
from tandem.controlplane.simulator.traces import RequestLog, TraceRequest
from tandem.controlplane.simulator.workloads import ConversationWorkload, conversations, shared_prompt
from tandem.core.config import AdmissionSection, Disaggregation, PlannerMode, PolicyName, SloSection
from tandem.core.prefill_queue import QueueRules
from tandem.core.state_enums import RoleName
from tandem.router.routing.policies import create_policy

COST = create_policy(PolicyName.COST, Disaggregation.AUTO)
SLOW = dataclasses.replace(
    Calibration(), prefill_step_s=0.0, prefill_token_s=5e-4, prefill_context_s=0.0, decode_step_s=0.02,
    decode_sequence_s=0.001, decode_context_s=0.0,
)  # fmt: skip
PROMISES = {"": SloSection(ttft_s=3.0, itl_s=0.05)}


def setup(prefill: int, decode: int, **changes: object) -> Setup:
    base = Setup(
        policy=COST, queue=QueueRules(), calibration=SLOW, admission=AdmissionSection(), prefill=prefill, decode=decode,
        promises=PROMISES,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def flipped(setup: Setup, trace: RequestLog, *moments: tuple[float, RoleSplit]) -> tuple[Simulator, Outcome]:
    laboratory = Simulator(setup, trace)
    for at_s, split in moments:
        laboratory._events.at(at_s, partial(laboratory.steering.go_to, split))
    return laboratory, laboratory.run()


def test_flips_lose_nothing_and_leave_nothing_behind() -> None:
    trace = conversations(ConversationWorkload(requests=250, rate=1.5, first_tokens=1500), seed=3)
    moments = ((20.0, RoleSplit(3, 5)), (50.0, RoleSplit(5, 3)), (80.0, RoleSplit(4, 4)), (110.0, RoleSplit(2, 4, 2)))
    laboratory, outcome = flipped(setup(4, 4), trace, *moments)
    assert len(outcome.records) == 250
    assert len(outcome.flips) == 1 + 2 + 1 + 2
    for flip in outcome.flips:
        assert flip.asked_s <= flip.drained_s
        assert flip.ready_s == pytest.approx(flip.drained_s + 0.5)
    roles = [worker.role_name for worker in laboratory.workers.values()]
    assert [roles.count(role) for role in (RoleName.PREFILL, RoleName.DECODE, RoleName.MIXED)] == [2, 4, 2]
    for worker in laboratory.workers.values():
        counts = worker.space.ledgers[0].counts()
        assert (counts.request, counts.pushing, counts.reserved) == (0, 0, 0)
        assert not worker.flights


def test_a_worker_that_flips_gets_nothing_until_it_is_ready() -> None:
    """One request a second for two prefill workers in turns; the answer of two seconds holds up the drain."""
    requests = [TraceRequest(arrival_s=float(n), prompt_tokens=600, output_tokens=100) for n in range(20)]
    laboratory, outcome = flipped(setup(2, 2), RequestLog(name="t", requests=tuple(requests)), (5.5, RoleSplit(3, 1)))
    (flip,) = outcome.flips
    assert flip.before is RoleName.DECODE
    assert flip.drained_s > flip.asked_s
    for record in outcome.records:
        if flip.asked_s < record.arrival_s < flip.ready_s - 0.1:
            assert flip.worker not in (record.prefill, record.decode)
    assert any(record.prefill == flip.worker for record in outcome.records if record.arrival_s > flip.ready_s)
    assert laboratory.steering.is_settled


def test_what_it_held_it_still_holds() -> None:
    """Both decode workers have the system prompt; the one that turns to prefill need not compute it."""
    trace = shared_prompt(requests=60, rate=1.0, shared_tokens=2048, own_tokens=300, output_tokens=20, seed=2)
    _, outcome = flipped(setup(1, 3, is_fetching=False), trace, (30.0, RoleSplit(2, 2)))
    (flip,) = outcome.flips
    first = next(record for record in outcome.records if record.prefill == flip.worker)
    assert first.arrival_s > flip.ready_s - 1.0
    assert first.cached_tokens >= 2048


def test_only_flips_lead_from_one_split_to_another() -> None:
    laboratory = Simulator(setup(2, 2), RequestLog(name="t", requests=()))
    with pytest.raises(ValueError, match="cannot become"):
        laboratory.steering.go_to(RoleSplit(3, 3))


def shift() -> RequestLog:
    """Two and a half minutes of long prompts, then as many of long answers: 4 a second."""
    prompts = shared_prompt(requests=600, rate=4.0, shared_tokens=0, own_tokens=2000, output_tokens=15, seed=1)
    answers = shared_prompt(requests=600, rate=4.0, shared_tokens=0, own_tokens=300, output_tokens=250, seed=2)
    return prompts.followed_by(answers)


@pytest.mark.slow
def test_the_planner_follows_a_load_that_shifts() -> None:
    rules = Rules(mode=PlannerMode.ACT, window_s=60.0)
    outcome = Simulator(setup(3, 5, planner=rules), shift()).run()
    fixed = Simulator(setup(3, 5), shift()).run()
    assert 1 <= len(outcome.flips) <= 6
    acted = [decision for decision in outcome.decisions if decision.is_to_act]
    assert sum(decision.flips for decision in acted) == len(outcome.flips)
    assert all(decision.wanted.total == 8 for decision in outcome.decisions)
    assert attained(outcome.records, PROMISES[""]) > attained(fixed.records, PROMISES[""])


def test_a_planner_that_advises_changes_nothing() -> None:
    trace = shift().first(120.0)
    advised = Simulator(setup(5, 3, planner=Rules(mode=PlannerMode.ADVISE, window_s=60.0)), trace).run()
    fixed = Simulator(setup(5, 3), trace).run()
    assert advised.records == fixed.records
    assert not advised.flips
    assert len(advised.decisions) > 10
