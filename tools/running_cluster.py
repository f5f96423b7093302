"""A whole cluster as a user starts it: `clusterctl up` in a process of its own, in a state directory of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.waiting import wait_for

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
"""Timeout of immediate answers, where many other processes use the cores, too."""


@dataclass(slots=True)
class Cluster:
    """A running cluster and where it listens."""

    process: subprocess.Popen[bytes]
    folder: Path
    context: dict[str, Any]

    @property
    def api(self) -> str:
        return str(self.context["api"])

    @property
    def output(self) -> str:
        """Output of `up` so far."""
        return (self.folder / "up.out").read_text(errors="replace")

    def logs(self) -> str:
        """Ends of all logs, for failures."""
        files = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"==> {f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in files)

    def status(self) -> dict[str, Any]:
        """Return the status from the admin port."""
        return self.admin("/admin/v1/status")

    def admin(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """JSON of a GET from the admin port, or of a POST if there is a body."""
        key = Path(self.context["admin_key_file"]).read_text().strip()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.context['admin']}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
            return dict(json.load(response))

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """(HTTP status, JSON) of a POST to the API."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.api}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def complete(self, prompt: str | list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """Return the answer to a completion, greedy by default, which has to come with status 200."""
        body = {"model": "tandem-tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    def clusterctl(self, *words: str, timeout_s: float = 300.0, by_endpoint: bool = False) -> tuple[int, str, str]:
        """Run a command on this cluster, found by its state directory or its admin port.

        Return exit code, standard output and standard error.
        """
        command = [sys.executable, "-m", "tandem.clusterctl", *words]
        if by_endpoint:
            command += ["--endpoint", self.context["admin"], "--admin-key-file", self.context["admin_key_file"]]
        else:
            command += ["--state-dir", str(self.folder)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
        return done.returncode, done.stdout, done.stderr

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"{self.api}{path}", timeout=ANSWER_TIMEOUT_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def scrape(self) -> str:
        """Metrics from the admin port: of all processes of a router."""
        with urllib.request.urlopen(f"{self.context['admin']}/metrics", timeout=ANSWER_TIMEOUT_S) as response:
            return str(response.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples on /metrics that carry these labels."""
        total = 0.0
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def pids(self) -> dict[str, list[int]]:
        """Worker id → host pid and rank pids, of those that are connected."""
        return {w["worker"]: [w["pid"], *w["rank_pids"]] for w in self.status()["workers"] if "pid" in w}


def is_free(cluster: Cluster, workers: int = 0) -> bool:
    """True if nothing is in flight at the router, no worker has a request or holds a block, and at least `workers`
    workers report so."""
    if cluster.status()["router"]["in_flight"]:
        return False
    audit = cluster.admin("/admin/v1/kv/audit")
    if len(audit["workers"]) < workers:
        return False
    return not (audit["unanswered"] or audit["holds"] or any(worker["requests"] for worker in audit["workers"]))


@contextlib.contextmanager
def running(*flags: str, folder: Path | None = None, config: str = "") -> Iterator[Cluster]:
    """`clusterctl up` with these flags and this TOML, ready to serve; nothing may be left after its stop.

    State is kept in `folder`, to be found again by another cluster there, or thrown away.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="td-e2e-")))
        with started(*flags, folder=folder, config=config) as cluster:
            yield cluster
            stop(cluster)


@contextlib.contextmanager
def started(
    *flags: str, folder: Path, config: str = "", prefix: Sequence[str] = (), python: str = sys.executable
) -> Iterator[Cluster]:
    """As `running`, for callers that stop it: what still runs at the end is killed. `prefix`: words before the command,
    to run it elsewhere; `python`: the interpreter with its Tandem."""
    if config:
        (folder / "cluster.toml").write_text(config)
        flags = ("--config", str(folder / "cluster.toml"), *flags)
    for stale in folder.glob("*/context.json"):  # of a cluster that was killed here
        stale.unlink()
    command = [*prefix, python, "-m", "tandem.clusterctl", "up", "--port", "0", "--grpc-port", "0"]
    command += ["--admin-port", "0", "--state-dir", str(folder), *_kv_memory(flags), *flags]
    variables = {
        **os.environ,
        "TANDEM_MODELS_DIR": f"{os.devnull}/models",
    }  # nothing that was fetched here
    with (folder / "up.out").open("wb") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    cluster = Cluster(process, folder, {})
    try:
        cluster.context = _await_context(cluster)
        try:
            wait_for(lambda: _ready(cluster), START_TIMEOUT_S, "the cluster is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{cluster.output[-2000:]}\n{cluster.logs()}") from None
        yield cluster
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _kv_memory(flags: Sequence[str]) -> tuple[str, ...]:
    """Size for a cluster that names none: an automatic one grows with the machine, and every start would fill it."""
    configs = [Path(flags[at + 1]) for at, flag in enumerate(flags[:-1]) if flag == "--config"]
    is_named = any("kv_memory" in config.read_text() for config in configs if config.is_file())
    return () if is_named else ("--kv-memory", "256MiB")


def stop(cluster: Cluster, number: int = signal.SIGTERM) -> None:
    """Stop it as Ctrl-C or a supervisor would, and check that no process is left."""
    pids = [pid for worker in cluster.pids().values() for pid in worker]
    cluster.process.send_signal(number)
    assert cluster.process.wait(STOP_TIMEOUT_S) == 0, cluster.output + cluster.logs()
    for pid in pids:
        wait_for(functools.partial(_is_gone, pid), what=f"process {pid} is gone")


def _is_gone(pid: int) -> bool:
    return not is_alive(pid)


def is_alive(pid: int) -> bool:
    """True if a process exists and is no zombie. A zombie with other threads that still end has its sockets open."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    threads = re.search(r"^Threads:\s+(\d+)", text, re.MULTILINE)
    return "\nState:\tZ" not in text or (threads is not None and int(threads[1]) > 1)


def _await_context(cluster: Cluster) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        if cluster.process.poll() is not None:
            raise AssertionError(f"up ended with {cluster.process.returncode}:\n{cluster.output}\n{cluster.logs()}")
        files = list(cluster.folder.glob("*/context.json"))
        return dict(json.loads(files[0].read_text())) if files else None

    context: dict[str, Any] = wait_for(found, START_TIMEOUT_S, "up wrote its context")
    return context


def _ready(cluster: Cluster) -> bool:
    if cluster.process.poll() is not None:
        raise AssertionError(f"up ended with {cluster.process.returncode}")
    with contextlib.suppress(OSError):
        return cluster.get("/readyz")[0] == 200
    return False


def kill(pid: int) -> None:
    """Send SIGKILL."""
    os.kill(pid, signal.SIGKILL)
