"""Creation and end of pods: Deployments have ReplicaSets, these and StatefulSets have pods, as Kubernetes' controllers
do it. The order of replacement in a rolling update, and of ending at a smaller scale, are its rules.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from tests.integration.deploy.emulation.resources import (
    DEPLOYMENTS,
    PODS,
    REPLICA_SETS,
    STATEFUL_SETS,
    Object,
    RefusedError,
    Resource,
)
from tests.integration.deploy.emulation.store import Store

COST = "controller.kubernetes.io/pod-deletion-cost"
HASH = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"
_LOOK_S = 0.2
_DIGITS = "bcdfghjklmnpqrstvwxz2456789"


@dataclass
class Workloads:
    """The controllers over a store. `run` them in a thread."""

    store: Store
    stopping: threading.Event = field(default_factory=threading.Event)
    ended: list[str] = field(default_factory=list)
    """Pods that a ReplicaSet picked, in order."""
    fewest: dict[str, int] = field(default_factory=dict)
    """By Deployment: how many of its pods were ready at the worst moment since it was asked for."""
    _names: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def run(self) -> None:
        while not self.stopping.is_set():
            with self.store.changed:
                self.store.changed.wait(_LOOK_S)
                self.settle()

    def settle(self) -> None:
        """One step of each of them."""
        with self.store.changed:
            for deployment in self.store.all(DEPLOYMENTS):
                _Deployment(self.store, deployment).settle()
            for replica_set in self.store.all(REPLICA_SETS):
                self._settle_replicas(replica_set)
            for stateful_set in self.store.all(STATEFUL_SETS):
                self._settle_numbered(stateful_set)
            for deployment in self.store.all(DEPLOYMENTS):
                self._note_fewest(deployment)

    def _settle_replicas(self, owner: Object) -> None:
        here = active(self.store.owned(PODS, owner))
        missing = owner["spec"]["replicas"] - len(here)
        for _ in range(missing):
            self._make(owner, REPLICA_SETS, f"{owner['metadata']['name']}-{self._word()}")
        for pod in sorted(here, key=rank)[: max(0, -missing)]:
            self.ended.append(pod["metadata"]["name"])
            self.store.delete(PODS, pod)
        _tell(self.store, REPLICA_SETS, owner, _counts(active(self.store.owned(PODS, owner))))

    def _settle_numbered(self, owner: Object) -> None:
        """One after the other from the first; of those that are of another template the last one ends first."""
        digest, name = _digest(owner["spec"]["template"]), owner["metadata"]["name"]
        here = {pod["metadata"]["name"]: pod for pod in self.store.owned(PODS, owner)}
        wanted = [f"{name}-{number}" for number in range(owner["spec"]["replicas"])]
        for each in wanted:
            if each not in here:
                self._make(owner, STATEFUL_SETS, each, {HASH: digest})
                break
            if not is_ready(here[each]):
                break
        old = [pod for pod in here.values() if pod["metadata"]["labels"][HASH] != digest]
        surplus = [pod for each, pod in here.items() if each not in wanted]
        is_calm = len(here) >= len(wanted) and all(
            is_ready(pod) for pod in active(list(here.values())) if pod not in old
        )
        is_alone = len(active(list(here.values()))) == len(here)
        for pod in (surplus or (sorted(old, key=_name) if is_calm else []))[-1:] if is_alone else []:
            self.store.delete(PODS, pod)
        counts = _counts(active(self.store.owned(PODS, owner)))
        updated = len(here) - len(old)
        revisions = {"currentRevision": digest, "updateRevision": digest, "currentReplicas": updated}
        _tell(self.store, STATEFUL_SETS, owner, {**counts, **revisions, "updatedReplicas": updated})

    def _make(self, owner: Object, resource: Resource, name: str, labels: dict[str, str] | None = None) -> None:
        template = copy.deepcopy(owner["spec"]["template"])
        about = {**template["metadata"], "name": name, "namespace": owner["metadata"]["namespace"]}
        about["labels"] = {**about["labels"], **(labels or {})}
        about["ownerReferences"] = [_reference(owner, resource)]
        pod = {"metadata": about, "spec": template["spec"], "status": {"phase": "Pending"}}
        for claim in owner["spec"].get("volumeClaimTemplates", ()):
            told = claim["metadata"]["name"]
            source = {"name": told, "persistentVolumeClaim": {"claimName": f"{told}-{name}"}}
            pod["spec"]["volumes"] = [*pod["spec"].get("volumes", ()), source]
        self.store.create(PODS, pod, "kube-controller-manager")

    def _note_fewest(self, deployment: Object) -> None:
        name, ready = deployment["metadata"]["name"], deployment.get("status", {}).get("readyReplicas", 0)
        if name in self.fewest:
            self.fewest[name] = min(self.fewest[name], ready)

    def _word(self) -> str:
        number, found = next(self._names) * 7919, ""
        for _ in range(5):
            number, digit = divmod(number, len(_DIGITS))
            found += _DIGITS[digit]
        return found


class _Deployment:
    """One step of one Deployment."""

    def __init__(self, store: Store, deployment: Object) -> None:
        self._store, self._found = store, deployment
        self._wanted: int = deployment["spec"]["replicas"]
        self._digest = _digest(deployment["spec"]["template"])
        self._sets = store.owned(REPLICA_SETS, deployment)

    def settle(self) -> None:
        new = next((each for each in self._sets if each["metadata"]["labels"][HASH] == self._digest), None)
        old = [each for each in self._sets if each is not new]
        rolling = self._found["spec"].get("strategy", {})
        if rolling.get("type") == "Recreate":
            self._recreate(new, old)
        else:
            self._roll(new or self._make(0), old, rolling.get("rollingUpdate", {}))
        self._tell()

    def _recreate(self, new: Object | None, old: list[Object]) -> None:
        """All before end, and only then another one begins."""
        for each in old:
            self._scale(each, 0)
        if any(self._store.owned(PODS, each) for each in old):
            return
        self._scale(new or self._make(0), self._wanted)

    def _roll(self, new: Object, old: list[Object], rolling: dict[str, Any]) -> None:
        surge = _share(rolling.get("maxSurge", "25%"), self._wanted, is_up=True)
        unavailable = _share(rolling.get("maxUnavailable", "25%"), self._wanted, is_up=False)
        replicas = new["spec"]["replicas"]
        total = replicas + sum(each["spec"]["replicas"] for each in old)
        if replicas > self._wanted:
            new = self._scale(new, self._wanted)
        elif (room := self._wanted + surge - total) > 0 and replicas < self._wanted:
            new = self._scale(new, min(self._wanted, replicas + room))
        self._end_old(new, old, self._wanted - (unavailable or (0 if surge else 1)))

    def _end_old(self, new: Object, old: list[Object], fewest: int) -> None:
        """End so many that at least `fewest` are available: first those that serve no request."""
        total = new["spec"]["replicas"] + sum(each["spec"]["replicas"] for each in old)
        may_end = total - fewest - (new["spec"]["replicas"] - _available(self._store, new))
        for each in sorted(old, key=_name):
            unhealthy = each["spec"]["replicas"] - _available(self._store, each)
            count = max(0, min(may_end, unhealthy))
            may_end -= count
            self._scale(each, each["spec"]["replicas"] - count)
        old = self._again(old)
        may_end = min(may_end, sum(_available(self._store, each) for each in (new, *old)) - fewest)
        for each in sorted(old, key=_name):
            count = max(0, min(may_end, each["spec"]["replicas"]))
            may_end -= count
            self._scale(each, each["spec"]["replicas"] - count)

    def _make(self, replicas: int) -> Object:
        about, spec = self._found["metadata"], self._found["spec"]
        template, selector = copy.deepcopy(spec["template"]), copy.deepcopy(spec["selector"])
        for labels in (template["metadata"]["labels"], selector["matchLabels"]):
            labels[HASH] = self._digest
        found = {
            "metadata": {
                "name": f"{about['name']}-{self._digest}",
                "namespace": about["namespace"],
                "labels": dict(template["metadata"]["labels"]),
                "annotations": {REVISION: str(len(self._sets) + 1)},
                "ownerReferences": [_reference(self._found, DEPLOYMENTS)],
            },
            "spec": {"replicas": replicas, "selector": selector, "template": template},
        }
        return self._store.create(REPLICA_SETS, found, "kube-controller-manager")

    def _scale(self, replica_set: Object, replicas: int) -> Object:
        def scaled(live: Object) -> Object:
            return {**live, "spec": {**live["spec"], "replicas": replicas}}

        return self._store.change(REPLICA_SETS, replica_set, scaled)

    def _again(self, sets: list[Object]) -> list[Object]:
        names = {each["metadata"]["name"] for each in sets}
        return [each for each in self._store.owned(REPLICA_SETS, self._found) if each["metadata"]["name"] in names]

    def _tell(self) -> None:
        sets = self._store.owned(REPLICA_SETS, self._found)
        pods = active([pod for each in sets for pod in self._store.owned(PODS, each)])
        new = [pod for pod in pods if pod["metadata"]["labels"][HASH] == self._digest]
        counts = {**_counts(pods), "updatedReplicas": len(new)}
        counts["unavailableReplicas"] = max(0, self._wanted - counts["availableReplicas"])
        unavailable = self._found["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxUnavailable", 0)
        fewest = self._wanted - _share(unavailable, self._wanted, is_up=False)
        is_over = len(pods) == len(new) == counts["availableReplicas"] == self._wanted
        counts["conditions"] = [
            _condition("Available", counts["availableReplicas"] >= fewest, "MinimumReplicas"),
            _condition("Progressing", True, "NewReplicaSetAvailable" if is_over else "ReplicaSetUpdated"),
        ]
        _tell(self._store, DEPLOYMENTS, self._found, counts)


def rank(pod: Object) -> tuple[bool, bool, bool, int, float]:
    """Order pods as a ReplicaSet picks: those without a node, those that have not started, then those that are not
    ready, then by cost, then those that are ready for the shortest time."""
    cost = int(pod["metadata"].get("annotations", {}).get(COST, "0"))
    status = pod["status"]
    return "podIP" in status, status["phase"] != "Pending", is_ready(pod), cost, -float(status.get("readySince", 0))


def active(pods: list[Object]) -> list[Object]:
    """Without those that are being ended."""
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def is_ready(pod: Object) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))


def _available(store: Store, replica_set: Object) -> int:
    return sum(map(is_ready, active(store.owned(PODS, replica_set))))


def _counts(pods: list[Object]) -> dict[str, Any]:
    ready = sum(map(is_ready, pods))
    return {"replicas": len(pods), "readyReplicas": ready, "availableReplicas": ready}


def _tell(store: Store, resource: Resource, found: Object, status: dict[str, Any]) -> None:
    def told(live: Object) -> Object:
        return {**live, "status": {**status, "observedGeneration": live["metadata"]["generation"]}}

    try:
        store.change(resource, found, told)
    except RefusedError:
        return  # it has gone


def _condition(kind: str, is_so: bool, reason: str) -> dict[str, str]:
    return {"type": kind, "status": str(is_so), "reason": reason}


def _reference(owner: Object, resource: Resource) -> dict[str, Any]:
    about = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    return {"apiVersion": resource.group_version, "kind": resource.kind, **about, "controller": True}


def _share(what: int | str, of: int, *, is_up: bool) -> int:
    if isinstance(what, int):
        return what
    share = of * int(what.removesuffix("%"))
    return -(-share // 100) if is_up else share // 100


def _digest(template: Object) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]


def _name(found: Object) -> str:
    return str(found["metadata"]["name"])
