"""A cluster over machines that are network namespaces: its Redis, `up`, machines that join and die, leftovers."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from tandem.core.files import write_private
from tandem.core.parent_death_signal import tied
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.statestore.embedded_redis import find_server
from tests.e2e.under_load import roles
from tools.namespaces import Machine
from tools.running_cluster import Cluster, is_alive, started
from tools.waiting import wait_for

PATIENCE_S = 150.0
"""Timeout of a step. Ray gives a machine up after 24 s, agents after 30 s, asks one for 60 s; this machine may be
busy."""
HEAD_CPUS, NODE_CPUS = 2, 4
_PORT, _PASSWORD = 6380, "between-namespaces"
_PROMPT = [(7 * k) % 3000 + 600 for k in range(150)]
_MODEL = Path(__file__).resolve().parents[2] / "models" / "tandem-tiny"
_SETTINGS = """
launcher = "ray"
[redis]
url = "redis://:{password}@{address}:6379/0"
[ray]
host = "{address}"
head_port = {port}
cpus = {cpus}
[router]
disaggregation = "always"
[worker]
engine = "sim"
threads = 1
kv_memory_bytes = 33554432
[worker.sim]
prefill_tokens_per_s = 4000.0
decode_step_s = 0.01
"""
_REDIS = """
bind {address}
port 6379
requirepass {password}
dir {folder}
appendonly yes
save ""
"""
_RAY_FOLDER = re.compile(r"/tmp/tandem-ray-\w+")


class Site:
    """The machine of the head with its Redis, and the folders of Ray that were seen on any machine."""

    def __init__(self, head: Machine, nodes: tuple[Machine, ...]) -> None:
        self.head, self.nodes = head, nodes
        self._config = head.folder / "cluster.toml"
        text = _SETTINGS.format(address=head.address, password=_PASSWORD, port=_PORT, cpus=HEAD_CPUS)
        write_private(self._config, text.encode())
        self._folders: set[str] = set()
        self._dead: set[Machine] = set()

    @contextlib.contextmanager
    def redis(self) -> Iterator[None]:
        """A server that all machines reach, on the head's machine; its data outlive `up`."""
        folder = self.head.folder / "redis"
        folder.mkdir()
        settings = _REDIS.format(address=self.head.address, password=_PASSWORD, folder=folder)
        with self.head.inside(), (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                tied([str(find_server()), "-"]), stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=folder
            )
        assert server.stdin is not None
        with server.stdin as pipe:
            pipe.write(settings.encode())
        self.redis_pid = server.pid
        try:
            wait_for(lambda: b"Ready to accept" in (folder / "log").read_bytes(), what="Redis answers")
            yield
        finally:
            server.kill()
            server.wait()

    @contextlib.contextmanager
    def up(self, prefill: int, decode: int) -> Iterator[Cluster]:
        """`clusterctl up` on the head's machine. To be called inside its network."""
        flags = ("--config", str(self._config), "--model", str(_MODEL))
        counts = ("--prefill", str(prefill), "--decode", str(decode))
        state = self.head.folder / "state"
        with started(*flags, *counts, folder=state, prefix=self.head.command()) as cluster:
            yield cluster

    @contextlib.contextmanager
    def joined(self, machine: Machine) -> Iterator[subprocess.Popen[bytes]]:
        """`clusterctl join` there, with a copy of the token, until the block ends."""
        token = machine.folder / "ray.token"
        write_private(token, (self.head.folder / "state" / "tandem" / "ray.token").read_bytes())
        command = machine.command(
            sys.executable, "-m", "tandem.clusterctl", "join", f"{self.head.address}:{_PORT}",
            "--token-file", str(token), "--cpus", str(NODE_CPUS), "--gpus", "0",
        )  # fmt: skip
        self._dead.discard(machine)
        log = machine.folder / "join.out"
        with log.open("wb") as out:
            process = subprocess.Popen(tied(command), stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        try:
            wait_for(lambda: b"joined" in log.read_bytes() or process.poll() is not None, PATIENCE_S, "it joined")
            said = log.read_text()
            assert f"joined {self.head.address}:{_PORT} as {machine.address}: {NODE_CPUS} CPU" in said, said
            yield process
        finally:
            process.kill()
            process.wait()

    def kill(self, machine: Machine) -> None:
        """It dies at once. What it has on disk stays there until it joins again."""
        self._dead.add(machine)
        machine.kill()

    def look(self) -> None:
        """Remember the folders that Ray uses now."""
        for machine in (self.head, *self.nodes):
            self._folders.update(_RAY_FOLDER.findall(" ".join(machine.processes().values())))

    def left(self) -> list[str]:
        """Leftovers once everything has been stopped: processes, shared memory, folders."""
        found = []
        for machine in (self.head, *self.nodes):
            found += [f"{pid} {words}" for pid, words in machine.processes().items() if pid != self.redis_pid]
            if machine not in self._dead:
                found += [str(path) for part in ("shm", "run") for path in (machine.folder / part).iterdir()]
        return [*found, *(path for path in self._folders if Path(path).exists())]


def homes(cluster: Cluster) -> dict[str, str]:
    """Worker → the address of its machine, of those that are connected and registered."""
    rows = cluster.status()["workers"]
    return {
        row["worker"]: row["address"].rpartition(":")[0]
        for row in rows
        if row["is_registered"] and row["state"] == "ready"
    }


def wait_reached(cluster: Cluster, prefill: int, decode: int) -> dict[str, str]:
    """Until exactly so many workers serve, of the names that the desired state has; their machines."""

    def reached() -> dict[str, str] | None:
        found = homes(cluster)
        members = cluster.admin("/admin/v1/desired")["desired"]["members"]
        is_so = roles(cluster) == Counter(prefill=prefill, decode=decode)
        return found if is_so and set(found) == {member["worker_id"] for member in members} else None

    try:
        return dict(wait_for(reached, PATIENCE_S, f"{prefill}:{decode}"))
    except AssertionError as error:
        state = [
            (row["worker"], row["address"], row.get("role"), row["trouble"]) for row in cluster.status()["workers"]
        ]
        raise AssertionError(f"{error}: {state}\n{cluster.output[-4000:]}\n{cluster.logs()}") from error


def strike_ray(site: Site, name: str) -> None:
    """SIGKILL to the head's processes of that name, on its machine."""
    struck = [pid for pid, words in site.head.processes().items() if name in words]
    assert struck, (name, site.head.processes())
    for pid in struck:
        os.kill(pid, signal.SIGKILL)
    wait_for(functools.partial(_are_gone, struck), PATIENCE_S, f"{name} is gone")


def transports(cluster: Cluster, where: dict[str, str]) -> set[str]:
    """Transports of KV between machines; links that are still being made have none yet."""
    found = set()
    for link in cluster.admin("/admin/v1/net")["links"]:
        here, there = where.get(link["worker"]), where.get(link["peer"])
        if here and there and here != there and link["transport"]:
            found.add(str(link["transport"]))
    return found


def ask_exactly(cluster: Cluster) -> None:
    """Check that an answer is, to the token, the one that arithmetic gives."""
    body = {"model": "tandem-tiny", "prompt": _PROMPT, "max_tokens": 30, "temperature": 0}
    status, answer = cluster.post("/v1/completions", body)
    assert status == 200, answer
    right = expected_tokens(_PROMPT, 30, 4096, eos_token_ids=(1,))
    assert answer["choices"][0]["text"] == Tokenizer.from_file(str(_MODEL / "tokenizer.json")).decode(right)


def check_logs(cluster: Cluster, worker: str, machine: Machine) -> None:
    """Check that `clusterctl logs` shows a worker's log on its machine, and elsewhere names that machine."""
    _, _, error = cluster.clusterctl("logs", worker)
    assert f"on {machine.address}" in error, error
    command = machine.command(sys.executable, "-m", "tandem.clusterctl", "logs", worker)
    there = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert there.returncode == 0, there.stderr
    assert f" {worker} " in there.stdout, there.stdout


def _are_gone(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))
