"""The commands of the chart's containers, run here as Kubernetes would run them, are a cluster that serves.

Facts of pods, paths and ports are filled in; Redis is a private one. Nobody restarts anything, as no kubelet is here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tandem.core.metricnames import REATTEMPTS
from tandem.prefixindex.private_redis import PrivateRedis
from tests.integration.deploy.mounting import Mounted, mounted
from tests.integration.deploy.rendering import CHART, Container, Helm, Release
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
        """What a kubelet does: preStop, then SIGTERM; the exit status."""
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
        with (place.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                place.command(each.command), env=place.variables(each), stdout=log, stderr=log, cwd=place.folder
            )
        self.pods[name] = Pod(each, place, process)
        return self.pods[name]

    def moved(self, text: str) -> str:
        """A configuration for this machine: another Redis, and free ports where a pod has all for itself."""
        text = text.replace(f"{self.release.prefix}-redis.serving.svc:6379", f"127.0.0.1:{self.redis.port}")
        text = text.replace('host = "0.0.0.0"', 'host = "127.0.0.1"')
        for port in (8000, 8001, 8002):
            text = text.replace(f"port = {port}\n", "port = 0\n")
        return text

    def ready(self, router: str) -> dict[str, Any]:
        """Where a router listens."""
        path = self.pods[router].place.folder / "run/tandem/router/router.ready.json"
        wait_for(lambda: path.exists() or self.pods[router].process.poll() is not None, what=f"{router} listens")
        assert path.exists(), self.logs()
        return dict(json.loads(path.read_text()))

    def logs(self) -> str:
        files = {name: pod.place.folder / "log" for name, pod in self.pods.items()}
        return "\n".join(f"==> {name}\n{file.read_text()[-2000:]}" for name, file in files.items())


@pytest.fixture
def cluster(helm: Helm, tmp_path: Path) -> Iterator[Cluster]:
    release = helm.render((CHART / "ci" / "sim.yaml").read_text())
    with PrivateRedis.start(tmp_path / "redis", PASSWORD) as redis:
        found = Cluster(tmp_path, release, redis)
        try:
            yield found
        finally:
            for pod in found.pods.values():
                pod.process.kill()
                pod.process.wait(30)


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


def in_flight(cluster: Cluster, router: str, worker: str) -> int:
    """Requests that the router has there."""
    key = (cluster.pods[router].place.folder / "etc/tandem/secrets/admin-key").read_text().strip()
    url = f"{cluster.ready(router)['admin']}/admin/v1/status"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})) as response:
        workers = json.load(response)["workers"]
    return int(next(each["router_in_flight"] for each in workers if each["worker"] == worker))


def reattempts(cluster: Cluster, router: str) -> float:
    """Requests that were begun once more, for whatever reason."""
    with urllib.request.urlopen(f"{cluster.ready(router)['admin']}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{REATTEMPTS}{{"))


def new_key(cluster: Cluster, router: str) -> str:
    """As the notes say."""
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


def test_the_pods_of_a_release_serve_and_leave_without_a_failed_answer(cluster: Cluster) -> None:
    cluster.start("router-a", "router")
    cluster.start("prefill-a", "worker", 1, pool="prefill")
    cluster.start("decode-a", "worker", 2, pool="decode")
    leaving = cluster.start("decode-b", "worker", 3, pool="decode")
    api = cluster.ready("router-a")["http"]
    assert get(f"{api}/livez") == 200, "it lives before anybody can answer"
    wait_for(lambda: get(f"{api}/readyz") == 200, 120, cluster.logs())
    key = new_key(cluster, "router-a")
    assert ask(api, "")[0] == 401
    assert ask(api, key)[0] == 200

    answers: list[tuple[int, dict[str, Any]]] = []
    clients = [threading.Thread(target=lambda: answers.append(ask(api, key, ANSWER_TOKENS))) for _ in range(6)]
    for client in clients:
        client.start()
    wait_for(lambda: in_flight(cluster, "router-a", "decode-b") > 0)
    assert leaving.stop() == 0
    for client in clients:
        client.join(60)
    assert [status for status, _ in answers] == [200] * 6, cluster.logs()
    assert {answer["usage"]["completion_tokens"] for _, answer in answers} == {ANSWER_TOKENS}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
    assert reattempts(cluster, "router-a") == 0, "it was drained: each answer ended where it began"

    assert ask(api, key)[0] == 200, "the other one goes on"
    scaled = clusterctl(cluster, "router-a", "scale", "--decode", "3", "--yes")
    assert scaled.returncode != 0, "the page says so: there is no controller"
    assert [cluster.pods[name].stop() for name in ("decode-a", "prefill-a", "router-a")] == [0, 0, 0]


def test_what_a_container_left_is_gone_when_it_starts_again(cluster: Cluster) -> None:
    """Its pod's folder stays over a restart; nobody else can read what is in it."""
    pod = cluster.start("decode-a", "worker", pool="decode")
    own = pod.place.folder / "run/tandem/worker"
    wait_for(lambda: (own / "worker.json").exists(), what=cluster.logs())
    assert own.stat().st_mode & 0o777 == 0o700
    assert (own / "worker.json").stat().st_mode & 0o777 == 0o600
    pod.process.kill()
    pod.process.wait(30)
    (own / "stale.sock").touch()
    (own / "worker.json").unlink()
    with (pod.place.folder / "log").open("ab") as log:
        pod.process = subprocess.Popen(pod.place.command(pod.each.command), env=pod.variables, stdout=log, stderr=log)
    wait_for(lambda: (own / "worker.json").exists(), what=cluster.logs())
    assert not (own / "stale.sock").exists()


def test_draining_a_worker_that_does_not_answer_holds_nobody_up(cluster: Cluster) -> None:
    """It has not started, or has ended: a pod that cannot be drained is ended all the same, and at once."""
    pod = cluster.start("decode-a", "worker", pool="decode")
    pod.process.kill()
    pod.process.wait(30)
    hook = pod.place.command(pod.each.spec["lifecycle"]["preStop"]["exec"]["command"])
    done = subprocess.run(hook, env=pod.variables, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    assert "drain" in done.stderr
