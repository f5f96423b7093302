"""Computes the node count of each group of a RayCluster, and the nodes that may go. Pure.

Workers count where they are, for Ray places them by free resources and not by group, and a flip moves none. Growing
follows the desired state. Shrinking follows the observed one: a node may go when it has been empty for a while, and is
named then, for KubeRay takes any node if none is named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tandem.controlplane.ray.messages import ANY_HARDWARE
from tandem.core.desired import DesiredState
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes of a RayCluster that are alike. `least` and `most`: bounds of `replicas`; `named`: pods that are to go."""

    name: str
    replicas: int
    least: int = 0
    most: int
    hardware: str = ANY_HARDWARE
    named: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPod:
    """A node's pod. `address`: as Ray knows the node, "" before it has one; `is_leaving`: Kubernetes ends it."""

    name: str
    group: str
    address: str = ""
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupant:
    """A worker. `group`: the group of nodes for its role; `address`: of its node, "" = none yet, or not known.

    `is_wanted`: the record has it; `is_started`: it runs or waits for a place.
    """

    worker_id: WorkerId
    group: str = ""
    address: str = ""
    is_wanted: bool = True
    is_started: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """The new values of a group. `named`: with those that were named before and are still there."""

    group: str
    replicas: int
    named: tuple[str, ...]


def occupants(
    state: DesiredState, started: Mapping[WorkerId, str], hosts: Mapping[WorkerId, str], groups: Mapping[RoleName, str]
) -> list[Occupant]:
    """Return all workers that are wanted, were started, or are registered. `started` and `hosts`: with the addresses of
    their nodes, as the starter and the workers themselves report them."""
    homes = {member.worker_id: groups.get(member.role, "") for member in state.members}
    return [
        Occupant(
            worker_id=worker,
            group=homes.get(worker, ""),
            address=started.get(worker, "") or hosts.get(worker, ""),
            is_wanted=worker in homes,
            is_started=worker in started or worker in hosts,
        )
        for worker in sorted({*homes, *started, *hosts})
    ]


def empty(nodes: Sequence[RayPod], workers: Sequence[Occupant]) -> set[str]:
    """Return nodes on which no worker is known to be."""
    held = {worker.address for worker in workers}
    return {node.name for node in nodes if not node.address or node.address not in held}


def resizes(
    groups: Sequence[Group], nodes: Sequence[RayPod], workers: Sequence[Occupant], settled: Collection[str]
) -> tuple[Resize, ...]:
    """Return the changes. `settled`: nodes that have been empty for so long that no worker is about to appear there."""
    named = {name for group in groups for name in group.named}
    staying = [node for node in nodes if not node.is_leaving and node.name not in named]
    at = {node.address: node for node in staying if node.address}
    placed = {worker.worker_id: at[worker.address] for worker in workers if worker.address in at}
    unplaced = [worker for worker in workers if worker.worker_id not in placed]
    found = []
    for group in groups:
        wanted = {placed[one.worker_id].name for one in workers if one.is_wanted and one.worker_id in placed}
        here = [node for node in staying if node.group == group.name]
        homeless = [one for one in unplaced if one.is_wanted and one.group == group.name]
        needed = sum(node.name in wanted for node in here) + sum(one.is_started for one in homeless)
        still = tuple(name for name in group.named if any(node.name == name for node in nodes))
        if needed > group.replicas:
            replicas = min(needed, group.most)
            if replicas > group.replicas:
                found.append(Resize(group=group.name, replicas=replicas, named=still))
        elif not any(one.is_started and _may_come(one, group, groups) for one in unplaced):
            free = empty(here, workers)
            surplus = group.replicas - (len(here) - len(free)) - len(homeless)
            # Nodes without an address yet have not started: they cost least.
            going = sorted((node for node in here if node.name in free & set(settled)), key=_cost)
            going = going[: max(0, min(surplus, group.replicas - group.least))]
            if going:
                names = tuple(node.name for node in going)
                found.append(Resize(group=group.name, replicas=group.replicas - len(going), named=(*still, *names)))
    return tuple(found)


def _may_come(worker: Occupant, group: Group, groups: Sequence[Group]) -> bool:
    """True if Ray may place it there, or has done so already, as far as is known."""
    home = next((each for each in groups if each.name == worker.group), None)
    return home is None or home.hardware in (ANY_HARDWARE, group.hardware)


def _cost(node: RayPod) -> tuple[bool, str]:
    return bool(node.address), node.name
