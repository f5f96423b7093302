"""Changes of a desired state: victims, flips, bounds, and workers that may not be removed."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.desired import DesiredState, Pool
from tandem.core.desired_changes import (
    ChangeKind,
    WorkerLoad,
    changes,
    cordoned,
    restarted,
    split,
    with_role,
    with_scale,
)
from tandem.core.errors import ConfigError, ConflictError, NotFoundError
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName

P, D, M = RoleName.PREFILL, RoleName.DECODE, RoleName.MIXED


def cluster(prefill: int = 2, decode: int = 4, *, tp: int = 1, model: str = "m", max_ranks: int = 0) -> DesiredState:
    pools = (
        Pool(name="prefill", model=model, role=P, count=prefill, tp=tp),
        Pool(name="decode", model=model, role=D, count=decode),
        Pool(name="mixed", model=model, role=M, count=0),
    )
    return DesiredState(version=1, pools=pools, max_ranks=max_ranks).filled()


def names(state: DesiredState, role: RoleName) -> list[str]:
    return [member.worker_id for member in state.members if member.role is role]


def loads(**of: tuple[int, int]) -> dict[WorkerId, WorkerLoad]:
    return {
        WorkerId(name.replace("_", "-")): WorkerLoad(in_flight=busy, unique_prefix_bytes=held)
        for name, (busy, held) in of.items()
    }


def test_members_are_named_by_pool_and_counted() -> None:
    state = cluster()
    assert names(state, D) == ["decode-0", "decode-1", "decode-2", "decode-3"]
    assert state.filled() is state
    state.validate()


def test_victims_have_the_least_load_then_the_least_that_only_they_hold() -> None:
    known = loads(decode_0=(3, 0), decode_1=(1, 900), decode_2=(1, 100), decode_3=(2, 0))
    assert names(with_scale(cluster(), {D: 3}, known), D) == ["decode-0", "decode-1", "decode-3"]
    assert names(with_scale(cluster(), {D: 2}, known), D) == ["decode-0", "decode-3"]
    assert names(with_scale(cluster(), {D: 1}, known), D) == ["decode-0"]


def test_who_does_not_run_or_is_drained_goes_first_and_the_youngest_where_all_are_alike() -> None:
    known = loads(decode_0=(0, 0), decode_1=(0, 0), decode_2=(0, 0), decode_3=(0, 0))
    assert names(with_scale(cluster(), {D: 3}, known), D) == ["decode-0", "decode-1", "decode-2"]
    del known[WorkerId("decode-1")]
    assert names(with_scale(cluster(), {D: 3}, known), D) == ["decode-0", "decode-2", "decode-3"]
    drained = cordoned(cluster(), "decode-0", is_cordoned=True)
    assert names(with_scale(drained, {D: 3}, known), D) == ["decode-1", "decode-2", "decode-3"]


def test_who_would_leave_changes_sides_and_keeps_what_it_holds() -> None:
    known = loads(decode_0=(9, 0), decode_1=(0, 5), decode_2=(0, 900), decode_3=(0, 7))
    after = with_scale(cluster(), {P: 3, D: 1}, known)
    assert names(after, P) == ["prefill-0", "prefill-1", "decode-2"]
    assert names(after, D) == ["decode-0"]
    deeds = {(change.deed, change.worker_id) for change in changes(cluster(), after)}
    assert deeds == {(ChangeKind.FLIP, "decode-2"), (ChangeKind.STOP, "decode-1"), (ChangeKind.STOP, "decode-3")}
    started = with_scale(cluster(), {P: 3, D: 1}, known, may_flip=False)
    assert names(started, P) == ["prefill-0", "prefill-1", "prefill-2"]


def test_pools_that_differ_in_ranks_do_not_exchange_workers() -> None:
    after = with_scale(cluster(tp=2), {P: 3, D: 1}, {})
    assert names(after, P) == ["prefill-0", "prefill-1", "prefill-2"]
    with pytest.raises(ConflictError, match="decode-1 cannot become a prefill worker"):
        with_role(cluster(tp=2), "decode-1", P)


def test_new_workers_take_free_numbers_and_those_of_flipped_ones_are_taken() -> None:
    state = with_role(cluster(3, 2), "prefill-1", D)
    assert names(with_scale(state, {P: 4}, {}), P) == ["prefill-0", "prefill-2", "prefill-3", "prefill-4"]


def test_the_last_of_a_role_stays_unless_mixed_serves() -> None:
    wishes: list[Callable[[], DesiredState]] = [
        lambda: with_scale(cluster(1, 2), {P: 0}, {}),
        lambda: with_role(cluster(1, 2), "prefill-0", D),
        lambda: cordoned(cluster(1, 2), "prefill-0", is_cordoned=True),
    ]
    for wish in wishes:
        with pytest.raises(ConflictError, match="cannot serve"):
            wish()
    with pytest.raises(ConflictError, match="no other worker could do what a prefill worker does"):
        restarted(cluster(1, 2), "prefill-0")
    served = with_scale(cluster(1, 2), {M: 1}, {})
    assert names(with_scale(served, {P: 0}, {}, may_flip=False), P) == []
    assert restarted(served, "prefill-0").member("prefill-0") is not None


def test_who_alone_does_its_work_does_not_change_sides() -> None:
    """The record would serve afterwards, and no worker would meanwhile."""
    with pytest.raises(ConflictError, match="no other worker could do what a decode worker does meanwhile"):
        with_role(cluster(1, 1), "decode-0", M)
    after = with_scale(cluster(1, 1), {D: 0, M: 1}, {})
    assert [member.worker_id for member in after.members] == ["prefill-0", "mixed-0"]


def test_a_drained_worker_does_not_count_as_serving() -> None:
    state = cordoned(cluster(2, 2), "decode-1", is_cordoned=True, deadline_s=4.0)
    with pytest.raises(ConflictError, match="2 prefill and 2 decode workers, 2 of them drained, cannot serve"):
        cordoned(state, "decode-0", is_cordoned=True)


def test_each_drain_keeps_its_own_deadline() -> None:
    state = cordoned(cluster(3, 3), "decode-1", is_cordoned=True, deadline_s=4.0)
    state = cordoned(state, "prefill-2", is_cordoned=True, deadline_s=0.0)
    state = cordoned(state, "decode-2", is_cordoned=True)
    everybody = ("decode-1", "prefill-2", "decode-2", "decode-0", "nobody")
    assert [state.drain_deadline_of(name) for name in everybody] == [4.0, 0.0, 60.0, 60.0, 60.0]
    assert cordoned(state, "decode-1", is_cordoned=True) == state, "the same wish without one changes nothing"
    longer = cordoned(state, "decode-1", is_cordoned=True, deadline_s=9.0)
    assert [longer.drain_deadline_of(name) for name in everybody] == [9.0, 0.0, 60.0, 60.0, 60.0]
    assert [(one.deed, one.detail) for one in changes(state, longer)] == [
        (ChangeKind.DRAIN, "within 9 s, once it is told anew")
    ]
    back = cordoned(longer, "decode-1", is_cordoned=False, deadline_s=7.0)
    assert back.drain_deadline_of("decode-1") == 60.0, "it went with the drain"
    flipped_too = with_role(longer, "decode-1", P)
    assert (flipped_too.drain_deadline_of("decode-1"), restarted(longer, "decode-1").drain_deadline_of("decode-1")) == (
        9.0, 9.0
    )  # fmt: skip


def test_the_bound_of_ranks_holds() -> None:
    assert with_scale(cluster(2, 4, max_ranks=7), {D: 5}, {}).ranks == 7
    with pytest.raises(ConflictError, match="8 ranks are more than the cluster may have: max_ranks is 7"):
        with_scale(cluster(2, 4, max_ranks=7), {D: 6}, {})


def test_what_is_too_many_is_refused_before_anything_is_chosen() -> None:
    for wish in ({D: 100_000}, {P: 1_021}, split(cluster(), (3, 1), 100_000)):
        with pytest.raises(ConflictError, match="workers are more than a cluster may have: the limit is 1024"):
            with_scale(cluster(), wish, {})
    with pytest.raises(ConflictError, match="100002 workers"):
        with_scale(cluster(max_ranks=7), {D: 100_000}, {})
    with pytest.raises(ConflictError, match="1002 ranks are more than the cluster may have: max_ranks is 7"):
        with_scale(cluster(max_ranks=7), {D: 1_000}, {})


def test_the_largest_cluster_changes_sides() -> None:
    largest = cluster(24, 1_000)
    after = with_scale(largest, {P: 1_000, D: 24}, {})
    assert [change.deed for change in changes(largest, after)] == [ChangeKind.FLIP] * 976
    assert len(names(with_scale(largest, {P: 24, D: 1_000, M: 0}, {}), D)) == 1_000


def test_the_nearest_name_is_told() -> None:
    with pytest.raises(NotFoundError, match=r"there is no worker .decod-1.\. Did you mean decode-1"):
        with_role(cluster(), "decod-1", P)
    with pytest.raises(NotFoundError, match="no model 'n'"):
        with_scale(cluster(), {D: 1}, {}, model="n")


def test_two_models_have_to_be_told_apart_and_do_not_exchange_workers() -> None:
    one, two = cluster(1, 2), cluster(1, 2, model="n")
    others = tuple(replace(pool, name=f"{pool.name}-m2") for pool in two.pools)
    both = DesiredState(version=1, pools=(*one.pools, *others)).filled()
    with pytest.raises(ConflictError, match="there are m, n"):
        with_scale(both, {D: 1}, {})
    after = with_scale(both, {D: 1, P: 2}, {}, model="n")
    assert {change.worker_id for change in changes(both, after)} == {"decode-m2-1"}


@pytest.mark.parametrize(
    ("ratio", "total", "expected"),
    [((3, 1), 4, (3, 1)), ((1, 1), 0, (3, 3)), ((9, 1), 3, (2, 1)), ((1, 9), 3, (1, 2)), ((2, 3), 10, (4, 6))],
)
def test_ratios(ratio: tuple[int, int], total: int, expected: tuple[int, int]) -> None:
    assert tuple(split(cluster(2, 4), ratio, total).values()) == expected


def test_one_worker_cannot_be_split() -> None:
    with pytest.raises(ConflictError, match="1 workers cannot be split"):
        split(cluster(), (1, 1), 1)


def test_a_second_wish_of_the_same_changes_nothing() -> None:
    known = loads(decode_0=(3, 0))
    wishes: list[Callable[[DesiredState], DesiredState]] = [
        lambda state: with_scale(state, {P: 3, D: 2}, known),
        lambda state: with_role(state, "decode-3", P),
        lambda state: cordoned(state, "decode-1", is_cordoned=True),
        lambda state: cordoned(state, "decode-1", is_cordoned=False),
    ]
    for wish in wishes:
        once = wish(cluster())
        assert wish(once) == once
        assert changes(once, wish(once)) == []
    assert restarted(restarted(cluster(), "decode-1"), "decode-1").member("decode-1").restart_generation == 2  # type: ignore[union-attr]


def test_records_that_contradict_themselves_are_refused() -> None:
    state = cluster(1, 1)
    wrong = [
        replace(state, pools=(replace(state.pools[0], count=2), *state.pools[1:])),
        replace(state, members=(*state.members, state.members[0])),
        replace(state, members=(replace(state.members[0], pool="moon"), state.members[1])),
        replace(state, members=(replace(state.members[0], role=D), state.members[1])),
        replace(state, pools=(*state.pools, state.pools[0])),
        replace(state, max_ranks=1),
        replace(state, drain_deadline_s=float("nan")),
        replace(state, drain_deadline_s=float("inf")),
        *(replace(state, members=(replace(state.members[0], drain_deadline_s=deadline_s), state.members[1]))
          for deadline_s in (-1.0, float("nan"), float("inf"))),
        *(replace(state, members=(replace(state.members[0], worker_id=WorkerId(name)), state.members[1]))
          for name in ("../../tmp/x", "..", "", "a b", "a/b", "a\n", "x" * 129)),
    ]  # fmt: skip
    for one in wrong:
        with pytest.raises(ConfigError):
            one.validate()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_wished_the_record_stays_whole(seed: int) -> None:
    rng = random.Random(seed)
    state = cluster(rng.randint(1, 4), rng.randint(1, 4), max_ranks=9)
    for _ in range(12):
        name = rng.choice(state.members).worker_id
        known = {member.worker_id: WorkerLoad(in_flight=rng.randint(0, 3)) for member in state.members}
        wanted = {role: rng.randint(0, 4) for role in rng.sample((P, D, M), rng.randint(1, 3))}
        try:
            match rng.randint(0, 3):
                case 0:
                    after = with_scale(state, wanted, known, may_flip=rng.random() < 0.5)
                    sizes = Counter(member.role for member in after.members)
                    assert all(sizes[role] == count for role, count in wanted.items())
                case 1:
                    after = with_role(state, name, rng.choice((P, D, M)))
                case 2:
                    after = cordoned(state, name, is_cordoned=rng.random() < 0.5)
                case _:
                    after = restarted(state, name)
        except ConflictError:
            continue
        after.validate()
        assert {change.worker_id for change in changes(state, after)} == {
            worker
            for worker in {member.worker_id for member in (*state.members, *after.members)}
            if state.member(worker) != after.member(worker)
        }
        state = after
