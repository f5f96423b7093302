"""The emulated controllers keep to the rules of Kubernetes, or what runs over them would prove nothing."""

from typing import Any

import pytest

from tests.integration.deploy.emulation.resources import DEPLOYMENTS, PODS, REPLICA_SETS, STATEFUL_SETS, Object
from tests.integration.deploy.emulation.store import Store
from tests.integration.deploy.emulation.workloads import COST, Workloads, active, is_ready

STEPS = 40


class Scene:
    """A Deployment `w`, or a StatefulSet, with pods that get ready and end when the test triggers it."""

    def __init__(self, replicas: int, strategy: dict[str, Any] | None = None, *, is_numbered: bool = False) -> None:
        self.store, self.resource = Store(), STATEFUL_SETS if is_numbered else DEPLOYMENTS
        self.workloads = Workloads(self.store)
        spec: Object = {"replicas": replicas, "selector": {"matchLabels": {"app": "w"}}, "template": template("1")}
        spec |= {"strategy": strategy} if strategy else {}
        self.found = self.store.create(
            self.resource, {"metadata": {"name": "w", "namespace": "n"}, "spec": spec}, "helm"
        )

    def change(self, **spec: Any) -> None:
        self.store.change(self.resource, self.found, lambda live: {**live, "spec": {**live["spec"], **spec}})

    def pods(self) -> list[Object]:
        return self.store.all(PODS)

    def settle(self) -> None:
        """Run as far as it goes without a kubelet."""
        before = -1
        while before != self.store.version:
            before = self.store.version
            self.workloads.settle()

    def run(self, pod: Object, *, is_ready: bool = True, since: float = 0.0) -> None:
        condition = {"type": "Ready", "status": str(is_ready)}
        status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [condition], "readySince": since}
        self.store.change(PODS, pod, lambda live: {**live, "status": status})

    def mark(self, pod: Object, annotations: dict[str, str]) -> None:
        about = {"annotations": annotations}
        self.store.change(PODS, pod, lambda live: {**live, "metadata": {**live["metadata"], **about}})

    def step(self) -> bool:
        """A kubelet does one thing: it ends a pod, or one gets ready. False when there is nothing to do."""
        self.settle()
        leaving = [pod for pod in self.pods() if "deletionTimestamp" in pod["metadata"]]
        waiting = [pod for pod in self.pods() if not is_ready(pod)]
        if leaving:
            self.store.delete(PODS, leaving[0], grace_s=0)
        elif waiting:
            self.run(waiting[0])
        self.settle()
        return bool(leaving or waiting)

    def finish(self) -> list[tuple[int, int]]:
        """Run until nothing more happens: after each step (pods that are not being ended, those of them that are
        ready)."""
        seen: list[tuple[int, int]] = []
        for _ in range(STEPS):
            if not self.step():
                return seen
            here = active(self.pods())
            seen.append((len(here), sum(map(is_ready, here))))
        raise AssertionError("it does not come to an end")


def template(version: str) -> Object:
    labels = {"app": "w", "version": version}
    return {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "w", "image": version}]}}


@pytest.mark.parametrize(
    ("surge", "unavailable", "most", "fewest"), [(0, 1, 4, 3), (1, 0, 5, 4), ("25%", "25%", 5, 3), (2, 2, 6, 2)]
)
def test_a_rolling_update_keeps_its_bounds(surge: Any, unavailable: Any, most: int, fewest: int) -> None:
    scene = Scene(4, {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}})
    scene.finish()
    scene.change(template=template("2"))
    seen = scene.finish()
    assert max(count for count, _ in seen) == most
    assert min(ready for _, ready in seen) == fewest
    assert [pod["metadata"]["labels"]["version"] for pod in scene.pods()] == ["2"] * 4
    old, new = sorted(scene.store.all(REPLICA_SETS), key=lambda each: int(each["spec"]["replicas"]))
    assert (old["spec"]["replicas"], new["spec"]["replicas"]) == (0, 4)
    status = scene.store.get(DEPLOYMENTS, "n", "w")["status"]
    assert (status["updatedReplicas"], status["availableReplicas"], status["observedGeneration"]) == (4, 4, 2)


def test_what_never_gets_ready_stops_a_rolling_update() -> None:
    scene = Scene(3, {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}})
    scene.finish()
    scene.change(template=template("2"))
    scene.settle()
    for _ in range(STEPS):
        for pod in scene.pods():
            if "deletionTimestamp" in pod["metadata"]:
                scene.store.delete(PODS, pod, grace_s=0)
            elif pod["metadata"]["labels"]["version"] == "2":
                scene.run(pod, is_ready=False)
        scene.settle()
    assert sorted(pod["metadata"]["labels"]["version"] for pod in scene.pods()) == ["1", "1", "2"]


def test_back_to_a_template_of_before_is_its_replica_set_again() -> None:
    scene = Scene(2, {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}})
    scene.finish()
    for version in ("2", "1"):
        scene.change(template=template(version))
        scene.finish()
    assert len(scene.store.all(REPLICA_SETS)) == 2
    assert {pod["metadata"]["labels"]["version"] for pod in scene.pods()} == {"1"}


def test_recreate_ends_all_before_it_begins_another() -> None:
    scene = Scene(2, {"type": "Recreate"})
    scene.finish()
    scene.change(template=template("2"))
    versions = []
    while scene.step():
        versions.append({pod["metadata"]["labels"]["version"] for pod in scene.pods()})
    assert [each for each in versions if len(each) > 1] == []
    assert versions[-1] == {"2"}


def test_a_smaller_scale_ends_who_has_not_started_then_who_is_not_ready_then_the_cheapest_then_the_youngest() -> None:
    scene = Scene(6)
    scene.settle()
    young, cheap, old, sick, pending, dear = scene.pods()
    for pod, since in ((young, 9.0), (cheap, 1.0), (old, 2.0), (dear, 9.5)):
        scene.run(pod, since=since)
    scene.run(sick, is_ready=False)
    for pod, cost in ((cheap, "-5"), (dear, "5")):
        scene.mark(pod, {COST: cost})
    for count in range(5, -1, -1):
        scene.change(replicas=count)
        scene.settle()
    wanted = [pod["metadata"]["name"] for pod in (pending, sick, cheap, young, old, dear)]
    assert scene.workloads.ended == wanted


def test_a_stateful_set_has_one_of_each_number() -> None:
    scene = Scene(2, is_numbered=True)
    scene.settle()
    assert [pod["metadata"]["name"] for pod in scene.pods()] == ["w-0"], "the second one waits for the first"
    scene.finish()
    scene.change(template=template("2"))
    seen = scene.finish()
    assert min(ready for _, ready in seen) == 1, "one after the other"
    assert [pod["metadata"]["labels"]["version"] for pod in scene.pods()] == ["2", "2"]
    scene.change(replicas=1)
    scene.finish()
    assert [pod["metadata"]["name"] for pod in scene.pods()] == ["w-0"]


def test_what_is_deleted_takes_along_what_it_owns() -> None:
    scene = Scene(2)
    scene.finish()
    scene.store.delete(DEPLOYMENTS, scene.found)
    assert active(scene.pods()) == []
    assert scene.store.all(REPLICA_SETS) == []
