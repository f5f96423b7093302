"""Test the size of a RayCluster, and its objects."""

from collections.abc import Sequence
from typing import Any

import pytest

from tandem.controlplane.kuberay_autoscaler.raycluster import GROUP, groups_of, is_autoscaled, node_of, patch_of
from tandem.controlplane.kuberay_autoscaler.sizing import Group, Occupant, RayPod, Resize, empty, occupants, resizes
from tandem.core.desired import DesiredState, Pool
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName

P, D = RoleName.PREFILL, RoleName.DECODE


def nodes(group: str, count: int, *, first: int = 0) -> list[RayPod]:
    """`a-0` at 10.0.0.a-0, …"""
    return [RayPod(name=f"{group}-{n}", group=group, address=f"ip-{group}-{n}") for n in range(first, first + count)]


def on(*names: str, group: str = "d", is_wanted: bool = True) -> list[Occupant]:
    """A worker on each of these nodes."""
    return [Occupant(worker_id=WorkerId(f"w-{n}"), group=group, address=f"ip-{n}", is_wanted=is_wanted) for n in names]


def waiting(count: int, *, group: str = "d", is_started: bool = True) -> list[Occupant]:
    return [Occupant(worker_id=WorkerId(f"new-{group}-{n}"), group=group, is_started=is_started) for n in range(count)]


def decided(
    groups: Sequence[Group], there: Sequence[RayPod], workers: Sequence[Occupant], *, is_settled: bool = True
) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return by group: (replicas, pods that are to go). All empty nodes have been empty for long."""
    found = resizes(groups, there, workers, empty(there, workers) if is_settled else ())
    return {one.group: (one.replicas, one.named) for one in found}


def group(replicas: int, *, least: int = 0, most: int = 8, named: tuple[str, ...] = (), hardware: str = "any") -> Group:
    return Group(name="d", replicas=replicas, least=least, most=most, named=named, hardware=hardware)


def test_nothing_changes_where_every_node_has_its_worker() -> None:
    assert decided([group(2)], nodes("d", 2), on("d-0", "d-1")) == {}


def test_who_waits_for_a_place_gets_a_node_up_to_the_most() -> None:
    assert decided([group(2)], nodes("d", 2), [*on("d-0", "d-1"), *waiting(2)]) == {"d": (4, ())}
    assert decided([group(2, most=3)], nodes("d", 2), [*on("d-0", "d-1"), *waiting(2)]) == {"d": (3, ())}
    assert decided([group(3, most=3)], nodes("d", 3), [*on("d-0", "d-1", "d-2"), *waiting(1)]) == {}


def test_a_node_that_is_to_come_is_asked_for_once() -> None:
    assert decided([group(3)], nodes("d", 2), [*on("d-0", "d-1"), *waiting(1)]) == {}


def test_who_is_not_started_yet_gets_none_and_keeps_the_one_that_is_there() -> None:
    """It waits for its turn, or to be tried again; the bound on ranks may be why."""
    assert decided([group(2)], nodes("d", 2), [*on("d-0", "d-1"), *waiting(1, is_started=False)]) == {}
    assert decided([group(2)], nodes("d", 2), [*on("d-0"), *waiting(1, is_started=False)]) == {}


def test_who_leaves_keeps_its_node_until_it_is_gone_and_then_that_very_node_goes() -> None:
    leaving = on("d-0", is_wanted=False)
    assert decided([group(3)], nodes("d", 3), [*leaving, *on("d-1", "d-2")]) == {}
    assert decided([group(3)], nodes("d", 3), on("d-1", "d-2")) == {"d": (2, ("d-0",))}


def test_a_node_goes_only_when_it_has_been_empty_for_long() -> None:
    assert decided([group(3)], nodes("d", 3), on("d-1", "d-2"), is_settled=False) == {}


def test_who_leaves_and_who_comes_take_no_node_more() -> None:
    workers = [*on("d-0", is_wanted=False), *on("d-1"), *waiting(1)]
    assert decided([group(2)], nodes("d", 2), workers) == {}


def test_those_that_are_named_stay_named_until_they_are_gone() -> None:
    """KubeRay would end any other pod in the place of one that it still counts."""
    there = nodes("d", 4)
    named = group(3, named=("d-3", "long-gone"))
    assert decided([named], there, on("d-0", "d-1")) == {"d": (2, ("d-3", "d-2"))}
    ending = [*there[:3], RayPod(name="d-3", group="d", address="ip-d-3", is_leaving=True)]
    assert decided([named], ending, [*on("d-0", "d-1", "d-2"), *waiting(1)]) == {"d": (4, ("d-3",))}
    assert decided([named], there[:3], on("d-0", "d-1", "d-2")) == {}


def test_a_node_that_is_not_there_yet_is_not_taken_back() -> None:
    """It has no name, and KubeRay would take any."""
    assert decided([group(3)], nodes("d", 2), on("d-0", "d-1")) == {}
    starting = [*nodes("d", 2), RayPod(name="d-9", group="d")]
    assert decided([group(3)], starting, on("d-0", "d-1")) == {"d": (2, ("d-9",))}


def test_those_that_have_not_started_go_first() -> None:
    starting = [*nodes("d", 2), RayPod(name="z-1", group="d")]
    assert decided([group(3)], starting, [*on("d-1"), *waiting(1, is_started=False)]) == {"d": (2, ("z-1",))}


def test_never_below_the_least() -> None:
    assert decided([group(3, least=2)], nodes("d", 3), ()) == {"d": (2, ("d-0",))}
    assert decided([group(0)], [], ()) == {}


def test_nothing_goes_while_somebody_may_be_placed_there() -> None:
    """Ray places by hardware: one that waits for another class takes nothing from here."""
    other = Group(name="p", replicas=1, most=1, hardware="h200")
    there = [*nodes("d", 2), *nodes("p", 1)]
    workers = [*on("d-0"), *on("p-0", group="p"), *waiting(1, group="p")]
    assert decided([group(2, hardware="h100"), other], there, workers) == {"d": (1, ("d-1",))}
    anywhere = Group(name="p", replicas=1, most=1)
    assert decided([group(2, hardware="h100"), anywhere], there, workers) == {}
    stranger = Occupant(worker_id=WorkerId("of-before"), is_wanted=False)
    assert decided([group(2)], nodes("d", 2), [*on("d-0"), stranger]) == {}, "it may be there"


def test_a_worker_counts_where_it_is_whatever_its_role() -> None:
    """After a flip, or where Ray found room: no worker moves, and no node is made or ended for it."""
    groups = [group(1), Group(name="p", replicas=2, most=8)]
    there = [*nodes("d", 1), *nodes("p", 2)]
    workers = [*on("d-0", group="p"), *on("p-0", group="d"), *on("p-1", group="p")]
    assert decided(groups, there, workers) == {}
    assert decided(groups, there, workers[:2]) == {"p": (1, ("p-1",))}


def test_several_groups_change_together() -> None:
    groups = [group(2, hardware="h100"), Group(name="p", replicas=1, most=8, hardware="h200")]
    there = [*nodes("d", 2), *nodes("p", 1)]
    found = decided(groups, there, [*on("d-0"), *on("p-0", group="p"), *waiting(1, group="p")])
    assert found == {"d": (1, ("d-1",)), "p": (2, ())}


def test_everybody_who_may_be_somewhere_is_counted() -> None:
    pools = [Pool(name=role.value, model="m", role=role, count=1) for role in (P, D)]
    state = DesiredState(version=1, pools=tuple(pools)).filled()
    prefill, decode, before = WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("decode-7")
    started, hosts = {prefill: "", decode: "b"}, {prefill: "a", decode: "of before", before: "c"}
    found = {one.worker_id: one for one in occupants(state, started, hosts, {P: "long", D: "short"})}
    assert found[prefill] == Occupant(worker_id=prefill, group="long", address="a")
    assert found[decode] == Occupant(worker_id=decode, group="short", address="b")
    assert found[before] == Occupant(worker_id=before, address="c", is_wanted=False)
    nobody = {one.worker_id: one for one in occupants(state, {}, {}, {P: "long", D: "short"})}
    assert nobody[decode] == Occupant(worker_id=decode, group="short", is_started=False)


def test_a_resize_says_what_the_group_is_to_be() -> None:
    assert resizes([group(1)], nodes("d", 1), [*on("d-0"), *waiting(1)], ()) == (
        Resize(group="d", replicas=2, named=()),
    )


def raycluster(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "demo-ray", "resourceVersion": "7"}, "spec": {"workerGroupSpecs": list(groups)}}


LONG = {"groupName": "long", "replicas": 2, "minReplicas": 1, "maxReplicas": 4, "labels": {"tandem-hardware": "h100"},
        "scaleStrategy": {"workersToDelete": ["x"]}}  # fmt: skip


def test_groups_are_read_with_their_bounds() -> None:
    seen = raycluster(LONG, {"groupName": "short", "maxReplicas": 3, "scaleStrategy": {}})
    assert groups_of(seen, ["short", "long"]) == (
        Group(name="short", replicas=0, most=3),
        Group(name="long", replicas=2, least=1, most=4, hardware="h100", named=("x",)),
    )


@pytest.mark.parametrize(
    "seen",
    [
        {}, {"spec": {}}, raycluster(), raycluster({"groupName": 1}), raycluster({**LONG, "numOfHosts": 2}),
        raycluster({**LONG, "suspend": True}),
    ],
)  # fmt: skip
def test_what_cannot_be_resized_is_refused(seen: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"group|without"):
        groups_of(seen, ["long"])


def test_an_autoscaler_is_seen() -> None:
    assert not is_autoscaled(raycluster(LONG))
    assert is_autoscaled({"spec": {"enableInTreeAutoscaling": True}})


def test_a_pod_is_a_node_by_its_address() -> None:
    about = {"name": "a", "labels": {GROUP: "long"}}
    seen = RayPod(name="a", group="long", address="10.0.0.7")
    assert node_of({"metadata": about, "status": {"phase": "Running", "podIP": "10.0.0.7"}}) == seen
    assert node_of({"metadata": about}) == RayPod(name="a", group="long")
    ending = {"metadata": {**about, "deletionTimestamp": "now"}, "status": {"podIP": "10.0.0.7"}}
    assert node_of(ending) == RayPod(name="a", group="long", address="10.0.0.7", is_leaving=True)
    failed = {"metadata": about, "status": {"phase": "Failed", "podIP": "10.0.0.7"}}
    assert node_of(failed) == RayPod(name="a", group="long", is_leaving=True), "its address may be another one's by now"
    with pytest.raises(ValueError, match="group"):
        node_of({"metadata": {"name": "a"}})


def test_a_patch_holds_onto_what_was_read() -> None:
    seen = raycluster({"groupName": "short", "maxReplicas": 3}, LONG)
    assert patch_of(seen, [Resize(group="long", replicas=1, named=("x", "y"))]) == [
        {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
        {"op": "test", "path": "/spec/workerGroupSpecs/1/groupName", "value": "long"},
        {"op": "add", "path": "/spec/workerGroupSpecs/1/replicas", "value": 1},
        {"op": "add", "path": "/spec/workerGroupSpecs/1/scaleStrategy", "value": {"workersToDelete": ["x", "y"]}},
    ]
