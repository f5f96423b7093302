"""One real Ray head for all tests that place small programs with it; at the end no process of it may be left."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.controlplane.environment import Environment
from tandem.controlplane.ray.head_process import usable_port
from tandem.controlplane.ray.ray_start import NodeConfig
from tandem.controlplane.state_dir import HeldState, StateDir
from tandem.core import config_loader
from tandem.core.files import write_private
from tools.fake_gpus import FakeGpus
from tools.running_cluster import is_alive
from tools.waiting import wait_for


@dataclass(slots=True)
class Keeper:
    """A `python -m tandem.controlplane.ray.ray_start` process, and every process that was ever seen below it."""

    process: subprocess.Popen[str]
    said: list[dict[str, Any]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said.append(json.loads(line))

    def starts(self) -> list[str]:
        return [message["started"] for message in self.said if "started" in message]

    def look(self) -> set[int]:
        """Processes that descend from it now."""
        now = {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
        self.seen |= now
        return now


@dataclass(frozen=True, slots=True)
class Head:
    """Where a head listens, and the token that it takes."""

    keeper: Keeper
    address: str
    token_file: str
    gpus: FakeGpus


def start_keeper(config: NodeConfig, folder: Path, gpus: FakeGpus) -> Keeper:
    """A keeper with a running Ray; it reports success, or the reason of a failure."""
    path = folder / f"node-{config.port}.json"
    path.write_bytes(config_loader.dump(config))
    command = [sys.executable, "-m", "tandem.controlplane.ray.ray_start", "--config", str(path)]
    with (folder / "node.log").open("ab") as log:
        variables = {**os.environ, "PATH": gpus.path}
        keeper = Keeper(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables))
    threading.Thread(target=keeper.read, daemon=True).start()
    wait_for(lambda: keeper.starts() or keeper.process.poll() is not None, 90, "the head starts, or ends")
    assert keeper.starts(), (keeper.said, (folder / "node.log").read_text())
    return keeper


def stop_keeper(keeper: Keeper) -> None:
    """End it as `up` does; nothing that was ever below it may run afterwards."""
    keeper.look()
    keeper.process.terminate()
    assert keeper.process.wait(timeout=60) == 0
    wait_for(lambda: not [pid for pid in keeper.seen if is_alive(pid)], what="nothing of it runs")


def token_file(folder: Path) -> str:
    path = folder / "ray.token"
    write_private(path, b"f" * 64)
    return str(path)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head with 4 CPUs and two GPUs declared to Ray, on a machine with a fake `nvidia-smi`."""
    folder = tmp_path_factory.mktemp("head")
    token = token_file(folder)
    config = NodeConfig(
        port=usable_port(0), cpus=4, gpus=2, hardware="small", token_file=token, state_root=str(folder / "state")
    )
    gpus = FakeGpus(folder / "bin")
    keeper = start_keeper(config, folder, gpus)
    try:
        yield Head(keeper, keeper.starts()[0], token, gpus)
        stop_keeper(keeper)
    finally:
        keeper.process.kill()
        keeper.process.wait()


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(state_root=tmp_path / "state", socket_root=Path("/tmp"), cores=2, variables=dict(os.environ))


@pytest.fixture
def held(environment: Environment) -> Iterator[HeldState]:
    with StateDir(environment.state_root, "test").hold() as held:
        held.draw_secrets()
        yield held
