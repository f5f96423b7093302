"""The chart's controller over an emulated cluster, with its rendered command, under load: nothing that people or others
do to the pods loses a request.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.deploy import emulated
from tests.integration.deploy.kubelet import Kubelet, kept
from tests.integration.deploy.release_pods import Cluster, ask, clusterctl, get, new_key
from tests.integration.deploy.rendering import CHART, Helm
from tools.waiting import wait_for

VALUES = "controller: {enabled: true}\n"
TOKENS = 200
"""A second and more, at 5 ms a step."""


@dataclass
class Load:
    """Clients that ask all the while, each anew when it was answered."""

    api: str
    key: str
    over: threading.Event = field(default_factory=threading.Event)
    answers: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def run(self) -> None:
        while not self.over.is_set():
            self.answers.append(ask(self.api, self.key, TOKENS))

    def goes_on(self, when: str) -> None:
        """Wait until more answers have come."""
        before = len(self.answers)
        wait_for(lambda: len(self.answers) > before + 4, what=f"answers come {when}")


@dataclass
class Stage:
    """A release on an emulated cluster."""

    pods: Cluster
    world: emulated.Cluster
    kubelet: Kubelet

    def clusterctl(self, *words: str) -> dict[str, Any]:
        done = clusterctl(self.pods, "router-a", *words)
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.pods.logs()}"
        return dict(json.loads(done.stdout))

    def workers(self) -> dict[str, set[str]]:
        """Return the workers that serve in each role, from one `clusterctl status`."""
        rows = self.clusterctl("status")["workers"]
        return {
            role: {row["worker"] for row in rows if row["is_connected"] and row["role"] == role}
            for role in ("prefill", "decode")
        }

    def has(self, prefill: int, decode: int) -> bool:
        live, found = set(self.world.live()), self.workers()
        counts = len(found["prefill"]), len(found["decode"])
        return live == found["prefill"] | found["decode"] and counts == (prefill, decode)

    def deployment(self, pool: str) -> str:
        return f"{self.pods.release.prefix}-worker-{pool}"


@pytest.fixture
def stage(helm: Helm, tmp_path: Path) -> Iterator[Stage]:
    release = helm.render((CHART / "ci" / "sim.yaml").read_text() + VALUES)
    with kept(release, tmp_path) as kubelet:
        yield Stage(kubelet.pods, kubelet.world, kubelet)


@pytest.mark.timeout(900)
@pytest.mark.drawn(1, of="long scenes")
def test_scale_flip_drain_and_what_others_do_lose_no_request(stage: Stage) -> None:
    api = stage.pods.ready("router-a")["http"]
    wait_for(lambda: get(f"{api}/readyz") == 200, 120, stage.pods.logs())
    load = Load(api, new_key(stage.pods, "router-a"))
    clients = [threading.Thread(target=load.run) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        wait_for(lambda: stage.has(1, 2), what=stage.pods.logs())
        for scene in (scale_up, drain_and_uncordon, flip_there_and_back, scale_down, is_deleted_by_somebody):
            scene(stage)
            load.goes_on(f"after {scene.__name__}")
        api_is_away(stage)
    finally:
        load.over.set()
        for client in clients:
            client.join(90)
    assert {status for status, _ in load.answers} == {200}, stage.pods.logs()
    assert {answer["usage"]["completion_tokens"] for _, answer in load.answers} == {TOKENS}
    assert len({answer["choices"][0]["text"] for _, answer in load.answers}) == 1
    assert set(stage.kubelet.exits.values()) == {0}, "who left was not killed"
    assert stage.pods.pods["controller-a"].process.poll() is None
    stage.pods.pods["controller-a"].process.terminate()
    assert stage.pods.pods["controller-a"].process.wait(30) == 0


def scale_up(stage: Stage) -> None:
    stage.clusterctl("scale", "--decode", "3", "--yes", "--timeout", "60")
    assert stage.has(1, 3)
    assert stage.world.deployments[stage.deployment("decode")]["replicas"] == 3


def drain_and_uncordon(stage: Stage) -> None:
    worker = sorted(stage.workers()["decode"])[0]
    stage.clusterctl("drain", worker, "--yes", "--timeout", "60")
    states = {row["worker"]: row["state"] for row in stage.clusterctl("status")["workers"]}
    assert states[worker] == "drained"
    stage.clusterctl("uncordon", worker, "--yes", "--timeout", "60")


def flip_there_and_back(stage: Stage) -> None:
    worker, pods = sorted(stage.workers()["decode"])[0], stage.world.live()
    for role, counts in (("prefill", (2, 2)), ("decode", (1, 3))):
        stage.clusterctl("flip", worker, "--to", role, "--yes", "--timeout", "60")
        assert stage.has(*counts)
        label_becomes(stage, worker, role)
    assert stage.world.live() == pods, "no pod was replaced"


def label_becomes(stage: Stage, worker: str, role: str) -> None:
    wait_for(lambda: stage.world.pods[worker]["metadata"]["labels"]["tandem/role"] == role)


def scale_down(stage: Stage) -> None:
    found = stage.clusterctl("scale", "--decode", "2", "--yes", "--timeout", "60")
    (victim,) = [row["worker_id"] for row in found["changes"]]
    wait_for(lambda: victim in stage.kubelet.exits)
    assert stage.world.ended == [victim], "it and nobody else"
    wait_for(lambda: stage.has(1, 2), what="the router sees that it is gone")


def is_deleted_by_somebody(stage: Stage) -> None:
    victim = stage.world.live(stage.deployment("decode"))[0]
    stage.world.delete_pod(victim)
    wait_for(lambda: victim in stage.kubelet.exits)
    wait_for(lambda: stage.has(1, 2), what="another one comes in its place")


def api_is_away(stage: Stage) -> None:
    stage.world.is_away = True
    before = set(stage.world.live())
    stage.clusterctl("scale", "--decode", "1", "--yes", "--no-wait")
    wait_for(lambda: "drained" in {row["state"] for row in stage.clusterctl("status")["workers"]})
    assert set(stage.world.live()) == before, "nobody can be taken away"
    stage.world.is_away = False
    wait_for(lambda: stage.has(1, 1))
