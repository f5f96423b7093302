"""Test rollouts and the settings that a revision may change."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.core.config import ClusterConfig, RoleSection, WorkerSection
from tandem.core.desired import INITIAL, DesiredState, Pool, RolloutPhase
from tandem.core.desired_changes import cordoned, restarted, with_role, with_scale
from tandem.core.errors import ConfigError, ConflictError
from tandem.core.ids import WorkerId
from tandem.core.revision_overrides import configured
from tandem.core.rollouts import Standing, advanced, current_revision, named, paused, resumed, started, undone
from tandem.core.state_enums import RoleName

P, D = RoleName.PREFILL, RoleName.DECODE


def cluster(prefill: int = 2, decode: int = 2, *, max_ranks: int = 0) -> DesiredState:
    pools = (
        Pool(name="prefill", model="m", role=P, count=prefill),
        Pool(name="decode", model="m", role=D, count=decode),
        Pool(name="mixed", model="m", role=RoleName.MIXED, count=0),
    )
    return DesiredState(version=1, pools=pools, max_ranks=max_ranks).filled()


def names(state: DesiredState, role: RoleName = D) -> list[str]:
    return [member.worker_id for member in state.members if member.role is role]


def serving(state: DesiredState, *, but: tuple[str, ...] = ()) -> list[Standing]:
    """All members as they are wanted."""
    return [
        Standing(
            worker_id=member.worker_id, model="m", role=member.role, revision=state.revision_of(member),
            restart_generation=member.restart_generation, is_serving=member.worker_id not in but, can_stay=True,
        )
        for member in state.members
    ]  # fmt: skip


def leaving(worker: str, role: RoleName, revision: str = INITIAL, *, can_stay: bool = True) -> Standing:
    return Standing(worker_id=WorkerId(worker), model="m", role=role, revision=revision, can_stay=can_stay)


def rolled(state: DesiredState) -> DesiredState:
    """Every step, each of which comes true at once."""
    for _ in range(40):
        after = advanced(state, serving(state), {})
        if after == state:
            return state
        after.validate()
        state = after
    raise AssertionError("it never ends")


def test_a_revision_is_what_there_is_with_what_is_given_changed() -> None:
    one = rolled(started(cluster(), model_path="/next", settings={"worker.chunk_tokens": "256"}))
    two = started(one, settings={"worker.max_sequences": "8"})
    spec = two.revision("m", two.rollouts[0].revision)
    assert spec is not None
    assert spec.model_path == "/next"
    assert spec.settings == {"worker.chunk_tokens": "256", "worker.max_sequences": "8"}
    assert spec.name == named("/next", {"worker.max_sequences": "8", "worker.chunk_tokens": "256"})
    assert one.rollouts[0].previous == INITIAL
    assert [revision.name for revision in two.revisions] == [one.rollouts[0].revision, spec.name]


def test_a_rollout_ends_with_as_many_workers_of_the_new_revision() -> None:
    state = rolled(started(cluster(2, 3), name="r2"))
    assert current_revision(state, "m") == "r2"
    assert (len(names(state, P)), len(names(state, D))) == (2, 3)
    assert {state.revision_of(member) for member in state.members} == {"r2"}
    assert state.rollouts[0].phase is RolloutPhase.DONE


def test_the_first_step_adds_and_only_what_serves_lets_others_leave() -> None:
    state = started(cluster(), name="r2")
    first = advanced(state, serving(state), {})
    assert names(first) == ["decode-0", "decode-1", "decode-2"]
    assert advanced(first, serving(first, but=("decode-2",)), {}) == first, "half a pair lets nobody leave"
    second = advanced(first, serving(first), {})
    assert names(second) == ["decode-1", "decode-2"]
    gone = [leaving("decode-0", D), leaving("prefill-0", P)]
    assert advanced(second, [*serving(second), *gone], {}) == second, "who leaves still has its place"
    assert names(advanced(second, serving(second), {})) == ["decode-1", "decode-2", "decode-0"]


def test_without_a_surge_somebody_leaves_first() -> None:
    state = started(cluster(max_ranks=4), name="r2", max_surge=0, max_unavailable=1)
    first = advanced(state, serving(state), {})
    assert names(first) == ["decode-1"]
    gone = [leaving("decode-0", D, can_stay=False), leaving("prefill-0", P, can_stay=False)]
    assert advanced(first, [*serving(first), *gone], {}) == first
    assert names(advanced(first, serving(first), {})) == ["decode-1", "decode-0"]
    assert current_revision(rolled(first), "m") == "r2"


def test_the_last_that_serves_stays_however_many_may_be_missing() -> None:
    """Also before the first new one serves, and while none does: the record always names a worker."""
    state = started(cluster(), name="r2", max_surge=0, max_unavailable=2)
    first = advanced(state, serving(state), {})
    assert (first.member("decode-1"), names(first)) == (state.member("decode-1"), ["decode-1"])
    gone = advanced(first, serving(first), {})
    assert names(gone) == ["decode-1", "decode-0"]
    new = tuple(member.worker_id for member in gone.members if gone.revision_of(member) == "r2")
    assert advanced(gone, serving(gone, but=new), {}) == gone, "the new one does not serve yet"
    nobody = advanced(state, serving(state, but=tuple(member.worker_id for member in state.members)), {})
    nobody.validate()
    assert (len(names(nobody)), len(names(nobody, P))) == (1, 1)
    assert current_revision(rolled(state), "m") == "r2"


def test_undone_half_way_who_was_to_leave_stays() -> None:
    state = started(cluster(), name="r2")
    state = advanced(state, serving(state), {})
    state = advanced(state, serving(state), {})
    assert names(state) == ["decode-1", "decode-2"]
    back = undone(state)
    assert (back.rollouts[0].revision, back.rollouts[0].is_undo) == (INITIAL, True)
    assert undone(back) == back, "a second call changes nothing"
    still = [leaving("decode-0", D), leaving("prefill-0", P)]
    again = advanced(back, [*serving(back), *still], {})
    assert "decode-0" in names(again)
    restored = rolled(again)
    assert current_revision(restored, "m") == INITIAL
    assert sorted(names(restored)) == ["decode-0", "decode-1"]
    assert sorted(names(restored, P)) == ["prefill-0", "prefill-1"]


def test_undone_afterwards_it_rolls_back() -> None:
    state = rolled(started(cluster(), name="r2", settings={"worker.chunk_tokens": "64"}))
    back = rolled(undone(state))
    assert current_revision(back, "m") == INITIAL
    assert {back.revision_of(member) for member in back.members} == {INITIAL}
    assert undone(back) == back


def test_a_pause_holds_it_and_a_failure_stops_it_with_the_reason() -> None:
    state = started(cluster(), name="r2")
    held = paused(state)
    assert advanced(held, serving(held), {}) == held
    assert paused(held) == held
    state = advanced(resumed(held), serving(state), {})
    stopped = advanced(state, serving(state, but=("decode-2",)), {WorkerId("decode-2"): "no such file"})
    assert (stopped.rollouts[0].phase, stopped.rollouts[0].reason) == (RolloutPhase.FAILED, "decode-2: no such file")
    assert names(stopped) == ["decode-0", "decode-1"], "it is wanted no more"
    assert advanced(stopped, serving(stopped), {}) == stopped
    assert advanced(stopped, serving(stopped), {WorkerId("prefill-2"): "nor this"}).rollouts == stopped.rollouts
    assert rolled(resumed(stopped)).rollouts[0].phase is RolloutPhase.DONE
    assert sorted(names(rolled(undone(stopped)))) == ["decode-0", "decode-1"]


def test_an_old_worker_that_breaks_stops_nothing() -> None:
    state = started(cluster(), name="r2")
    state = advanced(state, serving(state), {})
    after = advanced(state, serving(state, but=("decode-0",)), {WorkerId("decode-0"): "killed by signal 9"})
    assert after.rollouts[0].phase is RolloutPhase.ROLLING
    assert "decode-0" not in names(after)


def test_a_cordoned_worker_stays_where_it_is_and_cordoned() -> None:
    state = started(cordoned(cluster(2, 3), "decode-1", is_cordoned=True), name="r2")
    after = rolled(state)
    member = after.member("decode-1")
    assert member is not None
    assert (member.is_cordoned, after.revision_of(member)) == (True, "r2")
    assert len(names(after)) == 3


def test_the_same_again_changes_nothing() -> None:
    state = started(cluster(), settings={"worker.chunk_tokens": "64"})
    assert started(state, settings={"worker.chunk_tokens": "64"}) == state
    done = rolled(state)
    assert started(done, settings={"worker.chunk_tokens": "64"}) == done
    assert started(cluster()) == cluster()


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (lambda: started(started(cluster(), name="r2"), name="r3"), "a rollout of m to r2 is rolling"),
        (lambda: with_scale(started(cluster(), name="r2"), {D: 3}, {}), "it decides which workers there are"),
        (lambda: with_role(started(cluster(), name="r2"), "decode-0", P), "it decides which workers there are"),
        (lambda: paused(cluster()), "no rollout of m is under way"),
        (lambda: resumed(rolled(started(cluster(), name="r2"))), "no rollout of m is under way"),
        (lambda: undone(cluster()), "there was no rollout of m"),
        (lambda: started(cluster(), name="../../r"), "cannot name a revision"),
        (lambda: started(cluster(), name=INITIAL, model_path="/x"), "already exists with other content"),
        (lambda: started(cluster(), name="r2", max_surge=0), "a rollout cannot go on"),
        (lambda: started(cluster(1, 2), name="r2", max_surge=0, max_unavailable=1), "has to go on serving"),
        (lambda: started(cluster(max_ranks=5), name="r2"), "there is no room for 2 more ranks"),
    ],
)
def test_what_cannot_be_is_refused(wish: Callable[[], DesiredState], message: str) -> None:
    with pytest.raises(ConflictError, match=message):
        wish()


def test_drains_and_restarts_are_as_ever_meanwhile() -> None:
    state = started(cluster(), name="r2")
    assert restarted(state, "decode-0").member("decode-0") != state.member("decode-0")
    assert cordoned(state, "decode-0", is_cordoned=True).member("decode-0") != state.member("decode-0")
    assert replace(state, rollouts=()) == replace(cluster(), revisions=state.revisions)


def test_settings_lie_over_the_configuration() -> None:
    base = ClusterConfig(name="c", worker=WorkerSection(engine="sim"), decode=RoleSection(tp=2))
    found = configured(base, {
        "worker.chunk_tokens": "256", "worker.is_deterministic": "true", "worker.sim.decode_step_s": "0.5",
        "worker.transports": "shm, tcp", "decode.kv_memory_bytes": "64MiB", "worker.kv_dtype": "bfloat16",
    })  # fmt: skip
    assert (found.name, found.worker.engine, found.decode.tp) == ("c", "sim", 2)
    assert (found.worker.chunk_tokens, found.worker.is_deterministic, found.worker.kv_dtype) == (256, True, "bfloat16")
    assert found.worker.sim.decode_step_s == 0.5
    assert found.worker.transports == ("shm", "tcp")
    assert found.decode.kv_memory_bytes == 64 * 2**20
    assert configured(base, {}) == base


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"worker.chunk_token": "1"}, "Did you mean worker.chunk_tokens?"),
        ({"chunk_tokens": "1"}, "Did you mean worker.chunk_tokens?"),
        ({"worker.tp": "2"}, "TP and hardware belong to the pool"),
        ({"decode.hardware": "h200"}, "TP and hardware belong to the pool"),
        ({"router.port": "1"}, "is not a worker setting"),
        ({"": "1"}, "is not a worker setting"),
        ({"worker.sim": "1"}, "is not a worker setting"),
        ({"worker.chunk_tokens": "0"}, "worker.chunk_tokens is 0. Use 1 or more"),
        ({"worker.max_step_s": "nan"}, "worker.max_step_s is nan"),
        ({"worker.chunk_tokens": "many"}, "chunk_tokens"),
        ({"worker.kv_memory_bytes": "lots"}, "kv_memory_bytes is 'lots'"),
    ],
)
def test_what_a_revision_may_not_change(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(ClusterConfig(), settings)
    assert message in refused.value.message
