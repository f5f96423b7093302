"""Test rollouts while controllers die, and the settings of a revision's workers."""

import errno
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.controlplane.environment import Environment
from tandem.controlplane.model_catalog import bundled_model
from tandem.controlplane.resolve import resolve
from tandem.controlplane.revisions import Revised, revised
from tandem.core.config import ClusterConfig, WorkerSection
from tandem.core.desired import INITIAL, DesiredState, Revision, RolloutPhase
from tandem.core.errors import ConfigError, ModelError, StartupError
from tandem.core.events import EventKind
from tandem.core.ids import WorkerId
from tandem.core.rollouts import current_revision, paused, started, undone
from tandem.core.state_enums import RoleName
from tests.unit.controlplane.controller_rig import D0, P0, Harness
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


async def serving(h: Harness) -> DesiredState:
    state = wanted(prefill=1, decode=1)
    await h.give(state)
    h.ready(P0, D0)
    await settled()
    return state


async def test_the_controller_writes_each_step_and_says_why_it_stopped(h: Harness) -> None:
    state = await serving(h)
    state = replace(started(state, model_path="/next"), version=2)
    await h.give(state)
    revision = state.rollouts[0].revision
    assert h.launcher.there[WorkerId("decode-1")].revision == revision
    h.ready(WorkerId("prefill-1"))
    await h.dies(WorkerId("decode-1"), "it has no weights")
    state = h.desired.saved[-1]
    assert state.rollouts[0].reason == "decode-1: it has no weights"
    assert {member.worker_id for member in state.members} == {"prefill-0", "decode-0", "prefill-1"}
    told = h.events.of(EventKind.ROLLOUT)
    assert told[0] == f"m: to {revision}: prefill-1, decode-1 to come"
    assert "stopped, as a worker of it does not work: decode-1: it has no weights" in told[-1]
    await h.give(replace(undone(state), version=state.version + 1))
    state = h.desired.saved[-1]
    assert (state.rollouts[0].phase, set(h.launcher.there)) == (RolloutPhase.DONE, {"prefill-0", "decode-0"})
    state = replace(started(state, model_path="/no/such"), version=state.version + 1)
    await h.give(state)
    assert "cannot load the model /no/such: no such folder" in h.desired.saved[-1].rollouts[0].reason
    assert set(h.launcher.there) == {"prefill-0", "decode-0"}


async def test_a_machine_that_dies_under_a_starting_worker_does_not_stop_a_rollout(h: Harness) -> None:
    state = await serving(h)
    await h.give(replace(started(state, model_path="/next"), version=2))
    new = WorkerId("decode-1")
    for times in (1, 2, 3):
        assert h.launcher.started.count(new) == times
        assert not [one for one in h.desired.saved if one.rollouts[0].phase is RolloutPhase.FAILED]
        await h.dies(new, "its agent died: its node is gone", is_place_lost=True)
        h.clock.advance(10.1)
        await h.give(h.desired.saved[-1])
    reason = "decode-1: it died 3 times, at last: its agent died: its node is gone"
    assert h.desired.saved[-1].rollouts[0].reason == reason, "as often as that, it is hardly the machines"


async def test_want_of_room_stops_no_rollout(h: Harness) -> None:
    state = await serving(h)
    await h.give(replace(started(state, model_path="/next"), version=2))
    new = WorkerId("decode-1")
    for times in (1, 2, 3, 4):
        assert h.launcher.started.count(new) == times
        await h.dies(new, NO_ROOM, is_unplaced=True)
        h.clock.advance(10.1)
        await h.give(h.desired.saved[-1])
    assert h.desired.saved[-1].rollouts[0].phase is RolloutPhase.ROLLING
    assert h.events.of(EventKind.GAVE_UP) == []


async def test_nor_does_it_stop_one_that_begins_before_the_cluster_was_ready(h: Harness) -> None:
    state = wanted(prefill=1, decode=1)
    await h.give(state)
    h.ready(P0)
    await h.give(replace(started(state, model_path="/next"), version=2))
    await h.dies(WorkerId("decode-1"), NO_ROOM, is_unplaced=True)
    assert h.events.of(EventKind.RESTART_PLANNED) == ["decode-1: in 0.5 s, as there may be room by then"]
    assert h.events.of(EventKind.GAVE_UP) == []
    assert not [one for one in h.desired.saved if one.rollouts[0].phase is RolloutPhase.FAILED]


ENVIRONMENT = Environment(state_root=Path("/none"), socket_root=Path("/tmp"), cores=8, variables={})
RESOLVED = resolve(ClusterConfig(worker=WorkerSection(engine="sim")), ENVIRONMENT)


def started_with(revision: Revision | None) -> Revised:
    return revised(RESOLVED, RESOLVED.models[0], RoleName.DECODE, revision, ENVIRONMENT.cores)


def of(path: str = "", **settings: str) -> Revision:
    spelled = {key.replace("__", "."): value for key, value in settings.items()}
    return Revision(name="r2", model="tandem-tiny", model_path=path, settings=spelled)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(bundled_model(), tmp_path / "next")
    return tmp_path / "next"


def test_without_one_it_is_the_configuration() -> None:
    assert started_with(None) == Revised(source=RESOLVED.models[0].source, settings=RESOLVED.workers[RoleName.DECODE])
    assert started_with(of()) == started_with(None)


def test_settings_and_files(folder: Path) -> None:
    found = started_with(
        of(str(folder), worker__chunk_tokens="64", decode__block_tokens="8", prefill__block_tokens="32")
    )
    assert (found.settings.chunk_tokens, found.settings.block_tokens) == (64, 8)
    assert found.settings.threads == RESOLVED.workers[RoleName.DECODE].threads
    assert (found.source.name, found.source.path, found.source.commit) == ("tandem-tiny", folder, "")


def test_a_path_that_cannot_be_looked_up_is_no_model() -> None:
    with pytest.raises(ModelError, match=f"cannot load the model {'n' * 80}: .*File name too long"):
        started_with(of("n" * 300))
    with pytest.raises(ConfigError, match="cannot find ~nosuchuser/m: ~nosuchuser names no user"):
        started_with(of("~nosuchuser/m"))


def test_a_folder_that_may_not_be_read_is_no_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", stat)  # the account that runs the tests may read everything
    with pytest.raises(ModelError, match="Permission denied"):
        started_with(of(str(folder)))


def test_what_cannot_be_started_is_refused(folder: Path) -> None:
    other = folder / "tokenizer.json"
    other.write_text(json.dumps({**json.loads(other.read_text()), "version": "2.0"}))
    wrong = {
        "no such folder": of("/no/such"),
        "another tokenizer": of(str(folder)),
        "Use one of auto": of(worker__transport="pigeon"),
        "is not a worker setting": of(worker__moons="2"),
    }
    for message, revision in wrong.items():
        with pytest.raises(StartupError) as refused:
            started_with(revision)
        assert message.lower() in refused.value.message.lower()
