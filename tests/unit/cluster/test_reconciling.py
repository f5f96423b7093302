"""What a controller does next, against a world in which everything takes its time and controllers die all the while."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.reconciling import Action, Deed, Life, Seen, plan
from tandem.core.desired import DesiredState, Pool
from tandem.core.errors import ConflictError
from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName
from tandem.core.wishes import cordoned, flipped, restarted, scaled

P, D, M = RoleName.PREFILL, RoleName.DECODE, RoleName.MIXED


def wanted(*, prefill: int = 0, decode: int = 0, mixed: int = 0, max_ranks: int = 0) -> DesiredState:
    counts = {P: prefill, D: decode, M: mixed}
    pools = tuple(Pool(name=role.value, model="m", role=role, count=count) for role, count in counts.items())
    return DesiredState(version=1, pools=pools, max_ranks=max_ranks).filled()


def worker(
    name: str, role: RoleName, life: Life = Life.READY, generation: int = 0, target: RoleName | None = None
) -> Seen:
    return Seen(worker_id=WorkerId(name), model="m", role=role, life=life, restart_generation=generation, target=target)


def pair(*more: Seen) -> list[Seen]:
    return [worker("prefill-0", P), worker("decode-0", D), *more]


def deeds(actions: Sequence[Action]) -> list[tuple[Deed, str]]:
    return [(action.deed, action.worker_id) for action in actions]


def test_what_is_as_wanted_is_left_alone() -> None:
    assert plan(wanted(prefill=1, decode=1), pair()).actions == ()


def test_who_leaves_is_drained_and_stopped_when_it_has_nothing_left() -> None:
    state = wanted(prefill=1, decode=1)
    for life, expected in (
        (Life.READY, [(Deed.DRAIN, "decode-1")]),
        (Life.DRAINING, []),
        (Life.DRAINED, [(Deed.STOP, "decode-1")]),
        (Life.STARTING, [(Deed.STOP, "decode-1")]),
        (Life.SILENT, [(Deed.STOP, "decode-1")]),
        (Life.FLIPPING, []),
        (Life.STOPPING, []),
    ):
        assert deeds(plan(state, pair(worker("decode-1", D, life))).actions) == expected, life


def test_nobody_leaves_before_another_is_ready_to_do_its_work() -> None:
    state = replace(wanted(prefill=1, decode=2), version=2)
    gone = scaled(state, {D: 1}, {}, may_flip=False)
    assert [member.worker_id for member in gone.members] == ["prefill-0", "decode-0"]
    seen = [worker("prefill-0", P), worker("decode-0", D, Life.STARTING), worker("decode-1", D)]
    made = plan(gone, seen)
    assert made.actions == ()
    assert made.waits == {"decode-1": "no other worker is ready to do what a decode worker does"}
    helped = plan(gone, [*seen, worker("mixed-9", M)])
    assert (Deed.DRAIN, "decode-1") in deeds(helped.actions)


def test_of_two_who_may_go_the_second_waits_where_both_would_be_too_many() -> None:
    state = restarted(restarted(wanted(prefill=2, decode=1), "prefill-0"), "prefill-1")
    seen = [worker("prefill-0", P), worker("prefill-1", P), worker("decode-0", D)]
    made = plan(state, seen)
    assert deeds(made.actions) == [(Deed.DRAIN, "prefill-0")]
    assert list(made.waits) == ["prefill-1"]


def test_a_flip_waits_for_whoever_takes_over() -> None:
    state = flipped(flipped(wanted(prefill=2, decode=2), "prefill-0", D), "decode-0", P)
    state = flipped(flipped(state, "prefill-1", D), "decode-1", P)
    seen = [worker("prefill-0", P), worker("prefill-1", P), worker("decode-0", D), worker("decode-1", D)]
    assert deeds(plan(state, seen).actions) == [(Deed.BECOME, "prefill-0"), (Deed.BECOME, "decode-0")]


def test_a_flip_under_way_is_undone_by_the_role_that_it_has() -> None:
    state = wanted(prefill=1, decode=2)
    for member_of, target, expected in (
        (state, P, [(Deed.BECOME, "decode-1")]),
        (flipped(state, "decode-1", P), P, []),
        (flipped(state, "decode-1", P), M, [(Deed.BECOME, "decode-1")]),
        (scaled(state, {D: 1}, {}), P, []),
    ):
        seen = pair(worker("decode-1", D, Life.FLIPPING, target=target))
        assert deeds(plan(member_of, seen).actions) == expected


def test_cordons_are_laid_and_lifted() -> None:
    state = cordoned(wanted(prefill=2, decode=1), "prefill-1", is_cordoned=True)
    assert deeds(plan(state, pair(worker("prefill-1", P))).actions) == [(Deed.DRAIN, "prefill-1")]
    for life in (Life.DRAINING, Life.DRAINED):
        seen = pair(worker("prefill-1", P, life))
        assert plan(state, seen).actions == ()
        lifted = cordoned(state, "prefill-1", is_cordoned=False)
        assert deeds(plan(lifted, seen).actions) == [(Deed.UNCORDON, "prefill-1")]


def test_starts_keep_to_the_bound_of_ranks() -> None:
    state = wanted(prefill=1, decode=2, max_ranks=3)
    made = plan(state, pair(worker("decode-9", D, Life.DRAINING)))
    assert made.actions == ()
    assert made.waits == {"decode-1": "no room for 1 more ranks: 3 run, max_ranks is 3"}
    assert deeds(plan(state, pair()).actions) == [(Deed.START, "decode-1")]


def test_without_steering_workers_are_stopped_and_started_instead() -> None:
    state = flipped(wanted(prefill=1, decode=2), "decode-1", P)
    made = plan(state, pair(worker("decode-1", D)), can_steer=False)
    assert deeds(made.actions) == [(Deed.STOP, "decode-1")]


def test_held_workers_are_left_alone_and_do_not_count_as_help() -> None:
    state = restarted(wanted(prefill=1, decode=2), "decode-0")
    seen = pair(worker("decode-1", D))
    assert deeds(plan(state, seen).actions) == [(Deed.DRAIN, "decode-0")]
    assert plan(state, seen, held={WorkerId("decode-0")}).actions == ()
    assert plan(state, seen, held={WorkerId("decode-1")}).actions == ()


@dataclass
class World:
    """Workers that do as they are told, some time after they are told. It checks what must hold at every moment."""

    rng: random.Random
    max_ranks: int
    workers: dict[WorkerId, Seen] = field(default_factory=dict)
    served: bool = False

    def take(self, action: Action) -> None:
        name = action.worker_id
        if action.deed is Deed.START:
            assert name not in self.workers
            assert action.member is not None
            self.workers[name] = worker(name, action.member.role, Life.STARTING, action.member.restart_generation)
            assert not self.max_ranks or len(self.workers) <= self.max_ranks, "more ranks than there may be"
        elif action.deed is Deed.STOP:
            assert self.workers[name].life is not Life.READY, "a worker was stopped while it had work"
            self._set(name, Life.STOPPING)
        elif action.deed is Deed.UNCORDON:
            self._set(name, Life.READY)
        else:
            self._set(name, Life.DRAINING)
            if action.deed is Deed.BECOME:
                assert action.member is not None
                self._become(name, action.member.role)
        self._check()

    def _become(self, name: WorkerId, role: RoleName) -> None:
        is_undone = self.workers[name].role is role
        life, target = (Life.READY, None) if is_undone else (Life.FLIPPING, role)
        self.workers[name] = replace(self.workers[name], life=life, target=target)

    def pass_time(self) -> None:
        """Something that is under way comes to its end, or a worker dies."""
        ends: dict[Life, Callable[[WorkerId], None]] = {
            Life.STARTING: lambda name: self._set(name, Life.READY),
            Life.DRAINING: lambda name: self._set(name, Life.DRAINED),
            Life.STOPPING: self._end,
            Life.FLIPPING: self._flip,
        }
        moving = sorted(name for name, one in self.workers.items() if one.life in ends)
        if moving:
            name = self.rng.choice(moving)
            ends[self.workers[name].life](name)
        self._check()

    def _end(self, name: WorkerId) -> None:
        del self.workers[name]

    def _flip(self, name: WorkerId) -> None:
        """It fails now and then, and the worker goes back to what it was."""
        one = self.workers[name]
        role = one.target if one.target is not None and self.rng.random() < 0.8 else one.role
        self.workers[name] = replace(one, role=role, life=Life.READY, target=None)

    def _set(self, name: WorkerId, life: Life) -> None:
        self.workers[name] = replace(self.workers[name], life=life)

    def _check(self) -> None:
        ready = {one.role for one in self.workers.values() if one.life is Life.READY}
        serves = M in ready or {P, D} <= ready
        assert serves or not self.served, "nobody serves any more"
        self.served = self.served or serves


def settle(state: DesiredState, world: World, *, dies_every_time: bool) -> set[WorkerId]:
    """A controller that dies after each single action, or one that does all that it planned. Returns who is not as
    wanted in the end, which has to be said by the last plan."""
    for _ in range(2000):
        made = plan(state, sorted(world.workers.values(), key=lambda one: world.rng.random()))
        for action in made.actions[: 1 if dies_every_time else None]:
            world.take(action)
        moving = (Life.STARTING, Life.DRAINING, Life.STOPPING, Life.FLIPPING)
        if not made.actions and not any(one.life in moving for one in world.workers.values()):
            break
        world.pass_time()
    found = {name: (one.role, one.life is Life.DRAINED, one.restart_generation) for name, one in world.workers.items()}
    expected = {
        member.worker_id: (member.role, member.is_cordoned, member.restart_generation) for member in state.members
    }
    differing = {name for name in {*found, *expected} if found.get(name) != expected.get(name)}
    assert differing == set(made.waits)
    return differing


def wish(state: DesiredState, rng: random.Random) -> DesiredState:
    """Any wish; the same state again where it may not be."""
    name = rng.choice(state.members).worker_id
    made: list[Callable[[], DesiredState]] = [
        lambda: scaled(state, {P: rng.randint(0, 4), D: rng.randint(0, 4)}, {}, may_flip=rng.random() < 0.5),
        lambda: scaled(state, {M: rng.randint(0, 2)}, {}),
        lambda: flipped(state, name, rng.choice((P, D, M))),
        lambda: cordoned(state, name, is_cordoned=rng.random() < 0.4),
        lambda: restarted(state, name),
    ]
    try:
        return rng.choice(made)()
    except ConflictError:
        return state


seeds = st.integers(0, 2**32)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, dies_every_time=st.booleans(), wishes=st.integers(1, 6))
def test_wishes_one_after_the_other_come_true(seed: int, dies_every_time: bool, wishes: int) -> None:
    rng = random.Random(seed)
    state, world = wanted(prefill=2, decode=2, max_ranks=9), World(rng, 9)
    for _ in range(wishes):
        assert settle(state, world, dies_every_time=dies_every_time) == set()
        state = wish(state, rng)
    assert settle(state, world, dies_every_time=dies_every_time) == set()


@settings(max_examples=100, deadline=None)
@given(seed=seeds, dies_every_time=st.booleans(), wishes=st.integers(1, 6))
def test_wishes_that_overtake_each_other_come_true_or_say_what_they_wait_for(
    seed: int, dies_every_time: bool, wishes: int
) -> None:
    """Somebody serves at every moment, also where that means that a step has to wait for the next wish."""
    rng = random.Random(seed)
    state, world = wanted(prefill=2, decode=2, max_ranks=9), World(rng, 9)
    settle(state, world, dies_every_time=dies_every_time)
    for _ in range(wishes):
        state = wish(state, rng)
        for _ in range(rng.randint(0, 3)):
            for action in plan(state, list(world.workers.values())).actions[:1]:
                world.take(action)
            world.pass_time()
    settle(state, world, dies_every_time=dies_every_time)


@pytest.mark.parametrize("dies_every_time", [True, False])
def test_two_thirds_of_a_cluster_change_sides(dies_every_time: bool) -> None:
    world = World(random.Random(3), 0)
    state = wanted(prefill=1, decode=1)
    for counts in ({P: 2, D: 4}, {P: 3, D: 1}, {P: 1, D: 1}):
        state = scaled(state, counts, {})
        assert settle(state, world, dies_every_time=dies_every_time) == set()
