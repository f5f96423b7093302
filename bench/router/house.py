"""A real router on one core, and everything else (Redis, scripted workers, this process) on another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import ROOT
from tandem.core import config_loader
from tandem.core.config import Disaggregation, RouterConfig, RouterSection, ServedModel
from tandem.core.secret import ClusterSecret
from tandem.statestore.embedded_redis import PrivateRedis

MODEL = ROOT / "models" / "tandem-tiny"
CONTEXT_TOKENS = 32_768
CLUSTER = "bench"
READY_S = 120.0
SETTLE_S = 0.5
_CORES = sorted(os.sched_getaffinity(0))
"""Cores before this process was pinned to one."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a thread was ready to run and waited for its core, in nanoseconds, and how often it ran."""

    waited_ns: int
    times: int

    @classmethod
    def of(cls, pid: int) -> Waits:
        """The waits so far of a process' main thread."""
        _, waited_ns, times = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
        return cls(int(waited_ns), int(times))

    def mean_ms(self, before: Waits) -> float:
        """Each time since then."""
        return (self.waited_ns - before.waited_ns) / max(1, self.times - before.times) / 1e6


@dataclass(slots=True)
class RouterBench:
    """A running router with `workers` scripted workers behind it."""

    port: int
    router_pid: int
    workers: int
    step_ms: float
    _scripted: subprocess.Popen[str]

    def report(self) -> dict[str, Any]:
        """Notes of the workers since the last report."""
        assert self._scripted.stdin is not None
        assert self._scripted.stdout is not None
        self._scripted.stdin.write("report\n")
        self._scripted.stdin.flush()
        told: dict[str, Any] = json.loads(self._scripted.stdout.readline())
        return told

    def settle(self) -> None:
        """Return when the router has tried its new workers, and has nothing more to do."""
        ends_s = time.monotonic() + READY_S
        while time.monotonic() < ends_s:
            before_s = self.router_cpu_s()
            time.sleep(SETTLE_S)
            if self.router_cpu_s() - before_s < 0.2 * SETTLE_S:
                return
        raise SystemExit("the router does not come to rest")

    def router_cpu_s(self) -> float:
        """Processor seconds of the router so far, all threads."""
        return cpu_s_of(self.router_pid)

    def waits(self) -> tuple[Waits, Waits]:
        """Waits of the router's main thread, and of the process that plays the workers."""
        return Waits.of(self.router_pid), Waits.of(self._scripted.pid)


def cpu_s_of(pid: int) -> float:
    """Processor seconds of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def router_cores() -> tuple[set[int], set[int]]:
    """The core of a router, and that of all else."""
    return {_CORES[0]}, {_CORES[-1]}


@contextmanager
def running(workers: int, step_ms: float) -> Iterator[RouterBench]:
    """Start everything, wait until the router is ready; everything ends with the block."""
    before, (router_core, other) = os.sched_getaffinity(0), router_cores()
    os.sched_setaffinity(0, other)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, before)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        ClusterSecret.generate().save(folder / "secret")
        (folder / "key").write_text("k" * 32)
        redis = stack.enter_context(PrivateRedis.start(folder / "redis", "a secret"))
        model = ServedModel(name="tandem-tiny", model_dir=str(_model(folder)), served_names=("tandem-tiny",))
        settings = RouterSection(port=0, disaggregation=Disaggregation.ALWAYS)
        config = RouterConfig(
            cluster=CLUSTER, router_id="router", models=(model,),
            redis_url=redis.url, secret_file=str(folder / "secret"),
            admin_key_file=str(folder / "key"), ready_file=str(folder / "ready"), settings=settings,
        )  # fmt: skip
        (folder / "config.json").write_bytes(config_loader.dump(config))
        scripted = _scripted(stack, workers, step_ms, redis.url, folder / "secret")
        with open(folder / "router.log", "wb") as log:
            router = stack.enter_context(
                ended(subprocess.Popen(
                    [sys.executable, "-m", "tandem.router", "--config", str(folder / "config.json")],
                    stdout=log, stderr=log, cwd=ROOT, preexec_fn=lambda: os.sched_setaffinity(0, router_core),
                ))
            )  # fmt: skip
        url = _address(folder, router)
        _wait_ready(url)
        port = int(url.rsplit(":", 1)[1])
        house = RouterBench(port=port, router_pid=router.pid, workers=workers, step_ms=step_ms, _scripted=scripted)
        house.settle()
        yield house


def _model(folder: Path) -> Path:
    """Files that a router reads of the bundled model, with a longer context: no part computes anything here."""
    copy = folder / "model"
    copy.mkdir()
    for path in MODEL.iterdir():
        if path.suffix in (".json", ".jinja"):
            (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((MODEL / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_TOKENS}))
    return copy


def _scripted(stack: ExitStack, workers: int, step_ms: float, redis: str, secret: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "bench.router.workers", "--workers", str(workers), "--step-ms", str(step_ms),
        "--redis", redis, "--cluster", CLUSTER, "--secret", str(secret),
    ]  # fmt: skip
    return stack.enter_context(
        ended(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    )


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[Any]:
    """End the process after the block, in any case."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(folder: Path, router: subprocess.Popen[bytes]) -> str:
    ends_s = time.monotonic() + READY_S
    while not (folder / "ready").is_file():
        if router.poll() is not None or time.monotonic() > ends_s:
            raise SystemExit(f"the router did not start:\n{(folder / 'router.log').read_text()}")
        time.sleep(0.05)
    return str(json.loads((folder / "ready").read_text())["http"])


def _wait_ready(url: str) -> None:
    ends_s = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=30):
                return
        except urllib.error.HTTPError as error:
            if time.monotonic() > ends_s:
                raise SystemExit(f"the router is not ready: {error.read().decode()[:2000]}") from error
        time.sleep(0.1)
