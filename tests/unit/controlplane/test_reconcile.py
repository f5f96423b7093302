"""A controller's next actions, in a world in which everything takes its time and controllers die all the while."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.controlplane.reconcile import Action, ActionKind, ObservedPhase, ObservedWorker, plan
from tandem.core.desired import INITIAL
from tandem.core.desired_changes import cordoned, restarted, with_role, with_scale
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName
from tests.unit.controlplane.world import D, M, P, World, settle, step, wanted, wish


def worker(
    name: str,
    role: RoleName,
    life: ObservedPhase = ObservedPhase.READY,
    generation: int = 0,
    target: RoleName | None = None,
    revision: str = INITIAL,
) -> ObservedWorker:
    return ObservedWorker(
        worker_id=WorkerId(name), model="m", role=role, life=life, restart_generation=generation, target=target,
        revision=revision,
    )  # fmt: skip


def pair(*more: ObservedWorker) -> list[ObservedWorker]:
    return [worker("prefill-0", P), worker("decode-0", D), *more]


def deeds(actions: Sequence[Action]) -> list[tuple[ActionKind, str]]:
    return [(action.deed, action.worker_id) for action in actions]


def test_what_is_as_wanted_is_left_alone() -> None:
    assert plan(wanted(prefill=1, decode=1), pair()).actions == ()


def test_who_leaves_is_drained_and_stopped_when_it_has_nothing_left() -> None:
    state = wanted(prefill=1, decode=1)
    for life, expected in (
        (ObservedPhase.READY, [(ActionKind.DRAIN, "decode-1")]),
        (ObservedPhase.DRAINING, []),
        (ObservedPhase.DRAINED, [(ActionKind.STOP, "decode-1")]),
        (ObservedPhase.STARTING, [(ActionKind.STOP, "decode-1")]),
        (ObservedPhase.SILENT, [(ActionKind.STOP, "decode-1")]),
        (ObservedPhase.FLIPPING, []),
        (ObservedPhase.STOPPING, []),
    ):
        assert deeds(plan(state, pair(worker("decode-1", D, life))).actions) == expected, life


def test_nobody_leaves_before_another_is_ready_to_do_its_work() -> None:
    state = replace(wanted(prefill=1, decode=2), version=2)
    gone = with_scale(state, {D: 1}, {}, may_flip=False)
    assert [member.worker_id for member in gone.members] == ["prefill-0", "decode-0"]
    seen = [worker("prefill-0", P), worker("decode-0", D, ObservedPhase.STARTING), worker("decode-1", D)]
    made = plan(gone, seen)
    assert made.actions == ()
    assert made.waits == {"decode-1": "no other worker is ready to do what a decode worker does"}
    helped = plan(gone, [*seen, worker("mixed-9", M)])
    assert (ActionKind.DRAIN, "decode-1") in deeds(helped.actions)


def test_of_two_who_may_go_the_second_waits_where_both_would_be_too_many() -> None:
    state = restarted(restarted(wanted(prefill=2, decode=1), "prefill-0"), "prefill-1")
    seen = [worker("prefill-0", P), worker("prefill-1", P), worker("decode-0", D)]
    made = plan(state, seen)
    assert deeds(made.actions) == [(ActionKind.DRAIN, "prefill-0")]
    assert list(made.waits) == ["prefill-1"]


def test_a_flip_waits_for_whoever_takes_over() -> None:
    state = with_role(with_role(wanted(prefill=2, decode=2), "prefill-0", D), "decode-0", P)
    state = with_role(with_role(state, "prefill-1", D), "decode-1", P)
    seen = [worker("prefill-0", P), worker("prefill-1", P), worker("decode-0", D), worker("decode-1", D)]
    assert deeds(plan(state, seen).actions) == [(ActionKind.BECOME, "prefill-0"), (ActionKind.BECOME, "decode-0")]


def test_a_flip_under_way_is_undone_by_the_role_that_it_has() -> None:
    state = wanted(prefill=1, decode=2)
    for member_of, target, expected in (
        (state, P, [(ActionKind.BECOME, "decode-1")]),
        (with_role(state, "decode-1", P), P, []),
        (with_role(state, "decode-1", P), M, [(ActionKind.BECOME, "decode-1")]),
        (with_scale(state, {D: 1}, {}), P, []),
    ):
        seen = pair(worker("decode-1", D, ObservedPhase.FLIPPING, target=target))
        assert deeds(plan(member_of, seen).actions) == expected


def test_cordons_are_laid_and_lifted() -> None:
    state = cordoned(wanted(prefill=2, decode=1), "prefill-1", is_cordoned=True)
    assert deeds(plan(state, pair(worker("prefill-1", P))).actions) == [(ActionKind.DRAIN, "prefill-1")]
    for life in (ObservedPhase.DRAINING, ObservedPhase.DRAINED):
        seen = pair(worker("prefill-1", P, life))
        assert plan(state, seen).actions == ()
        lifted = cordoned(state, "prefill-1", is_cordoned=False)
        assert deeds(plan(lifted, seen).actions) == [(ActionKind.UNCORDON, "prefill-1")]


def test_starts_keep_to_the_bound_of_ranks() -> None:
    state = wanted(prefill=1, decode=2, max_ranks=3)
    made = plan(state, pair(worker("decode-9", D, ObservedPhase.DRAINING)))
    assert made.actions == ()
    assert made.waits == {"decode-1": "no room for 1 more ranks: 3 run, max_ranks is 3"}
    assert deeds(plan(state, pair()).actions) == [(ActionKind.START, "decode-1")]


def test_without_steering_workers_are_stopped_and_started_instead() -> None:
    state = with_role(wanted(prefill=1, decode=2), "decode-1", P)
    made = plan(state, pair(worker("decode-1", D)), can_steer=False)
    assert deeds(made.actions) == [(ActionKind.STOP, "decode-1")]


def test_nobody_leaves_for_half_a_pair_of_another_revision() -> None:
    """Workers of two revisions do not work together."""
    state = wanted(prefill=1, decode=1)
    old, new = pair(), [worker("prefill-1", P, revision="r2"), worker("decode-1", D, revision="r2")]
    moved = replace(state, pools=tuple(replace(pool, revision="r2") for pool in state.pools), members=tuple(
        replace(member, worker_id=WorkerId(f"{member.pool}-1")) for member in state.members
    ))  # fmt: skip
    half = plan(moved, [*old, new[0]])
    assert deeds(half.actions) == [(ActionKind.START, "decode-1")]
    assert set(half.waits) == {"prefill-0", "decode-0"}
    assert deeds(plan(moved, [*old, *new]).actions) == [(ActionKind.DRAIN, "prefill-0"), (ActionKind.DRAIN, "decode-0")]


def test_held_workers_are_left_alone_and_do_not_count_as_help() -> None:
    state = restarted(wanted(prefill=1, decode=2), "decode-0")
    seen = pair(worker("decode-1", D))
    assert deeds(plan(state, seen).actions) == [(ActionKind.DRAIN, "decode-0")]
    assert plan(state, seen, held={WorkerId("decode-0")}).actions == ()
    assert plan(state, seen, held={WorkerId("decode-1")}).actions == ()


seeds = st.integers(0, 2**32)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, dies_every_time=st.booleans(), wishes=st.integers(1, 6))
def test_wishes_one_after_the_other_come_true(seed: int, dies_every_time: bool, wishes: int) -> None:
    rng = random.Random(seed)
    state, world = wanted(prefill=2, decode=2, max_ranks=9), World(rng, 9)
    for _ in range(wishes):
        state, waiting = settle(state, world, dies_every_time=dies_every_time)
        assert waiting == set()
        state = wish(state, rng)
    assert settle(state, world, dies_every_time=dies_every_time)[1] == set()


@settings(max_examples=100, deadline=None)
@given(seed=seeds, dies_every_time=st.booleans(), wishes=st.integers(1, 6))
def test_wishes_that_overtake_each_other_come_true_or_say_what_they_wait_for(
    seed: int, dies_every_time: bool, wishes: int
) -> None:
    """A worker serves at every moment, also where that means that a step has to wait for the next request."""
    rng = random.Random(seed)
    state, world = wanted(prefill=2, decode=2, max_ranks=9), World(rng, 9)
    state, _ = settle(state, world, dies_every_time=dies_every_time)
    for _ in range(wishes):
        state = wish(state, rng)
        for _ in range(rng.randint(0, 8)):
            state, _ = step(state, world, most=1)
            world.pass_time()
    settle(state, world, dies_every_time=dies_every_time)


@pytest.mark.parametrize("dies_every_time", [True, False])
def test_two_thirds_of_a_cluster_change_sides(dies_every_time: bool) -> None:
    world = World(random.Random(3), 0)
    state = wanted(prefill=1, decode=1)
    for counts in ({P: 2, D: 4}, {P: 3, D: 1}, {P: 1, D: 1}):
        state = with_scale(state, counts, {})
        assert settle(state, world, dies_every_time=dies_every_time) == (state, set())
