"""An emulated cluster with a node: what Helm installs runs, as processes of this machine."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.deploy.emulation import world
from tests.integration.deploy.emulation.containers import Machine
from tests.integration.deploy.emulation.kubelet import Kubelet, Pod
from tests.integration.deploy.emulation.resources import PODS, Object
from tests.integration.deploy.emulation.services import Forwarders
from tests.integration.deploy.emulation.workloads import Workloads, active, is_ready
from tests.integration.deploy.rendering import NAME, NAMESPACE

PREFIX = f"{NAME}-tandem"
ROUTER, REDIS = f"{PREFIX}-router", f"{PREFIX}-redis"


@dataclass
class Cluster:
    """A cluster, and what people do with it."""

    world: world.World
    workloads: Workloads
    kubelet: Kubelet
    forwarders: Forwarders

    @property
    def url(self) -> str:
        """Of the routers' Service."""
        return f"http://{self.forwarders.addresses[name_of(ROUTER)]}:8000"

    def pods(self, owner: str = "") -> list[Object]:
        """Return the pods of workloads with this prefix in their names, without those that are being ended."""
        found = active(self.world.store.all(PODS, NAMESPACE))
        return [pod for pod in found if pod["metadata"]["name"].startswith(owner)]

    def names(self, owner: str = "") -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods(owner)]

    def delete_pod(self, name: str) -> None:
        """`kubectl delete pod --wait=false`."""
        self.world.store.delete(PODS, self.world.store.get(PODS, NAMESPACE, name))

    def clusterctl(self, *words: str, timeout_s: float = 240.0) -> dict[str, Any]:
        """The real one, through `kubectl port-forward deployment/demo-tandem-router 8002`."""
        staying = (pod["metadata"] for pod in self.pods(ROUTER) if is_ready(pod))
        router = self.kubelet.running[next(about["name"] for about in staying if "deletionTimestamp" not in about)]
        ready = json.loads(router.container.path("/run/tandem/router/router.ready.json").read_text())
        key = router.container.path("/etc/tandem/secrets/admin-key")
        where = ["--endpoint", ready["admin"], "--admin-key-file", str(key), "-o", "json"]
        command = [sys.executable, "-m", "tandem.clusterctl", *words, *where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.logs()}"
        return dict(json.loads(done.stdout))

    def workers(self) -> dict[str, set[str]]:
        """Return the workers that serve in each role, from one `clusterctl status`."""
        rows = self.clusterctl("status")["workers"]
        return {
            role: {row["worker"] for row in rows if row["is_connected"] and row["role"] == role}
            for role in ("prefill", "decode")
        }

    def logs(self) -> str:
        """Return the last output of every container, and those that ended unasked."""
        running: list[Pod] = list(self.kubelet.running.values())
        told = [f"==> {pod.name} {pod.ip}\n{pod.container.log()}" for pod in running]
        return "\n".join([*self.kubelet.failures, *told])


def name_of(service: str) -> str:
    return f"{service}.{NAMESPACE}.svc"


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """`world.serving` with controllers, a kubelet and what leads Services to pods, while the block runs. No process is
    left after it."""
    low = os.getpid() % 60_000
    addresses = {
        name_of(service): f"127.{number}.{1 + low // 250}.{1 + low % 250}"
        for service, number in ((ROUTER, 240), (REDIS, 241))
    }
    with world.serving(folder / "helm") as found:
        machine = Machine(folder / "node", found.store, addresses, found.api.url)
        machine.prepare()
        workloads, kubelet = Workloads(found.store), Kubelet(found.store, machine)
        forwarders = Forwarders(found.store, addresses, lambda name, port: kubelet.running[name].container.port(port))
        parts = (workloads, kubelet, forwarders)
        threads = [threading.Thread(target=each.run) for each in parts]
        for thread in threads:
            thread.start()
        try:
            yield Cluster(found, workloads, kubelet, forwarders)
        finally:
            for each in parts:
                each.stopping.set()
            for thread in threads:
                thread.join(90)
