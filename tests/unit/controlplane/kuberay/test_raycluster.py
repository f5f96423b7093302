"""Reading of KubeRay's objects, and the patch that is made of them."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.controlplane.kuberay.raycluster import GROUP, groups_of, is_autoscaled, node_of, patch_of
from tandem.controlplane.kuberay.sizing import Group, RayPod, Resize


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
