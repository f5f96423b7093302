"""What a controller reads of a worker's pod, and how it marks one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName

POOL: Final = "tandem/pool"
ROLE: Final = "tandem/role"
REVISION: Final = "tandem/revision"
"""Labels: of the chart, and the role is kept up by the controller."""
MEMBER: Final = "tandem/member"
"""Annotation: it was a member of the record once. One that no longer is leaves; one that never was is new."""
COST: Final = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST: Final = "-2147483647"
"""Annotation: of those that are ready, the ReplicaSet takes the one that costs least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A worker's pod. `pool`: the chart's, whose Deployment made it; `role` and `revision`: what its labels say.

    `is_leaving`: Kubernetes is ending it. `is_victim`: it is marked as the one that leaves when the scale is lowered.
    """

    name: WorkerId
    pool: str
    role: RoleName
    revision: str
    is_leaving: bool = False
    is_victim: bool = False
    was_member: bool = False


def read(pod: Mapping[str, Any]) -> Pod:
    """ValueError for a pod that is no worker's."""
    about = pod.get("metadata")
    if not isinstance(about, dict):
        raise ValueError("a pod without metadata")
    labels, annotations = (about.get(key) or {} for key in ("labels", "annotations"))
    phase = (pod.get("status") or {}).get("phase")
    return Pod(
        name=WorkerId(str(about.get("name", ""))),
        pool=str(labels.get(POOL, "")),
        role=RoleName(labels.get(ROLE)),
        revision=str(labels.get(REVISION, "")),
        is_leaving=about.get("deletionTimestamp") is not None or phase in ("Failed", "Succeeded"),
        is_victim=annotations.get(COST) == LOWEST_COST,
        was_member=MEMBER in annotations,
    )


def staying(pods: Iterable[Pod]) -> list[Pod]:
    """Without those that Kubernetes is ending."""
    return [pod for pod in pods if not pod.is_leaving]
