"""The chart's Redis starts with its own scripts, keeps its writes, and takes any password."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from tandem.statestore.embedded_redis import find_server
from tests.integration.deploy.rendering import CHART, Helm, Release
from tools.waiting import wait_for

PASSWORDS = ["plain-password-0123456789", " a 'b' \"c\" \\d $e `f` #g; ü\t% "]


class Scripts:
    """The files of the chart's Redis for this machine: paths below `folder`, and a free port."""

    def __init__(self, release: Release, folder: Path, password: str | None) -> None:
        self.folder, self._texts = folder, release.config("-redis-config")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        for path in ("etc/tandem/redis", "etc/tandem/secrets", "run/redis", "data", "bin"):
            (folder / path).mkdir(parents=True)
        for name, text in self._texts.items():
            (folder / "etc/tandem/redis" / name).write_text(self._here(text))
        server = find_server()
        (folder / "bin/redis-server").symlink_to(server)
        (folder / "bin/redis-cli").symlink_to(server.with_name(server.name.replace("server", "cli")))
        if password is not None:
            (folder / "etc/tandem/secrets/redis-password").write_text(password + "\n")

    def run(self, name: str) -> list[str]:
        return ["sh", str(self.folder / "etc/tandem/redis" / name)]

    @property
    def variables(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def _here(self, text: str) -> str:
        for path in ("/etc/tandem/", "/run/redis", "/data"):
            text = text.replace(path, f"{self.folder}{path}")
        return text.replace("6379", str(self.port)).replace("bind * -::*", "bind 127.0.0.1")


@contextmanager
def serving(scripts: Scripts) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(scripts.run("start.sh"), env=scripts.variables, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: is_ready(scripts))
        yield process
    finally:
        process.terminate()
        process.wait(30)


def is_ready(scripts: Scripts) -> bool:
    """Return the answer to the probes."""
    return (
        subprocess.run(scripts.run("ask.sh"), env=scripts.variables, capture_output=True, check=False).returncode == 0
    )


def client(port: int, password: str | None) -> Any:
    return redis.Redis(port=port, password=password)


@pytest.mark.parametrize("password", PASSWORDS)
def test_it_takes_its_password_and_no_other(helm: Helm, tmp_path: Path, password: str) -> None:
    scripts = Scripts(helm.render((CHART / "ci" / "minimal.yaml").read_text()), tmp_path, password)
    with serving(scripts) as process:
        with client(scripts.port, password) as ours:
            assert ours.set("kept", "yes")
            assert ours.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert ours.config_get("appendonly") == {"appendonly": "yes"}
        with client(scripts.port, "wrong") as theirs, pytest.raises(redis.AuthenticationError):
            theirs.ping()
        with client(scripts.port, None) as theirs, pytest.raises(redis.AuthenticationError):
            theirs.ping()
        assert password not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert (tmp_path / "run/redis/redis.conf").stat().st_mode & 0o777 == 0o600
    with serving(scripts), client(scripts.port, password) as ours:
        assert ours.get("kept") == b"yes"


@pytest.mark.parametrize(
    ("limit", "most"),
    [("2Gi", 1395864371), ("1.5Gi", 1046898278), ("1000M", 650_000_000), ("3000000000", 1_950_000_000)],
)
def test_it_refuses_before_its_limit(helm: Helm, limit: str, most: int) -> None:
    """65 % of the container's memory: rewriting the append-only file needs more for a while."""
    values = (CHART / "ci" / "minimal.yaml").read_text()
    more = f"""
redis:
  internal: {{resources: {{requests: {{cpu: 1, memory: 1Gi}}, limits: {{memory: {limit}}}}}}}
"""
    given = yaml.safe_load(values)
    given.setdefault("redis", {}).update(yaml.safe_load(more)["redis"] | given.get("redis", {}))
    release = helm.render(yaml.safe_dump(given))
    assert f"\nmaxmemory {most}\n" in release.config("-redis-config")["redis.conf"]


def test_without_one_it_takes_everybody(helm: Helm, tmp_path: Path) -> None:
    scripts = Scripts(helm.render((CHART / "ci" / "open.yaml").read_text()), tmp_path, None)
    assert not is_ready(scripts), "nobody listens yet"
    with serving(scripts), client(scripts.port, None) as anybody:
        assert anybody.ping()
