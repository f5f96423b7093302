"""The cause that keeps a worker unscheduled is named: no node, no such class, or the resource short on each node."""

from __future__ import annotations

import pytest

from tandem.controlplane.ray.messages import HARDWARE_LABEL
from tandem.controlplane.ray.unschedulable import RayNodeResources, shortage


def node(
    address: str, hardware: str = "", *, free: dict[str, float], total: dict[str, float] | None = None
) -> RayNodeResources:
    labels = {HARDWARE_LABEL: hardware} if hardware else {}
    return RayNodeResources(address=address, labels=labels, total=total or free, free=free)


FULL = node("a", free={"CPU": 4.0})
BUSY = node("b", "h100", free={"CPU": 1.0, "GPU": 1.0}, total={"CPU": 8.0, "GPU": 4.0})


@pytest.mark.parametrize(
    ("nodes", "needs", "hardware", "said"),
    [
        ([], {"CPU": 1.0}, "any", "no node has joined"),
        ([FULL], {"CPU": 4.0}, "any", ""),
        ([FULL, BUSY], {"CPU": 2.0}, "any", ""),
        ([FULL], {"CPU": 1.0}, "h100", "no node of class h100 (there are: any on a)"),
        ([FULL], {"CPU": 8.0}, "any", "needs 8 CPU on one node: a has 4 of 4 CPU free"),
        ([FULL], {"CPU": 1.0, "GPU": 2.0}, "any", "needs 1 CPU, 2 GPU on one node: a has no GPU"),
        (
            [FULL, BUSY],
            {"CPU": 2.0, "GPU": 2.0},
            "h100",
            "needs 2 CPU, 2 GPU on one node of class h100: b has 1 of 8 CPU free, 1 of 4 GPU free",
        ),
        ([FULL, BUSY], {"GPU": 2.0}, "any", "needs 2 GPU on one node: a has no GPU; b has 1 of 4 GPU free"),
    ],
)
def test_what_is_missing_is_named(
    nodes: list[RayNodeResources], needs: dict[str, float], hardware: str, said: str
) -> None:
    assert shortage(nodes, needs, hardware) == said
