"""Reads a RayCluster and its nodes' pods, and makes the patch that resizes groups of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tandem.controlplane.kuberay_autoscaler.sizing import Group, RayPod, Resize
from tandem.controlplane.ray.messages import ANY_HARDWARE, HARDWARE_LABEL

CLUSTER: Final = "ray.io/cluster"
GROUP: Final = "ray.io/group"
NODE_TYPE: Final = "ray.io/node-type"
"""Labels that KubeRay puts on the pods of a RayCluster."""
MOST: Final = 2**31 - 1
Object = Mapping[str, Any]


def selector(name: str) -> str:
    """Return the selector of that RayCluster's pods that are nodes for workers."""
    return f"{CLUSTER}={name},{NODE_TYPE}=worker"


def is_autoscaled(raycluster: Object) -> bool:
    """True if Ray's autoscaler writes replicas there."""
    return bool(_part(raycluster, "spec").get("enableInTreeAutoscaling"))


def groups_of(raycluster: Object, names: Sequence[str]) -> tuple[Group, ...]:
    """Return the groups of these names, as they stand there. ValueError for a group that is malformed or missing."""
    found = {}
    for spec in _specs(raycluster):
        group = _group(spec)
        found[group.name] = group
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"there is no group {', '.join(missing)}")
    return tuple(found[name] for name in names)


def node_of(pod: Object) -> RayPod:
    """Parse a pod; ValueError for one without a name or a group."""
    about, status = _part(pod, "metadata"), pod.get("status") or {}
    name, group = about.get("name"), (about.get("labels") or {}).get(GROUP)
    if not isinstance(name, str) or not isinstance(group, str):
        raise ValueError("a pod without a name or a group")
    is_over = about.get("deletionTimestamp") is not None or status.get("phase") in ("Failed", "Succeeded")
    # An ended pod keeps an address that another one may have by now.
    address = "" if status.get("phase") in ("Failed", "Succeeded") else str(status.get("podIP") or "")
    return RayPod(name=name, group=group, address=address, is_leaving=is_over)


def patch_of(raycluster: Object, resizes: Sequence[Resize]) -> list[dict[str, Any]]:
    """Return a JSON patch bound to the version that was read: indices are that version's."""
    version = _part(raycluster, "metadata").get("resourceVersion")
    operations: list[dict[str, Any]] = [{"op": "test", "path": "/metadata/resourceVersion", "value": version}]
    names = [spec.get("groupName") for spec in _specs(raycluster)]
    for resize in resizes:
        path = f"/spec/workerGroupSpecs/{names.index(resize.group)}"
        strategy = {"workersToDelete": list(resize.named)}
        operations.append({"op": "test", "path": f"{path}/groupName", "value": resize.group})
        operations.append({"op": "add", "path": f"{path}/replicas", "value": resize.replicas})
        operations.append({"op": "add", "path": f"{path}/scaleStrategy", "value": strategy})
    return operations


def _group(spec: Object) -> Group:
    name, hosts = spec.get("groupName"), spec.get("numOfHosts", 1)
    if not isinstance(name, str):
        raise ValueError("a group without a name")
    if hosts not in (0, 1) or spec.get("suspend"):
        raise ValueError(f"group {name} is suspended, or has several nodes a replica")
    strategy = spec.get("scaleStrategy") or {}
    return Group(
        name=name,
        replicas=int(spec.get("replicas", 0)),
        least=int(spec.get("minReplicas", 0)),
        most=int(spec.get("maxReplicas", MOST)),
        hardware=str((spec.get("labels") or {}).get(HARDWARE_LABEL, ANY_HARDWARE)),
        named=tuple(map(str, strategy.get("workersToDelete") or ())),
    )


def _specs(raycluster: Object) -> list[Object]:
    specs = _part(raycluster, "spec").get("workerGroupSpecs")
    if not isinstance(specs, list) or not all(isinstance(spec, dict) for spec in specs):
        raise ValueError("a RayCluster without groups")
    return specs


def _part(what: Object, name: str) -> Object:
    found = what.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"an object without {name}")
    return found
