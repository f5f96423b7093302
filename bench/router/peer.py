"""sglang-router from PyPI, on the same core, before workers that answer over HTTP as ours answer over gRPC."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.report import ROOT
from bench.router.house import READY_S, cpu_s_of, ended, router_cores
from tools.waiting import wait_for

RELEASE = "sglang-router==0.3.2"
_HOME = ROOT / "build" / "sglang-router"


@dataclass(slots=True)
class Peer:
    """A running sglang-router, round robin, with scripted workers behind it."""

    port: int
    router_pid: int
    step_ms: float

    def router_cpu_s(self) -> float:
        """Processor seconds so far, all threads."""
        return cpu_s_of(self.router_pid)


def install() -> Path:
    """The Python of an environment of its own in `build/`, made if it is not there; SystemExit if it cannot be."""
    python = _HOME / "bin" / "python"
    if not (_HOME / ".installed").is_file():
        print(f"installing {RELEASE} into {_HOME.relative_to(ROOT)}", flush=True)
        for command in (
            [sys.executable, "-m", "venv", str(_HOME)],
            [str(python), "-m", "pip", "install", "-q", RELEASE],
        ):
            if subprocess.run(command, check=False).returncode:
                raise SystemExit(f"{RELEASE} could not be installed; without it: ARGS='--no-peer'")
        (_HOME / ".installed").touch()
    return python


@contextmanager
def peer_running(workers: int, step_ms: float) -> Iterator[Peer]:
    """Start it on the core that routers have, and its workers on the other; everything ends with the block."""
    python, (router_core, other) = install(), router_cores()
    with ExitStack() as stack:
        scripted = stack.enter_context(ended(subprocess.Popen(
            [sys.executable, "-m", "bench.router.http_workers", "--workers", str(workers), "--step-ms", str(step_ms)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, other),
        )))  # fmt: skip
        ports = json.loads(scripted.stdout.readline())
        port, metrics = _free_port(), _free_port()
        command = [
            str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
            "--policy", "round_robin", "--prometheus-port", str(metrics), "--log-level", "error",
            "--worker-urls", *(f"http://127.0.0.1:{one}" for one in ports),
        ]  # fmt: skip
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        with open(folder / "log", "wb") as log:
            router = stack.enter_context(ended(subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, router_core)
            )))  # fmt: skip
        _wait_answers(port, router, folder / "log")
        yield Peer(port, router.pid, step_ms)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _wait_answers(port: int, router: subprocess.Popen[bytes], log: Path) -> None:
    body = json.dumps({"model": "tandem-tiny", "prompt": "a", "max_tokens": 2, "stream": True}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"content-type": "application/json"}

    def answers() -> bool:
        if router.poll() is not None:
            raise SystemExit(f"sglang-router ended:\n{log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:
                return b"[DONE]" in answer.read()
        except (urllib.error.URLError, ConnectionError):
            return False

    wait_for(answers, READY_S, "sglang-router answers")
