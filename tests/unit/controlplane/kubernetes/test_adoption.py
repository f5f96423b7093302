"""The record follows the pods: pods that fill vacancies, pods gone for good, and members left unchanged."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.controlplane.kubernetes.adoption import Adopted, Home, Homes, Sight, adopted, wanted
from tandem.controlplane.kubernetes.pods import WorkerPod
from tandem.core.desired import DesiredState, Pool
from tandem.core.desired_changes import cordoned, restarted, with_role, with_scale
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName

P, D = RoleName.PREFILL, RoleName.DECODE
HOMES = Homes(
    [Home(pool="pre", role=P, deployment="demo-worker-pre"), Home(pool="dec", role=D, deployment="demo-worker-dec")]
)
BY_HPA = Homes([HOMES.all[0], replace(HOMES.all[1], is_scaled_here=False)])
P_A, D_A, D_B, D_C = (
    WorkerId(f"demo-worker-{name}") for name in ("pre-7d9f-aaaaa", "dec-7d9f-aaaaa", "dec-7d9f-bbbbb", "dec-7d9f-ccccc")
)


def record(prefill: int = 1, decode: int = 2) -> DesiredState:
    """Return the record as configured, before any pod was seen."""
    pools = [Pool(name=role.value, model="m", role=role, count=count) for role, count in ((P, prefill), (D, decode))]
    return DesiredState(version=1, pools=tuple(pools)).filled()


def pod(name: WorkerId, *, leaving: bool = False, victim: bool = False, was_member: bool = False) -> WorkerPod:
    pool = name.split("-")[2]
    role = P if pool == "pre" else D
    return WorkerPod(
        name=name,
        pool=pool,
        role=role,
        revision="r1",
        is_leaving=leaving,
        is_victim=victim,
        member_since=int(was_member),
    )


def sight(
    pods: Sequence[WorkerPod], *, registered: Mapping[WorkerId, RoleName] | None = None, **replicas: int
) -> Sight:
    """All pods are registered in the role of the own pool, unless `registered` sets otherwise."""
    said = {each.name: each.role for each in pods} if registered is None else registered
    return Sight(pods=pods, registered=said, replicas=replicas)


def follow(state: DesiredState, seen: Sight, homes: Homes = HOMES) -> DesiredState:
    after = adopted(state, seen, homes)
    assert adopted(after.state, seen, homes) == Adopted(state=after.state), "it is done at once"
    after.state.validate()
    return after.state


def names(state: DesiredState, role: RoleName = D) -> set[str]:
    return {str(member.worker_id) for member in state.members if member.role is role}


FULL = follow(record(), sight([pod(P_A), pod(D_A), pod(D_B)]))
MEMBERS = [pod(name, was_member=True) for name in (P_A, D_A, D_B)]


def test_a_victim_that_was_taken_for_one_that_stays_is_not_somebody_elses_wish() -> None:
    """Two controllers: one has lowered the scale to 1, the other gave the victim a place before it saw the mark."""
    seen = sight([MEMBERS[0], MEMBERS[1]], dec=1)
    assert names(follow(FULL, seen)) == {D_A}, "somebody else lowered it"
    taken = replace(seen, taken=frozenset({D_B}))
    after = follow(FULL, taken)
    assert names(after) == {D_A, "decode-0"}
    assert wanted(after, taken, HOMES).vacancies == {"dec": 1}


def test_pods_take_the_places_that_were_configured() -> None:
    assert (names(FULL, P), names(FULL)) == ({P_A}, {D_A, D_B})
    assert {member.revision for member in FULL.members} == {"r1"}
    assert [pool.count for pool in FULL.pools] == [1, 2]
    assert wanted(FULL, sight(MEMBERS), HOMES).members == {P_A, D_A, D_B}


def test_who_is_not_registered_yet_waits_and_its_place_stays_free() -> None:
    seen = sight([pod(P_A), pod(D_A), pod(D_B)], registered={P_A: P, D_B: D})
    after = follow(record(), seen)
    assert names(after) == {D_B, "decode-1"}
    assert wanted(after, seen, HOMES).vacancies == {"dec": 1}


def test_more_pods_than_were_asked_for_are_more_members() -> None:
    """An operator scaled up without the record."""
    after = follow(FULL, sight([*MEMBERS, pod(D_C)], dec=3))
    assert names(after) == {D_A, D_B, D_C}
    assert after.pools[1].count == 3


def test_a_pod_that_was_deleted_leaves_a_vacancy_that_its_successor_fills() -> None:
    leaving = [MEMBERS[0], MEMBERS[1], pod(D_B, leaving=True, was_member=True)]
    waiting = follow(FULL, sight(leaving, dec=2))
    assert names(waiting) == {D_A, "decode-0"}
    assert wanted(waiting, sight(leaving), HOMES).vacancies == {"dec": 1}
    assert names(follow(waiting, sight([*leaving, pod(D_C)], dec=2))) == {D_A, D_C}


def test_a_successor_is_not_one_more_also_when_it_is_seen_before_the_scale() -> None:
    seen = sight([*MEMBERS[:2], pod(D_C)])
    assert follow(FULL, seen) == FULL
    assert names(follow(FULL, replace(seen, replicas={"dec": 2}))) == {D_A, D_C}


def test_a_pool_that_was_scaled_down_by_somebody_else_has_fewer_members() -> None:
    after = follow(FULL, sight(MEMBERS[:2], dec=1))
    assert names(after) == {D_A}
    assert after.pools[1].count == 1


def test_nothing_is_decided_before_the_scale_is_known() -> None:
    seen = sight(MEMBERS[:2])
    assert follow(FULL, seen) == FULL
    assert wanted(FULL, seen, HOMES).missing == {"dec": 1}


def test_a_record_that_could_serve_nobody_is_not_written() -> None:
    """All decode workers were scaled away: one stays wanted, and another pod is asked for."""
    after = follow(FULL, sight(MEMBERS[:1], dec=0))
    assert len(names(after)) == 1
    assert wanted(after, sight(MEMBERS[:1]), HOMES).vacancies == {"dec": 1}


def test_who_is_wanted_no_more_is_not_taken_for_a_new_one() -> None:
    after = with_scale(FULL, {D: 1}, {})
    (left,) = {D_A, D_B} - names(after)
    assert names(follow(after, sight(MEMBERS, dec=2))) == names(after)
    victims = [replace(each, is_victim=each.name == left) for each in MEMBERS]
    assert names(follow(with_scale(after, {D: 2}, {}), sight(victims, dec=1))) == {*names(after), "decode-0"}


def test_who_is_still_there_takes_a_place_that_becomes_free() -> None:
    """More are wanted after all, and it has not been marked yet: it stays."""
    after = with_scale(with_scale(FULL, {D: 1}, {}), {D: 2}, {})
    assert names(follow(after, sight(MEMBERS, dec=2))) == {D_A, D_B}


def test_a_new_record_takes_over_the_pods_of_the_one_before() -> None:
    """Another configuration, or a store that lost everything: what runs goes on, as far as it is wanted."""
    assert names(follow(record(), sight(MEMBERS))) == {D_A, D_B}
    assert names(follow(record(decode=3), sight(MEMBERS))) == {D_A, D_B, "decode-2"}
    assert names(follow(record(decode=1), sight(MEMBERS))) == {D_A}


def test_a_worker_that_is_to_start_anew_is_replaced_by_another_pod() -> None:
    """Its pod was taken out of the scale; that is no request for fewer."""
    state = restarted(FULL, D_B)
    seen = sight([MEMBERS[0], MEMBERS[1], replace(MEMBERS[2], is_victim=True)], dec=1)
    assert follow(state, seen) == state, "until it is gone"
    after = follow(state, sight(MEMBERS[:2], dec=1))
    assert names(after) == {D_A, "decode-0"}
    assert all(member.restart_generation == 0 for member in after.members)
    assert wanted(after, sight(MEMBERS[:2]), HOMES).vacancies == {"dec": 1}


def test_the_place_of_one_that_had_flipped_is_filled_from_its_own_deployment_and_flips_again() -> None:
    state = with_role(FULL, D_B, P)
    seen = sight(MEMBERS[:2], dec=2)
    waiting = follow(state, seen)
    assert (names(waiting, P), names(waiting)) == ({P_A, "decode-0"}, {D_A})
    assert wanted(waiting, seen, HOMES).vacancies == {"dec": 1}
    after = follow(waiting, sight([*MEMBERS[:2], pod(D_C)], dec=2))
    assert (names(after, P), names(after)) == ({P_A, D_C}, {D_A})


def test_a_drain_is_of_the_pod_that_was_there() -> None:
    after = follow(cordoned(FULL, D_B, is_cordoned=True), sight([*MEMBERS[:2], pod(D_C)], dec=2))
    assert names(after) == {D_A, D_C}
    assert not any(member.is_cordoned for member in after.members)


def test_a_pool_of_an_autoscaler_is_followed_and_never_led() -> None:
    follow_it = [pod(P_A), pod(D_A), pod(D_C)]
    assert names(follow(FULL, sight(follow_it), BY_HPA)) == {D_A, D_C}
    assert names(follow(FULL, sight(MEMBERS[:2]), BY_HPA)) == {D_A}
    assert names(follow(with_scale(FULL, {D: 5}, {}), sight(MEMBERS), BY_HPA)) == {D_A, D_B}, "nobody can add one"
    assert names(follow(with_scale(FULL, {D: 1}, {}), sight(MEMBERS), BY_HPA)) == {D_A, D_B}, "nor take one away"
    seen = sight(MEMBERS)
    told = adopted(restarted(FULL, D_B), seen, BY_HPA)
    assert told.state == FULL
    assert "delete the pod instead" in told.told[0][1]


def test_a_pod_of_no_pool_is_left_alone() -> None:
    stray = WorkerPod(name=WorkerId("demo-worker-old-1-x"), pool="old", role=D, revision="r0")
    assert follow(FULL, sight([*MEMBERS, stray])) == FULL


@given(
    prefill=st.integers(1, 3), decode=st.integers(1, 4), there=st.sets(st.sampled_from(range(6)), min_size=1),
    leaving=st.sets(st.sampled_from(range(6))), new=st.sets(st.sampled_from(range(6))), spec=st.integers(0, 6),
)  # fmt: skip
def test_whatever_is_seen_the_record_stays_one_that_can_serve(
    prefill: int, decode: int, there: set[int], leaving: set[int], new: set[int], spec: int
) -> None:
    pods = [
        pod(WorkerId(f"demo-worker-dec-7d9f-{n}"), leaving=n in leaving, was_member=n not in new) for n in sorted(there)
    ]
    after = follow(record(prefill, decode), sight(pods, dec=spec, pre=prefill))
    for gone in pods:
        after = follow(after, sight([each for each in pods if each is not gone], dec=spec, pre=prefill))
    assert len({member.worker_id for member in after.members}) == len(after.members)


@pytest.mark.parametrize("name", ["demo-worker-dec-7d9f-x", "demo-worker-dec-small-7d9f-x"])
def test_of_deployments_whose_names_begin_alike_the_longest_counts(name: str) -> None:
    both = Homes([HOMES.all[1], Home(pool="dec-small", role=P, deployment="demo-worker-dec-small")])
    home = both.by_name(name)
    assert home is not None
    assert name.startswith(f"{home.deployment}-7d9f")
