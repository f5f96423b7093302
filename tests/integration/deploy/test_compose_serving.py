"""The commands of compose.yaml, run here as Docker would run them, are a cluster that serves and reports readiness.

Each has the packages that its image has, and no others. Paths, addresses and ports are filled in, the engine is `sim`,
Redis is a private one.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.deploy.composing import Placed, Service, placed, seconds, service, variables
from tests.integration.deploy.installed import environment
from tools.image_requirements import IMAGES as EXTRAS
from tools.waiting import wait_for

SECRETS = {name: f"{name} of thirty-two bytes!" for name in ("cluster-secret", "admin-key", "redis-password")}


@dataclass
class Running:
    """A service as a process."""

    each: Service
    place: Placed
    process: subprocess.Popen[bytes]

    def call(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command that Docker runs beside it: its health check, its hook."""
        command, given = self.place.command(words), variables(self.each, self.place)
        return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=False)

    def health(self) -> tuple[int, str]:
        done = self.call(self.each.spec["healthcheck"]["test"][1:])
        return done.returncode, done.stdout + done.stderr


@dataclass
class Composed:
    folder: Path
    redis: PrivateRedis
    running: dict[str, Running] = field(default_factory=dict)

    def start(self, name: str, address: str = "127.0.0.1") -> Running:
        each = service(name)
        python = environment(self.folder / name / "opt", EXTRAS[each.target])
        place = placed(self.folder / name, each, SECRETS, str(python))
        config = Path(place.here("/etc/tandem/config/cluster.toml"))
        config.write_text(self._moved(config.read_text()))
        words = [f"--host={address}" if word.startswith("--host=") else word for word in each.command]
        words = ["--cpus=1" if word.startswith("--cpus=") else word for word in words]
        with (place.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                place.command(words), env=variables(each, place), stdout=log, stderr=log, cwd=place.folder
            )
        self.running[name] = Running(each, place, process)
        return self.running[name]

    def _moved(self, text: str) -> str:
        """The configuration for this machine: no GPU, a Redis elsewhere, free ports."""
        text = text.replace('device = "cuda"', 'device = "cpu"\nengine = "sim"').replace("8589934592", "67108864")
        text = text.replace("redis:6379", f"127.0.0.1:{self.redis.port}").replace('"0.0.0.0"', '"127.0.0.1"')
        for port in (8000, 8001, 8002):
            text = text.replace(f"port = {port}\n", "port = 0\n")
        return text

    def logs(self) -> str:
        return "\n".join(f"==> {name}\n{(one.place.folder / 'log').read_text()}" for name, one in self.running.items())


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    with PrivateRedis.start(tmp_path / "redis", SECRETS["redis-password"]) as redis:
        found = Composed(tmp_path, redis)
        try:
            yield found
        finally:
            for one in found.running.values():
                one.process.kill()
                one.process.wait(30)


def test_the_services_are_healthy_when_they_serve_and_end_in_time(composed: Composed) -> None:
    router = composed.start("router")
    ready = Path(router.place.here("/run/tandem/router/router.ready.json"))
    assert router.health()[0] == 1
    wait_for(ready.exists, 60, composed.logs())
    status, said = router.health()
    assert (status, said.startswith("503")) == (1, True), "it listens, and there is nobody who computes"
    low = os.getpid() % 60_000
    prefill = composed.start("prefill", f"127.20.{1 + low // 250}.{1 + low % 250}")
    decode = composed.start("decode", f"127.21.{1 + low // 250}.{1 + low % 250}")
    wait_for(lambda: prefill.health()[0] == decode.health()[0] == 0, 60, composed.logs())
    wait_for(lambda: router.health() == (0, "ready\n"), 60, composed.logs())

    addresses = json.loads(ready.read_bytes())
    made = clusterctl(composed, ["key", "create", "--tenant", "me", "--endpoint", addresses["admin"], "-o", "json"])
    assert made.returncode == 0, made.stderr
    body = {"model": "tandem-tiny", "prompt": "One two three", "max_tokens": 8, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {json.loads(made.stdout)['key']}"}
    request = urllib.request.Request(f"{addresses['http']}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 8

    hook = decode.call(decode.each.hook)
    assert (hook.returncode, "drained" in hook.stderr) == (0, True), hook.stderr
    for one in (decode, prefill, router):
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(seconds(one.each.spec["stop_grace_period"])) == 0, composed.logs()
    status, said = decode.health()
    assert (status, "does not answer" in said) == (1, True)


def clusterctl(composed: Composed, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run it as `docker compose run --rm clusterctl …`; the key's file is where it is mounted."""
    place = placed(composed.folder / "clusterctl", service("clusterctl"), SECRETS)
    key = place.here("/etc/tandem/secrets/admin-key")
    python = environment(place.folder / "opt", EXTRAS["clusterctl"])
    command = [str(python), "-m", "tandem.clusterctl", *words, "--admin-key-file", key]
    given = variables(service("clusterctl"), place)
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=False)


def test_a_folder_in_which_nothing_runs_is_not_ready(tmp_path: Path) -> None:
    words = service("router").spec["healthcheck"]["test"][2:5]
    done = subprocess.run(
        [sys.executable, *words[:2], "--folder", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, f"nothing runs yet in {tmp_path}\n")
