"""Rollouts in a world where everything takes its time and controllers die: bounds hold at every moment, and it ends."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.desired import INITIAL, RolloutPhase
from tandem.core.events import EventKind
from tandem.core.ids import WorkerId
from tandem.core.rollouts import current_revision, paused, started, undone
from tests.unit.controlplane.controller_rig import Harness, play
from tests.unit.controlplane.controller_rig import settle as settled
from tests.unit.controlplane.world import BAD, D, P, World, settle, sizes, step, wanted

NO_ROOM = "it got no place within 60 s: GPU 0 has 9 of 10 MiB in use"
seeds = st.integers(0, 2**32)
bounds = st.sampled_from([(1, 0), (0, 1), (1, 1), (2, 0), (3, 2)])


@settings(max_examples=200, deadline=None)
@given(seed=seeds, bound=bounds, prefill=st.integers(2, 5), decode=st.integers(2, 5), dies=st.booleans())
def test_never_more_run_and_never_fewer_serve_than_agreed(
    seed: int, bound: tuple[int, int], prefill: int, decode: int, dies: bool
) -> None:
    rng = random.Random(seed)
    surge, unavailable = bound
    world = World(rng, 0)
    state, _ = settle(wanted(prefill=prefill, decode=decode), world, dies_every_time=False)
    state = started(state, name="r2", max_surge=surge, max_unavailable=unavailable)
    is_undone = False
    for _ in range(4000):
        if not is_undone and rng.random() < 0.02:
            state, is_undone = undone(state), True
        state, is_news = step(state, world, most=1 if dies else None)
        if not is_news and not world.is_moving:
            break
        world.pass_time()
        for role, size in ((P, prefill), (D, decode)):
            assert world.ready(role) >= size - unavailable
            assert sum(one.role is role for one in world.workers.values()) <= size + surge
    assert current_revision(state, "m") == (INITIAL if is_undone else "r2")
    assert state.rollouts[0].phase is RolloutPhase.DONE
    assert {one.revision for one in world.workers.values()} == {current_revision(state, "m")}
    assert sizes(state) == {P: prefill, D: decode}


@settings(max_examples=100, deadline=None)
@given(seed=seeds, dies=st.booleans(), prefill=st.integers(1, 3), decode=st.integers(1, 3))
def test_a_revision_that_does_not_work_stops_and_all_go_on_as_before(
    seed: int, dies: bool, prefill: int, decode: int
) -> None:
    world = World(random.Random(seed), 0)
    state, _ = settle(wanted(prefill=prefill, decode=decode), world, dies_every_time=dies)
    before = set(world.workers)
    state, _ = settle(started(state, name=BAD), world, dies_every_time=dies)
    assert state.rollouts[0].phase is RolloutPhase.FAILED
    assert "it has no such file" in state.rollouts[0].reason
    assert set(world.workers) == before
    state, _ = settle(undone(state), world, dies_every_time=dies)
    assert state.rollouts[0].phase is RolloutPhase.DONE
    assert {member.worker_id for member in state.members} == before == set(world.workers)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, steps=st.integers(0, 40))
def test_paused_it_stands_still_and_both_revisions_serve(seed: int, steps: int) -> None:
    world = World(random.Random(seed), 0)
    state, _ = settle(wanted(prefill=2, decode=3), world, dies_every_time=False)
    state = started(state, name="r2")
    for _ in range(steps):
        state, _ = step(state, world, most=1)
        world.pass_time()
    if state.rollouts[0].phase is RolloutPhase.DONE:
        return
    held = paused(state)
    assert settle(held, world, dies_every_time=False) == (held, set())
    assert world.ready(P) >= 2
    assert world.ready(D) >= 3


def test_the_controller_writes_each_step_and_says_why_it_stopped() -> None:
    play(_stopped_rollout)


async def _stopped_rollout(h: Harness) -> None:
    state = wanted(prefill=1, decode=1)
    h.desired.states.put_nowait(state)
    await settled()
    for name in ("prefill-0", "decode-0"):
        h.ready(WorkerId(name))
    await settled()
    state = replace(started(state, model_path="/next"), version=2)
    h.desired.states.put_nowait(state)
    await settled()
    revision = state.rollouts[0].revision
    assert h.launcher.there[WorkerId("decode-1")].revision == revision
    h.ready(WorkerId("prefill-1"))
    h.dies(WorkerId("decode-1"), "it has no weights")
    await settled()
    state = h.desired.saved[-1]
    assert state.rollouts[0].reason == "decode-1: it has no weights"
    assert {member.worker_id for member in state.members} == {"prefill-0", "decode-0", "prefill-1"}
    told = h.events.of(EventKind.ROLLOUT)
    assert told[0] == f"m: to {revision}: prefill-1, decode-1 to come"
    assert "stopped, as a worker of it does not work: decode-1: it has no weights" in told[-1]
    h.desired.states.put_nowait(replace(undone(state), version=state.version + 1))
    await settled()
    state = h.desired.saved[-1]
    assert (state.rollouts[0].phase, set(h.launcher.there)) == (RolloutPhase.DONE, {"prefill-0", "decode-0"})
    state = replace(started(state, model_path="/no/such"), version=state.version + 1)
    h.desired.states.put_nowait(state)
    await settled()
    assert "cannot load the model /no/such: no such folder" in h.desired.saved[-1].rollouts[0].reason
    assert set(h.launcher.there) == {"prefill-0", "decode-0"}


def test_a_machine_that_dies_under_a_starting_worker_does_not_stop_a_rollout() -> None:
    play(_rollout_that_loses_places)


async def _rollout_that_loses_places(h: Harness) -> None:
    state = wanted(prefill=1, decode=1)
    h.desired.states.put_nowait(state)
    await settled()
    for name in ("prefill-0", "decode-0"):
        h.ready(WorkerId(name))
    await settled()
    h.desired.states.put_nowait(replace(started(state, model_path="/next"), version=2))
    await settled()
    new = WorkerId("decode-1")
    for times in (1, 2, 3):
        assert h.launcher.started.count(new) == times
        assert not [one for one in h.desired.saved if one.rollouts[0].phase is RolloutPhase.FAILED]
        h.dies(new, "its agent died: its node is gone", is_place_lost=True)
        await settled()
        h.clock.advance(10.1)
        h.desired.states.put_nowait(h.desired.saved[-1])
        await settled()
    reason = "decode-1: it died 3 times, at last: its agent died: its node is gone"
    assert h.desired.saved[-1].rollouts[0].reason == reason, "as often as that, it is hardly the machines"


def test_want_of_room_stops_no_rollout() -> None:
    async def scene(h: Harness) -> None:
        state = wanted(prefill=1, decode=1)
        h.desired.states.put_nowait(state)
        await settled()
        for name in ("prefill-0", "decode-0"):
            h.ready(WorkerId(name))
        await settled()
        h.desired.states.put_nowait(replace(started(state, model_path="/next"), version=2))
        await settled()
        new = WorkerId("decode-1")
        for times in (1, 2, 3, 4):
            assert h.launcher.started.count(new) == times
            h.dies(new, NO_ROOM, is_unplaced=True)
            await settled()
            h.clock.advance(10.1)
            h.desired.states.put_nowait(h.desired.saved[-1])
            await settled()
        assert h.desired.saved[-1].rollouts[0].phase is RolloutPhase.ROLLING
        assert h.events.of(EventKind.GAVE_UP) == []

    play(scene)


def test_nor_does_it_stop_one_that_begins_before_the_cluster_was_ready() -> None:
    async def scene(h: Harness) -> None:
        state = wanted(prefill=1, decode=1)
        h.desired.states.put_nowait(state)
        await settled()
        h.ready(WorkerId("prefill-0"))
        h.desired.states.put_nowait(replace(started(state, model_path="/next"), version=2))
        await settled()
        h.dies(WorkerId("decode-1"), NO_ROOM, is_unplaced=True)
        await settled()
        assert h.events.of(EventKind.RESTART_PLANNED) == ["decode-1: in 0.5 s, as there may be room by then"]
        assert h.events.of(EventKind.GAVE_UP) == []
        assert not [one for one in h.desired.saved if one.rollouts[0].phase is RolloutPhase.FAILED]

    play(scene)
