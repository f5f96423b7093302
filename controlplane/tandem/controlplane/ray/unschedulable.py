"""Finds why a worker gets no place, from the nodes' resources. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.controlplane.ray.messages import ANY_HARDWARE, HARDWARE_LABEL


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNodeResources:
    """A live Ray node: its labels, and its total and free amount of each resource."""

    address: str
    labels: Mapping[str, str]
    total: Mapping[str, float]
    free: Mapping[str, float]

    @property
    def hardware(self) -> str:
        return self.labels.get(HARDWARE_LABEL, ANY_HARDWARE)


def shortage(nodes: Sequence[RayNodeResources], needs: Mapping[str, float], hardware: str) -> str:
    """Return what is missing for `needs` on one node of class `hardware`; "" if some node has all of it free.

    Such as "no node of class h100 (there are: a10 on 10.0.0.1)" or "needs 2 GPU on one node: 10.0.0.1 has 1 of 4 free".
    """
    fitting = [node for node in nodes if hardware in (ANY_HARDWARE, node.hardware)]
    if not nodes:
        return "no node has joined"
    if not fitting:
        there = ", ".join(f"{node.hardware} on {node.address}" for node in nodes)
        return f"no node of class {hardware} (there are: {there})"
    if any(_lacking(needs, node.free) == [] for node in fitting):
        return ""
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
    of_class = "" if hardware == ANY_HARDWARE else f" of class {hardware}"
    return f"needs {wanted} on one node{of_class}: {'; '.join(_lack(needs, node) for node in fitting)}"


def _lack(needs: Mapping[str, float], node: RayNodeResources) -> str:
    said = []
    for name in _lacking(needs, node.free):
        total = node.total.get(name, 0.0)
        said.append(f"{node.free.get(name, 0.0):g} of {total:g} {name} free" if total else f"no {name}")
    return f"{node.address} has {', '.join(said)}"


def _lacking(needs: Mapping[str, float], there: Mapping[str, float]) -> list[str]:
    return [name for name, amount in needs.items() if there.get(name, 0.0) < amount]
