"""Reads the facts of a worker's pod that a controller needs, and its marks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName

POOL: Final = "tandem/pool"
ROLE: Final = "tandem/role"
REVISION: Final = "tandem/revision"
"""Labels: of the chart, and the role is kept up by the controller."""
MEMBER: Final = "tandem/member"
"""Annotation: the version of the record in which it became a member. A former member leaves; a pod that never was one
is new."""
COST: Final = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST: Final = "-2147483647"
"""Annotation: of those that are ready, the ReplicaSet takes the one that costs least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPod:
    """A worker's pod. `pool`: the chart's, of the Deployment that made it; `role` and `revision`: of its labels.

    `is_leaving`: Kubernetes is ending it. `is_victim`: it is marked as the one that leaves when the scale is lowered.
    `member_since`: a version of the record that it stood in; 0 = in none.
    """

    name: WorkerId
    pool: str
    role: RoleName
    revision: str
    is_leaving: bool = False
    is_victim: bool = False
    member_since: int = 0

    def was_member(self, version: int) -> bool:
        """True if it is or was a member, judged from the record up to that version."""
        return 0 < self.member_since <= version


def read(pod: Mapping[str, Any]) -> WorkerPod:
    """Parse a pod; ValueError for one that is no worker's."""
    about = pod.get("metadata")
    if not isinstance(about, dict):
        raise ValueError("a pod without metadata")
    labels, annotations = (about.get(key) or {} for key in ("labels", "annotations"))
    phase = (pod.get("status") or {}).get("phase")
    return WorkerPod(
        name=WorkerId(str(about.get("name", ""))),
        pool=str(labels.get(POOL, "")),
        role=RoleName(str(labels.get(ROLE, ""))),
        revision=str(labels.get(REVISION, "")),
        is_leaving=about.get("deletionTimestamp") is not None or phase in ("Failed", "Succeeded"),
        is_victim=annotations.get(COST) == LOWEST_COST,
        member_since=_version(annotations.get(MEMBER)),
    )


def _version(text: object) -> int:
    """Parse a version; 0 for text that no controller has written."""
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 18 else 0


def staying(pods: Iterable[WorkerPod]) -> list[WorkerPod]:
    """Return the pods without those that Kubernetes is ending."""
    return [pod for pod in pods if not pod.is_leaving]
