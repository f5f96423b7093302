"""A small kubelet: each pod of an emulated cluster is its rendered command as a process, probed and ended as one would.

Containers that end are started again; a pod that is to end runs its preStop hook, gets SIGTERM, and SIGKILL when its
grace is over.
"""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.deploy import emulated
from tests.integration.deploy.release_pods import PASSWORD, Cluster, Pod
from tests.integration.deploy.rendering import Release

_LOOK_S = 0.1


@dataclass
class Kubelet:
    """Keeps the pods of `world` running as processes of `pods`. `run` it in a thread."""

    world: emulated.Cluster
    pods: Cluster
    stopping: threading.Event = field(default_factory=threading.Event)
    exits: dict[str, int] = field(default_factory=dict)
    """With what status each pod that was ended ended."""
    _keepers: dict[str, threading.Thread] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def run(self) -> None:
        while not self.stopping.wait(_LOOK_S):
            for name in [name for name in list(self.world.pods) if name not in self._keepers]:
                keeper = self._keepers[name] = threading.Thread(target=self._keep, args=(name, next(self._numbers)))
                keeper.start()
        for keeper in self._keepers.values():
            keeper.join(60)

    def _keep(self, name: str, number: int) -> None:
        """One pod from its start to its end."""
        pool = self.world.pods[name]["metadata"]["labels"]["tandem/pool"]
        pod = self.pods.start(name, "worker", 1 + number % 200, pool=pool)
        is_ready = False
        while not self.stopping.wait(_LOOK_S):
            if "deletionTimestamp" in self.world.pods[name]["metadata"]:
                self._end(name, pod)
                return
            if pod.process.poll() is not None:
                self.pods.restart(name)
            if is_ready is not (now := _serves(pod)):
                self.world.set_ready(name, is_ready=now)
                is_ready = now

    def _end(self, name: str, pod: Pod) -> None:
        grace_s = pod.each.pod["terminationGracePeriodSeconds"]
        try:
            self.exits[name] = pod.stop(grace_s)
        except subprocess.TimeoutExpired:
            pod.process.kill()
            self.exits[name] = pod.process.wait(30)
        self.world.remove_pod(name)


@contextmanager
def kept(release: Release, folder: Path) -> Iterator[Kubelet]:
    """A release on an emulated cluster, with a router and a controller, while the block runs."""
    world = emulated.Cluster()
    with PrivateRedis.start(folder / "redis", PASSWORD) as redis, emulated.serving(world) as url:
        pods = Cluster(folder, release, redis, kubernetes=url)
        kubelet = Kubelet(world, pods)
        keeping = threading.Thread(target=kubelet.run)
        try:
            for pool in ("prefill", "decode"):
                found = release.one("Deployment", f"-worker-{pool}")
                labels = found["spec"]["template"]["metadata"]["labels"]
                world.add_deployment(found["metadata"]["name"], found["spec"]["replicas"], {"labels": labels})
            keeping.start()
            pods.start("router-a", "router")
            pods.start("controller-a", "controller")
            yield kubelet
        finally:
            kubelet.stopping.set()
            if keeping.ident is not None:
                keeping.join(90)
            for pod in pods.pods.values():
                pod.process.kill()
                pod.process.wait(30)


def _serves(pod: Pod) -> bool:
    """Answer the readiness probe."""
    try:
        with grpc.insecure_channel(f"{pod.place.facts['POD_IP']}:7000") as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3.0)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    except grpc.RpcError:
        return False
