"""The containers of a release as processes here: started and stopped as a kubelet would, and asked as people do."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.core.metric_names import REATTEMPTS
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.deploy.mounting import Mounted, mounted
from tests.integration.deploy.rendering import Container, Release
from tools.waiting import wait_for

PASSWORD = "redis-password of thirty-two bytes!"
ANSWER_TOKENS = 1000
"""Five seconds, at 5 ms a step."""


@dataclass
class Pod:
    """A container that runs."""

    each: Container
    place: Mounted
    process: subprocess.Popen[bytes]

    def stop(self, timeout_s: float = 60.0) -> int:
        """Stop as a kubelet does: preStop, then SIGTERM; return the exit status."""
        hook = self.each.spec["lifecycle"]["preStop"].get("exec")
        if hook:
            command = self.place.command(hook["command"])
            assert subprocess.run(command, env=self.variables, timeout=timeout_s, check=False).returncode == 0
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    @property
    def variables(self) -> dict[str, str]:
        return self.place.variables(self.each)


@dataclass
class Cluster:
    """The release's pods on this machine."""

    folder: Path
    release: Release
    redis: PrivateRedis
    pods: dict[str, Pod] = field(default_factory=dict)
    kubernetes: str = ""
    """The address of its API."""

    def start(self, name: str, component: str, number: int = 0, pool: str = "") -> Pod:
        """A pod as a Deployment would have made it. Each has an address of its own."""
        each = next(
            found for found in self.release.containers()
            if found.component == component and found.owner["metadata"]["labels"].get("tandem/pool", "") == pool
        )  # fmt: skip
        low = os.getpid() % 60_000
        facts = {"POD_NAME": name, "POD_IP": f"127.{10 + number}.{1 + low // 250}.{1 + low % 250}", "POD_CPUS": "1"}
        place = mounted(self.folder / name, self.release, facts)
        for path in (place.folder / "etc/tandem/config").iterdir():
            path.write_text(self.moved(path.read_text()))
        pod = self.pods[name] = Pod(each, place, self._run(each, place))
        return pod

    def restart(self, name: str) -> None:
        """Start its container once more, in the same pod."""
        pod = self.pods[name]
        pod.process = self._run(pod.each, pod.place)

    def _run(self, each: Container, place: Mounted) -> subprocess.Popen[bytes]:
        command = [word.replace("https://kubernetes.default.svc", self.kubernetes) for word in each.command]
        with (place.folder / "log").open("ab") as log:
            return subprocess.Popen(
                place.command(command), env=place.variables(each), stdout=log, stderr=log, cwd=place.folder
            )

    def moved(self, text: str) -> str:
        """A configuration for this machine: another Redis, and free ports where a pod has all for itself."""
        text = text.replace(f"{self.release.prefix}-redis.serving.svc:6379", f"127.0.0.1:{self.redis.port}")
        text = text.replace('host = "0.0.0.0"', 'host = "127.0.0.1"')
        for port in (8000, 8001, 8002):
            text = text.replace(f"port = {port}\n", "port = 0\n")
        return text

    def ready(self, router: str) -> dict[str, Any]:
        """Return the router's ready file, once it listens."""
        path = self.pods[router].place.folder / "run/tandem/router/router.ready.json"
        wait_for(lambda: path.exists() or self.pods[router].process.poll() is not None, what=f"{router} listens")
        assert path.exists(), self.logs()
        return dict(json.loads(path.read_text()))

    def logs(self) -> str:
        files = {name: pod.place.folder / "log" for name, pod in self.pods.items()}
        return "\n".join(f"==> {name}\n{file.read_text()[-2000:]}" for name, file in files.items())


def get(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def ask(api: str, key: str, tokens: int = 8) -> tuple[int, dict[str, Any]]:
    body = {"model": "tandem-tiny", "prompt": "One two three", "max_tokens": tokens, "ignore_eos": True, "seed": 7}
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"{api}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def connected(cluster: Cluster, router: str) -> set[str]:
    """Workers that the router can send work to."""
    return {each["worker"] for each in _workers(cluster, router) if each["is_connected"]}


def in_flight(cluster: Cluster, router: str, worker: str) -> int:
    """Requests that the router has there."""
    return int(next(each["router_in_flight"] for each in _workers(cluster, router) if each["worker"] == worker))


def _workers(cluster: Cluster, router: str) -> list[dict[str, Any]]:
    key = (cluster.pods[router].place.folder / "etc/tandem/secrets/admin-key").read_text().strip()
    url = f"{cluster.ready(router)['admin']}/admin/v1/status"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})) as response:
        return list(json.load(response)["workers"])


def reattempts(cluster: Cluster, router: str) -> float:
    """Requests that were begun once more, for any reason."""
    with urllib.request.urlopen(f"{cluster.ready(router)['admin']}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{REATTEMPTS}{{"))


def new_key(cluster: Cluster, router: str) -> str:
    """Create a key as described in the notes."""
    assert "clusterctl key create --tenant me --endpoint" in cluster.release.notes
    done = clusterctl(cluster, router, "key", "create", "--tenant", "me")
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["key"])


def clusterctl(cluster: Cluster, router: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The real one, at the router's admin port."""
    admin_key = cluster.pods[router].place.folder / "etc/tandem/secrets/admin-key"
    where = ["--endpoint", cluster.ready(router)["admin"], "--admin-key-file", str(admin_key), "-o", "json"]
    command = [sys.executable, "-m", "tandem.clusterctl", *words, *where]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
