"""A RayCluster is resized over an emulated API, with an operator that does what KubeRay does with what it reads."""

import asyncio
import copy
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tandem.controlplane.kuberay_autoscaler import sizer as sizer_module
from tandem.controlplane.kuberay_autoscaler.raycluster import CLUSTER, GROUP, NODE_TYPE
from tandem.controlplane.kuberay_autoscaler.sizer import RayClusterSizer
from tandem.controlplane.kubernetes.api import KubernetesApi
from tandem.core.clock import MonotonicClock
from tandem.core.config import RayClusterSection
from tandem.core.desired import DesiredState, Pool
from tandem.core.desired_changes import with_scale
from tandem.core.errors import ConflictError
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName
from tests.integration.deploy import emulated
from tests.integration.deploy.emulated import TOKEN, Cluster, serving
from tools.waiting import wait_for_async

NAME = "demo-ray"
M = RoleName.MIXED
LOOKS_WHILE_EMPTY = 4
"""So many until an empty node may go."""
SCHEMA = Path(emulated.__file__).parent / "schemas" / "raycluster.json"


@dataclass
class Operator:
    """As KubeRay's: it deletes the named pods, creates missing ones, and where too many are left it takes any."""

    cluster: Cluster
    deleted: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)
    """Deleted pods that were not named."""
    lingering: bool = False
    """Pods that are being ended stay."""
    _made: int = 0

    async def run(self) -> None:
        while True:
            with self.cluster.changed:
                for spec in self.cluster.rayclusters[NAME]["spec"]["workerGroupSpecs"]:
                    self._keep(spec)
            await asyncio.sleep(0.01)

    def pods(self, group: str) -> list[str]:
        return [name for name, pod in self.cluster.pods.items() if pod["metadata"]["labels"][GROUP] == group]

    def _keep(self, spec: dict[str, Any]) -> None:
        there = self.pods(spec["groupName"])
        named = [name for name in spec.get("scaleStrategy", {}).get("workersToDelete", ()) if name in there]
        for name in named:
            self._delete(name)
        left = [name for name in there if name not in named]
        for _ in range(spec["replicas"] - len(left)):
            self._make(spec["groupName"])
        for name in left[: max(0, len(left) - spec["replicas"])]:
            self.random.append(name)
            self._delete(name)
        for name in there:
            if "deletionTimestamp" in self.cluster.pods[name]["metadata"] and not self.lingering:
                self.cluster.remove_pod(name)

    def _delete(self, name: str) -> None:
        if name not in self.deleted:
            self.deleted.append(name)
        self.cluster.delete_pod(name)

    def _make(self, group: str) -> None:
        self._made += 1
        labels = {CLUSTER: NAME, GROUP: group, NODE_TYPE: "worker"}
        status = {"phase": "Running", "podIP": f"10.0.0.{self._made}"}
        self.cluster.add_pod(f"{NAME}-{group}-{self._made:03d}", labels, status)


@dataclass
class Scene:
    """The objects that a test observes and changes. `started`: as reported by the launcher, including Ray's placing."""

    url: str
    cluster: Cluster
    operator: Operator
    state: DesiredState
    looks: int = 0
    started: dict[WorkerId, str] = field(default_factory=dict)
    held: set[WorkerId] = field(default_factory=set)
    """Wanted no more, and not stopped yet: they drain."""
    said: list[str] = field(default_factory=list)

    def wish(self, count: int) -> None:
        before = {member.worker_id for member in self.state.members}
        self.state = replace(with_scale(self.state, {M: count}, {}), version=self.state.version + 1)
        self.held |= before - {member.worker_id for member in self.state.members}

    async def place(self) -> None:
        """Act as controller and Ray do: wanted workers start on an empty node each, others end when they may."""
        while True:
            wanted = {member.worker_id for member in self.state.members}
            for worker in [name for name in self.started if name not in wanted | self.held]:
                del self.started[worker]
            for worker in sorted(wanted):
                self.started[worker] = self.started.get(worker, "") or self._free()
            await asyncio.sleep(0.01)

    def _free(self) -> str:
        with self.cluster.changed:
            pods = [pod for pod in self.cluster.pods.values() if "deletionTimestamp" not in pod["metadata"]]
        free = {str(pod["status"]["podIP"]) for pod in pods} - set(self.started.values())
        return min(free, default="")

    def is_settled(self, count: int) -> bool:
        with self.cluster.changed:
            addresses = {str(pod["status"]["podIP"]) for pod in self.cluster.pods.values()}
        return self.replicas == count and addresses == set(self.started.values()) and len(addresses) == count

    async def looked(self, times: int) -> None:
        """Wait until so many more looks have begun."""
        until = self.looks + times
        await wait_for_async(lambda: self.looks >= until)

    def address_of(self, pod: str) -> str:
        return str(self.cluster.pods[pod]["status"]["podIP"])

    @property
    def replicas(self) -> int:
        return int(self.cluster.rayclusters[NAME]["spec"]["workerGroupSpecs"][0]["replicas"])

    async def settled(self, count: int) -> None:
        try:
            await wait_for_async(lambda: self.is_settled(count))
        except AssertionError as error:
            raise AssertionError(f"not {count}: {self.replicas} {self.started} {list(self.cluster.pods)}") from error


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr(sizer_module, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(sizer_module, "EMPTY_S", 0.05 * LOOKS_WHILE_EMPTY)
    return tmp_path


def play(account: Path, scene: Callable[[Scene], Coroutine[None, None, None]], *, sizers: int = 1) -> Scene:
    cluster = Cluster()
    group = {"groupName": "short", "replicas": 2, "minReplicas": 0, "maxReplicas": 5, "template": {}}
    spec = {"enableInTreeAutoscaling": False, "headGroupSpec": {"template": {}}, "workerGroupSpecs": [group]}
    cluster.put_raycluster({"kind": "RayCluster", "metadata": {"name": NAME}, "spec": spec})
    pool = Pool(name="mixed", model="m", role=M, count=2)
    state = DesiredState(version=1, pools=(pool,)).filled()

    async def run(url: str) -> Scene:
        found = Scene(url, cluster, Operator(cluster), state)

        async def load() -> DesiredState:
            found.looks += 1
            return found.state

        def sizer() -> RayClusterSizer:
            return RayClusterSizer(
                RayClusterSection(name=NAME, namespace="serving", api=url, account=str(account), mixed="short"),
                load=load,
                started=lambda: found.started,
                hosts=dict,
                clock=MonotonicClock(),
                say=lambda _, text: found.said.append(text),
            )

        others = [found.operator.run(), found.place(), *(sizer().run() for _ in range(sizers))]
        tasks = [asyncio.create_task(each) for each in others]
        playing = asyncio.create_task(scene(found))
        done, _ = await asyncio.wait([playing, *tasks], timeout=240, return_when=asyncio.FIRST_COMPLETED)
        for task in (playing, *tasks):
            task.cancel()
        await asyncio.gather(playing, *tasks, return_exceptions=True)
        for task in done:
            task.result()
        assert playing in done, "the scene did not end"
        assert found.operator.random == [], "nobody goes whom nobody named"
        return found

    with serving(cluster) as url:
        return asyncio.run(run(url))


def test_nodes_follow_a_scale_and_the_one_goes_that_its_worker_has_left(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(2)
        assert seen.cluster.writes == [], "they fit as they are"
        seen.wish(4)
        await seen.settled(4)
        seen.wish(2)
        addresses = {seen.started[victim] for victim in seen.held}
        going = sorted(pod for pod in seen.cluster.pods if seen.address_of(pod) in addresses)
        await seen.looked(2 * LOOKS_WHILE_EMPTY)
        assert (seen.replicas, len(seen.cluster.pods)) == (4, 4), "they drain"
        seen.held.clear()
        await seen.settled(2)
        assert sorted(seen.operator.deleted) == going

    found = play(account, scene)
    takes = jsonschema_rs.validator_for(json.loads(SCHEMA.read_text()))
    takes.validate(found.cluster.rayclusters[NAME])
    assert [text for text in found.said if "cannot" in text] == []
    assert found.said[0] == "group short from 2 to 4 nodes"


def test_no_more_than_the_most_and_the_api_may_be_away(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(2)
        seen.cluster.is_away = True
        seen.wish(7)
        await wait_for_async(lambda: any("cannot be resized" in text for text in seen.said))
        assert seen.replicas == 2
        seen.cluster.is_away = False
        await wait_for_async(lambda: len(seen.operator.pods("short")) == 5)
        seen.wish(5)
        seen.held.clear()
        await seen.settled(5)

    found = play(account, scene)
    assert len([text for text in found.said if "cannot" in text]) == 1, "told once"
    assert found.operator.deleted == []


def test_a_pod_that_takes_long_to_end_stays_named(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(2)
        seen.wish(4)
        await seen.settled(4)
        seen.operator.lingering = True
        for count in (3, 2):
            seen.wish(count)
            seen.held.clear()
            await wait_for_async(lambda: seen.replicas == count)  # noqa: B023 - it is awaited here
        await wait_for_async(lambda: len(seen.operator.deleted) == 2)
        seen.wish(3)
        await wait_for_async(lambda: seen.replicas == 3)
        seen.operator.lingering = False
        await seen.settled(3)

    found = play(account, scene)
    lists = [json.loads(patch)[-1]["value"]["workersToDelete"] for _, patch in found.cluster.writes]
    assert [len(each) for each in lists] == [0, 1, 2, 2]


def test_two_of_them_and_an_operator_that_writes_do_no_harm(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        async def write() -> None:
            """Write its status, as an operator does all the time."""
            while True:
                with seen.cluster.changed:
                    found = copy.deepcopy(seen.cluster.rayclusters[NAME])
                    found["status"] = {"state": "ready"}
                    seen.cluster.put_raycluster(found)
                await asyncio.sleep(0.2)

        await seen.settled(2)
        writing = asyncio.create_task(write())
        for count in (4, 1, 3):
            seen.wish(count)
            seen.held.clear()
            await seen.settled(count)
        writing.cancel()

    play(account, scene, sizers=2)


def test_a_change_onto_another_version_is_refused_as_a_whole(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(2)
        async with KubernetesApi(seen.url, account, "serving") as api:
            before = seen.replicas
            stale: list[dict[str, Any]] = [
                {"op": "test", "path": "/metadata/resourceVersion", "value": "1"},
                {"op": "add", "path": "/spec/workerGroupSpecs/0/replicas", "value": 0},
            ]
            with pytest.raises(ConflictError, match="422"):
                await api.patch_raycluster(NAME, stale)
            assert seen.replicas == before

    play(account, scene)


def test_beside_an_autoscaler_nothing_is_written(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(2)
        with seen.cluster.changed:
            found = copy.deepcopy(seen.cluster.rayclusters[NAME])
            found["spec"]["enableInTreeAutoscaling"] = True
            seen.cluster.put_raycluster(found)
        seen.wish(3)
        await wait_for_async(lambda: any("autoscaler" in text for text in seen.said))

    assert play(account, scene).cluster.writes == []
