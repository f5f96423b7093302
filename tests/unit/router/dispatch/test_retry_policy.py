"""Test the retry policy and its budget."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.clock import ManualClock
from tandem.core.config import Disaggregation, RouterSection
from tandem.core.errors import (
    CancelledError,
    CapacityError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    PairRefusedError,
    RequestTooLargeError,
    TandemError,
    TransferError,
    UnavailableError,
    WorkerLostError,
)
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.state_enums import RoleName
from tandem.router.dispatch.retry_policy import (
    BURST_S,
    SECOND_CHANCE_S,
    AttemptHistory,
    Cause,
    Failure,
    Member,
    RetryBudget,
    RetryLater,
    RetryPolicy,
    judge,
    lost,
)
from tandem.router.routing.plan import Candidate, Job, Plan
from tandem.router.routing.policies import create_policy
from tests.unit.router.facts import worker_facts

JOB = Job(prompt_tokens=100, max_tokens=10)
GONE = WorkerLostError("worker gone")


def member(worker: str, incarnation: int = 1) -> Member:
    return (WorkerId(worker), Incarnation(incarnation))


ROLES = {"p": RoleName.PREFILL, "d": RoleName.DECODE, "m": RoleName.MIXED}


def candidate(worker: str, incarnation: int = 1) -> Candidate:
    facts = worker_facts(worker, ROLES[worker[0]], incarnation)
    return Candidate(worker=facts.worker, incarnation=facts.incarnation, role=facts.role, profile=facts.profile)


def candidates(*workers: str) -> list[Candidate]:
    return [candidate(worker) for worker in workers]


def failure(*workers: str, cause: Cause = Cause.LOST, is_charged: bool = False) -> Failure:
    blamed = frozenset(map(member, workers))
    return Failure(cause=cause, error=GONE, suspects=blamed, charged=blamed if is_charged else frozenset())


class Case:
    """A router's decisions on a clock that stands still."""

    def __init__(self, **settings: object) -> None:
        self.clock = ManualClock(1000.0)
        section = replace(RouterSection(), **settings)  # type: ignore[arg-type]
        self.retry_policy = RetryPolicy(create_policy(section.policy, section.disaggregation), section, self.clock)
        self.history = AttemptHistory()

    def fail(self, *workers: str, **more: object) -> None:
        self.retry_policy.note(self.history, failure(*workers, **more))  # type: ignore[arg-type]

    def choose(self, *workers: str, job: Job = JOB) -> tuple[str | None, str] | float:
        """(prefill, decode), or in how many seconds to look again."""
        chosen = self.retry_policy.choose(job, candidates(*workers), self.history)
        if isinstance(chosen, RetryLater):
            return chosen.until_s - self.clock.now_s()
        return chosen.prefill, chosen.decode


def test_a_machine_that_lost_two_workers_of_a_request_is_left_until_nobody_else_is_there() -> None:
    """A machine dies worker by worker, as its connections break; a request must not follow it to the last one."""
    case = Case(disaggregation=Disaggregation.NEVER, max_attempts=4)
    there = {"d1": "a", "d2": "a", "d3": "a", "d4": "a", "d5": "b"}

    def next_of(*left: str, is_busy: bool = True) -> str | None:
        """d5 has much to do, so it is never chosen while there is another."""
        able = [replace(candidate(one), host=there[one]) for one in left]
        able = [replace(one, running=200, in_flight=200) if one.worker == "d5" and is_busy else one for one in able]
        plan = case.retry_policy.choose(JOB, able, case.history)
        assert isinstance(plan, Plan)
        return plan.decode

    first = next_of("d1", "d2", "d3", "d4", "d5")
    assert first in ("d1", "d2", "d3", "d4")
    case.fail(first)
    left = sorted(there.keys() - {first})
    second = next_of(*left)
    assert second in ("d1", "d2", "d3", "d4"), "one death says nothing of the machine"
    case.fail(second)
    left.remove(second)
    assert next_of(*left) == "d5"
    left.remove("d5")
    assert next_of(*left) in left, "better there than nowhere"


@pytest.mark.parametrize(
    ("error", "count"), [(CancelledError("cancelled"), 1), (WorkerLostError("gone"), 0), (PairRefusedError("no"), 0)]
)
def test_one_failure_is_one_loss_of_a_machine_and_a_refused_pair_is_none(error: TandemError, count: int) -> None:
    """Both workers of an attempt may be suspects; a pair that does not fit has broken nothing."""
    case = Case(disaggregation=Disaggregation.ALWAYS)
    here = [replace(one, host="a") for one in candidates("p1", "d1")]
    plan = case.retry_policy.choose(JOB, here, case.history)
    assert isinstance(plan, Plan)
    assert plan.workers == ("p1", "d1")
    failed = judge(error, P, D)
    assert failed is not None
    case.retry_policy.note(case.history, failed)
    assert case.history.lost_on["a"] == count


def test_an_answer_goes_on_in_the_revision_that_began_it_while_that_can_serve() -> None:
    """Answers of two revisions may differ; but better another than none."""
    case = Case()

    def of(revision: str, *workers: str) -> list[Candidate]:
        found = candidates(*workers)
        return [replace(one, profile=replace(one.profile, revision=revision)) for one in found if one.profile]

    case.history.revision = "r1"
    everybody = [*of("r2", "p2", "d2"), *of("r1", "p1", "d1")]
    for _ in range(4):
        plan = case.retry_policy.choose(JOB, everybody, case.history)
        assert isinstance(plan, Plan)
        assert set(plan.workers) <= {"p1", "d1"}
    plan = case.retry_policy.choose(JOB, [*of("r2", "p2", "d2"), *of("r1", "p1")], case.history)
    assert isinstance(plan, Plan)
    assert set(plan.workers) <= {"p2", "d2"}


# ---- at fault ------------------------------------------------------------------------------------------------------

P, D = member("p1"), member("d1")


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("n is 0"), ContextLengthError("too long"), RequestTooLargeError("too large"),
        DeadlineError("late"),
    ],
)  # fmt: skip
def test_the_request_s_own_fault_is_never_tried_again(error: TandemError) -> None:
    assert judge(error, P, D) is None


@pytest.mark.parametrize(
    ("error", "cause", "suspects", "charged"),
    [
        (TransferError("the link broke"), Cause.TRANSFER, {D}, {P, D}),
        (PairRefusedError("they do not fit"), Cause.TRANSFER, {D}, set()),
        (CancelledError("cancelled"), Cause.LOST, {P, D}, set()),
        (CapacityError("full"), Cause.REFUSED, {P}, set()),
        (UnavailableError("draining"), Cause.REFUSED, {P}, {P}),
        (InternalError("a bug"), Cause.BROKEN, {P}, {P}),
        (WorkerLostError("a rank is gone"), Cause.BROKEN, {P}, {P}),
    ],
)
def test_a_worker_s_fault(error: TandemError, cause: Cause, suspects: set[Member], charged: set[Member]) -> None:
    judged = judge(error, P, D)
    assert judged is not None
    assert (judged.cause, set(judged.suspects), set(judged.charged)) == (cause, suspects, charged)


def test_alone_there_is_nobody_else_to_blame() -> None:
    judged = judge(TransferError("a fetch broke"), D, None)
    assert judged is not None
    assert judged.suspects == {D}
    assert lost(GONE, D).suspects == {D}


# ---- next worker ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Disaggregation.AUTO, Disaggregation.ALWAYS])
def test_another_one_of_that_role(mode: Disaggregation) -> None:
    case = Case(disaggregation=mode)
    case.fail("p1")
    assert case.choose("p1", "p2", "d1") == ("p2", "d1")
    case.fail("d1")
    assert case.choose("p1", "p2", "d1", "d2") == ("p2", "d2")


def test_no_prefill_worker_left_and_the_decode_worker_does_all() -> None:
    case = Case()
    assert case.choose("d1", "d2") == (None, "d1")
    case.fail("p1")
    assert case.choose("p1", "d1") == (None, "d1")


def test_where_every_answer_has_to_cross_it_waits_for_the_suspect() -> None:
    case = Case(disaggregation=Disaggregation.ALWAYS)
    case.fail("p1")
    assert case.choose("p1", "d1") == pytest.approx(SECOND_CHANCE_S)
    case.clock.advance(SECOND_CHANCE_S + 0.001)
    assert case.choose("p1", "d1") == ("p1", "d1")
    case.fail("p1")
    assert case.choose("p1", "d1") == pytest.approx(2 * SECOND_CHANCE_S)


def test_a_new_incarnation_is_no_suspect() -> None:
    case = Case()
    case.fail("d1")
    plan = case.retry_policy.choose(JOB, [candidate("p1"), candidate("d1", 2)], case.history)
    assert isinstance(plan, Plan)
    assert plan.workers == ("p1", "d1")


def test_an_open_breaker_counts_for_both_legs_and_yields_to_need() -> None:
    case = Case(breaker_failures=1)
    for worker in ("p1", "d1"):
        case.clock.advance(BURST_S)
        case.retry_policy.note(AttemptHistory(), failure(worker, is_charged=True))
    assert case.choose("p1", "p2", "d1", "d2") == ("p2", "d2")
    assert case.choose("p1", "d2") == (None, "d2")
    assert case.choose("p1", "d1") == ("p1", "d1"), "nobody else is left"


# ---- when, and when not --------------------------------------------------------------------------------------------


def test_nobody_was_ever_here() -> None:
    with pytest.raises(UnavailableError, match="no prefill and no decode worker is connected"):
        Case().choose()
    with pytest.raises(UnavailableError, match="no decode worker is connected"):
        Case().choose("p1")


def test_a_worker_that_was_lost_is_waited_for_until_it_is_too_late() -> None:
    case = Case(worker_wait_s=10.0)
    case.retry_policy.recently_lost.came(worker_facts("d1", RoleName.DECODE))
    case.retry_policy.recently_lost.went(WorkerId("d1"))
    case.clock.advance(4.0)
    assert case.choose("p1") == pytest.approx(6.0)
    assert case.choose() == pytest.approx(6.0), "the decode worker could do all itself"
    case.fail("d1")
    assert case.choose("p1") == pytest.approx(6.0)
    case.retry_policy.recently_lost.came(worker_facts("d1", RoleName.DECODE, incarnation=2))
    with pytest.raises(WorkerLostError):
        case.choose("p1")
    case.retry_policy.recently_lost.went(WorkerId("d1"))
    case.clock.advance(10.0)
    with pytest.raises(WorkerLostError, match="worker gone"):
        case.choose("p1")


def test_a_lost_worker_that_would_not_help_is_not_waited_for() -> None:
    case = Case(disaggregation=Disaggregation.ALWAYS)
    case.retry_policy.recently_lost.came(worker_facts("d1", RoleName.DECODE))
    case.retry_policy.recently_lost.went(WorkerId("d1"))
    with pytest.raises(UnavailableError, match="no prefill"):
        case.choose("d2")
    never = Case(worker_wait_s=0.0)
    never.retry_policy.recently_lost.came(worker_facts("d1", RoleName.DECODE))
    never.retry_policy.recently_lost.went(WorkerId("d1"))
    with pytest.raises(UnavailableError):
        never.choose("p1")


def test_attempts_and_budget_are_bounded() -> None:
    case = Case(max_attempts=3, retry_burst=10)
    denials = []
    for _ in range(3):
        case.fail("p1")
        denials.append(case.retry_policy.denial(case.history))
    assert denials == ["", "", "attempts"]
    assert case.retry_policy.budget.tokens == 8
    poor = Case(retry_burst=1, retry_per_s=0.0)
    answers = []
    for _ in range(2):
        history = AttemptHistory()
        poor.retry_policy.note(history, failure("p1"))
        answers.append(poor.retry_policy.denial(history))
    assert answers == ["", "budget"]


WORKERS = ["p1", "p2", "d1", "d2", "m1"]


@settings(deadline=None)
@given(
    up=st.sets(st.sampled_from(WORKERS)),
    failures=st.lists(st.sets(st.sampled_from(WORKERS), min_size=1, max_size=2), max_size=4),
    tripped=st.sets(st.sampled_from(WORKERS)),
    mode=st.sampled_from(list(Disaggregation)),
    max_tokens=st.integers(1, 3),
    later_s=st.sampled_from([0.05, 3.0]),
)
def test_suspects_and_open_breakers_only_if_nobody_else_is_left(
    up: set[str],
    failures: list[set[str]],
    tripped: set[str],
    mode: Disaggregation,
    max_tokens: int,
    later_s: float,
) -> None:
    case = Case(disaggregation=mode, breaker_failures=1, worker_wait_s=0.0)
    job = replace(JOB, max_tokens=max_tokens)
    for worker in sorted(tripped):
        case.retry_policy.breakers.failed(member(worker))
    for blamed in failures:
        case.fail(*blamed)
    suspects = set().union(*failures)
    case.clock.advance(later_s)
    try:
        chosen = case.choose(*sorted(up), job=job)
    except TandemError:
        assert not _can_serve(up, mode, max_tokens)
        return
    if isinstance(chosen, float):
        assert not _can_serve(up - suspects, mode, max_tokens)
        assert 0 < chosen <= SECOND_CHANCE_S * 2 ** len(failures)
        return
    planned = {worker for worker in chosen if worker is not None}
    assert planned <= up
    if planned & suspects:
        assert not _can_serve(up - suspects, mode, max_tokens)
    elif planned & tripped:
        assert not _can_serve(up - suspects - tripped, mode, max_tokens)


def _can_serve(up: set[str], mode: Disaggregation, max_tokens: int) -> bool:
    roles = {worker[0] for worker in up}
    if mode is Disaggregation.NEVER:
        return bool(roles & {"m", "d"})
    if max_tokens == 1 and roles & {"p", "m"}:
        return True
    if mode is Disaggregation.AUTO and roles & {"m", "d"}:
        return True
    return {"p", "d"} <= roles


def test_a_burst_then_a_share_of_the_requests() -> None:
    budget = RetryBudget(3, 0.5, 0.0, ManualClock())
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    budget.deposit()
    assert not budget.take()
    budget.deposit()
    assert budget.take()
    assert not budget.take()


def test_time_fills_it_up_to_the_burst() -> None:
    clock = ManualClock()
    budget = RetryBudget(5, 0.0, 2.0, clock)
    while budget.take():
        pass
    clock.advance(1.0)
    assert budget.tokens == pytest.approx(2.0)
    clock.advance(1000.0)
    assert budget.tokens == 5


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["earn", "take"]), st.floats(0, 2)), max_size=80))
def test_never_more_than_was_paid_for(steps: list[tuple[str, float]]) -> None:
    clock = ManualClock()
    budget = RetryBudget(4, 0.2, 0.5, clock)
    taken = earned = 0
    for what, pause_s in steps:
        clock.advance(pause_s)
        if what == "earn":
            budget.deposit()
            earned += 1
        else:
            taken += budget.take()
        assert 0 <= budget.tokens <= 4
        assert taken <= 4 + 0.2 * earned + 0.5 * clock.now_s() + 1e-6
