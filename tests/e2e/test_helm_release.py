"""A release of the chart from `helm install` to `helm uninstall`, under load through its Service: Helm's own code over
an emulated API server, with pods that are the chart's commands as processes. No change to it loses a request.
"""

import json
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.integration.deploy.emulation.node import PREFIX, REDIS, ROUTER, Cluster, name_of, running
from tests.integration.deploy.emulation.resources import ALL, DEPLOYMENTS, PODS
from tests.integration.deploy.emulation.world import WAIT
from tests.integration.deploy.rendering import CHART, NAMESPACE
from tools.running_cluster import is_alive
from tools.waiting import wait_for

P, D = f"{PREFIX}-worker-prefill", f"{PREFIX}-worker-decode"
PROMPTS = {"One two three": 40, "Once upon a time there was": 120, "To be or not to be, that is": 600}
"""With as many tokens to answer, 5 ms and more each: some end at once, some last longer than a pod takes to leave."""
SLOW = "180"
"""Seconds that a command waits for what it asked for: pods start as fast as the machine lets them."""
LONG = max(PROMPTS, key=lambda prompt: PROMPTS[prompt])


def values(**worker: Any) -> str:
    """Two workers of each role without a model, two routers, a controller, a Redis."""
    found = yaml.safe_load((CHART / "ci" / "sim.yaml").read_text())
    found["controller"] = {"enabled": True}
    found["config"]["worker"].update(worker)
    found["pools"] = {role: {"role": role, "replicas": 2} for role in ("prefill", "decode")}
    return str(yaml.safe_dump(found))


@dataclass
class Load:
    """Clients that ask all the while, each anew when it was answered. `failures`: all answers but the right ones."""

    url: str
    key: str
    over: threading.Event = field(default_factory=threading.Event)
    answers: int = 0
    failures: list[str] = field(default_factory=list)
    _right: dict[str, Any] = field(default_factory=dict)
    _clients: list[threading.Thread] = field(default_factory=list)

    def begin(self) -> None:
        self._right = {prompt: self._ask(prompt) for prompt in PROMPTS}
        self._clients = [threading.Thread(target=self._run, args=(prompt,)) for prompt in PROMPTS]
        for client in self._clients:
            client.start()

    def end(self) -> None:
        self.over.set()
        for client in self._clients:
            client.join(240)

    def goes_on(self) -> None:
        """Wait until more answers have come."""
        before = self.answers
        wait_for(lambda: self.answers >= before + 2 * len(PROMPTS) or self.failures, what="answers come")

    def last(self) -> None:
        """Ask once more, for what takes longest."""
        self.over.clear()
        self._clients = [threading.Thread(target=self._run, args=(LONG,))]
        self._clients[0].start()

    def _run(self, prompt: str) -> None:
        while not self.over.is_set():
            try:
                answer = self._ask(prompt)
            except OSError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                self.over.wait(0.2)
                continue
            self.answers += 1
            if answer != self._right[prompt]:
                self.failures.append(f"{prompt!r}: another answer")

    def _ask(self, prompt: str) -> tuple[str, int]:
        """Text and number of tokens; OSError for every other answer than a whole one."""
        body = {"model": "tandem-tiny", "prompt": prompt, "max_tokens": PROMPTS[prompt], "ignore_eos": True, "seed": 7}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=180) as response:
            found = json.load(response)
        return found["choices"][0]["text"], found["usage"]["completion_tokens"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path) as found:
        yield found


@pytest.mark.timeout(900)
@pytest.mark.drawn(1, of="long scenes")
def test_a_release_lives_through_everything_without_a_lost_request(cluster: Cluster) -> None:
    said = cluster.world.act("install", values=values(), **WAIT)
    assert said["status"] == "deployed"
    wait_for_pods(cluster, 2, 2)
    wait_for(lambda: {*cluster.forwarders.known(name_of(ROUTER))} == {*cluster.names(ROUTER)})
    key = cluster.clusterctl("key", "create", "--tenant", "me")["key"]
    load = Load(cluster.url, key)
    load.begin()
    try:
        for scene in SCENES:
            scene(cluster)
            load.goes_on()
            assert load.failures == [], f"{scene.__name__}\n{cluster.logs()}"
    finally:
        load.end()
    assert load.failures == [], cluster.logs()
    assert cluster.kubelet.failures == [], "nobody ended unasked"
    uninstall(cluster, load)


def has(cluster: Cluster, prefill: int, decode: int) -> bool:
    """True if so many serve, and these are the workers' pods."""
    found = cluster.workers()
    pods = {*cluster.names(P), *cluster.names(D)}
    counts = len(found["prefill"]), len(found["decode"])
    return pods == found["prefill"] | found["decode"] and counts == (prefill, decode)


def wait_for_pods(cluster: Cluster, prefill: int, decode: int) -> None:
    """Each look is a command, too, and they start as slowly as pods do."""
    try:
        wait_for(lambda: has(cluster, prefill, decode), float(SLOW))
    except AssertionError as error:
        raise AssertionError(f"{error}\n{cluster.logs()}") from None


def rows(cluster: Cluster) -> list[dict[str, Any]]:
    return list(cluster.clusterctl("status")["workers"])


def scale_up(cluster: Cluster) -> None:
    cluster.clusterctl("scale", "--decode", "3", "--yes", "--timeout", SLOW)
    found = cluster.world.store.get(DEPLOYMENTS, NAMESPACE, D)
    assert found["spec"]["replicas"] == 3
    owners = cluster.world.store.owners[found["metadata"]["uid"]].fields
    assert owners["tandem-controller"] == {("spec", "replicas")}, "Helm can tell whose it is"
    assert has(cluster, 2, 3)


def drain_and_uncordon(cluster: Cluster) -> None:
    worker = sorted(cluster.workers()["decode"])[0]
    cluster.clusterctl("drain", worker, "--yes", "--timeout", SLOW)
    assert [row["state"] for row in rows(cluster) if row["worker"] == worker] == ["drained"]
    cluster.clusterctl("uncordon", worker, "--yes", "--timeout", SLOW)


def flip_there_and_back(cluster: Cluster) -> None:
    worker, pods = sorted(cluster.workers()["decode"])[0], cluster.names()
    for role, counts in (("prefill", (3, 2)), ("decode", (2, 3))):
        cluster.clusterctl("flip", worker, "--to", role, "--yes", "--timeout", SLOW)
        assert has(cluster, *counts)
        label_becomes(cluster, worker, role)
    assert cluster.names() == pods, "no pod was replaced"


def label_becomes(cluster: Cluster, worker: str, role: str) -> None:
    store = cluster.world.store
    wait_for(lambda: store.get(PODS, NAMESPACE, worker)["metadata"]["labels"]["tandem/role"] == role)


def scale_down(cluster: Cluster) -> None:
    """While the API does not answer, the victim is drained, and no pod is taken away."""
    pods = cluster.names(D)
    cluster.world.api.is_away = True
    found = cluster.clusterctl("scale", "--decode", "2", "--yes", "--no-wait")
    (victim,) = [row["worker_id"] for row in found["changes"]]
    wait_for(lambda: victim in {row["worker"] for row in rows(cluster) if row["state"] == "drained"})
    assert cluster.names(D) == pods
    cluster.world.api.is_away = False
    wait_for(lambda: victim in cluster.kubelet.ends, float(SLOW))
    assert cluster.workloads.ended == [victim], "it and nobody else"
    wait_for_pods(cluster, 2, 2)


def is_deleted_by_somebody(cluster: Cluster) -> None:
    victim = cluster.names(D)[0]
    cluster.delete_pod(victim)
    wait_for(lambda: victim in cluster.kubelet.ends, float(SLOW))
    wait_for_pods(cluster, 2, 2)  # another one comes in its place


def upgrade(cluster: Cluster) -> None:
    """Workers of another revision, one after the other in each pool; routers and controller are replaced, too."""
    replaced_by(cluster, lambda: cluster.world.act("upgrade", values=values(chunk_tokens=256), **WAIT))


def roll_back(cluster: Cluster) -> None:
    replaced_by(cluster, lambda: cluster.world.act("rollback", **WAIT))


def replaced_by(cluster: Cluster, act: Any) -> None:
    before = {*cluster.names(P), *cluster.names(D), *cluster.names(ROUTER)}
    redis = cluster.names(REDIS)
    cluster.workloads.fewest.update({P: 2, D: 2, ROUTER: 2})
    act()
    assert cluster.workloads.fewest == {P: 1, D: 1, ROUTER: 2}
    wait_for_pods(cluster, 2, 2)
    assert before.isdisjoint(cluster.names())
    assert cluster.names(REDIS) == redis, "nothing of it has changed"
    wait_for(lambda: before <= cluster.kubelet.ends.keys())


SCENES = (scale_up, drain_and_uncordon, flip_there_and_back, scale_down, is_deleted_by_somebody, upgrade, roll_back)


def uninstall(cluster: Cluster, load: Load) -> None:
    processes = [psutil.Process(pod.process_id) for pod in cluster.kubelet.running.values()]
    tree = [each for found in processes for each in (found, *found.children(recursive=True))]
    tree = [each for each in tree if "tests.plugins.template" not in each.cmdline()]
    assert len(tree) >= 8, "two routers, two of each role, a controller and a Redis"
    before = load.answers
    load.last()
    wait_for(lambda: sum(row["router_in_flight"] for row in rows(cluster)))
    load.over.set()
    cluster.world.act("uninstall", **WAIT)
    load.end()
    assert load.failures == [], cluster.logs()
    assert load.answers > before, "it was answered to its end"
    wait_for(lambda: not cluster.kubelet.running, what=cluster.logs())
    assert not [each for each in tree if is_alive(each.pid)]
    unclean = {name: end for name, end in cluster.kubelet.ends.items() if (end.status, end.hook) != (0, 0)}
    assert unclean == {}, "everybody has left by itself, in its grace"
    left = [found for resource in ALL for found in cluster.world.store.all(resource) if is_helms(found)]
    assert left == []
    assert cluster.world.store.all(DEPLOYMENTS, NAMESPACE) == []


def is_helms(found: dict[str, Any]) -> bool:
    labels = found["metadata"].get("labels", {})
    return bool(labels.get("app.kubernetes.io/managed-by") == "Helm")
