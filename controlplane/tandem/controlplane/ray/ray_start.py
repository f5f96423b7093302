"""One machine's part of a Ray cluster, kept running: a head, or a node that joined one. Every process of it is ours.

`python -m tandem.controlplane.ray.ray_start --config FILE` for a head; its launcher reads JSON
lines: {"started": address} and {"trouble": text}; `clusterctl join` runs the same in its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.controlplane.environment import Environment
from tandem.controlplane.ray.end_processes import adopt_descendants, descendants, end_descendants, reap
from tandem.controlplane.ray.messages import ANY_HARDWARE, HARDWARE_LABEL, say
from tandem.controlplane.ray.ray_env import ray_variables
from tandem.controlplane.ray.scratch_dir import OF_AGENT, OF_RAY, OwnedFolder, sweep
from tandem.core import config_loader
from tandem.core.parent_death_signal import tied

STARTED = "Ray runtime started"
_STOP_S = 10.0
_LOOK_S = 0.2
_AGAIN_S = 1.0
_SWEEP_S = 5.0
_LAST_ADDRESS = "ray_current_cluster"
"""Where Ray keeps the address that it started at last."""
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""The least that Ray takes: no data of ours goes through it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """`address` "" = a head, which listens on `port`. `host` "" = the address that Ray finds.

    `redis_address`, as host:port, and `redis_password`: the store of a head's state, to survive its own death.
    """

    address: str = ""
    host: str = ""
    port: int = 0
    cpus: int = 1
    gpus: int = 0
    hardware: str = ANY_HARDWARE
    token_file: str = ""
    redis_address: str = ""
    redis_password: str = ""
    cluster: str = ""
    state_root: str = ""

    @property
    def is_head(self) -> bool:
        return not self.address


class RayNodeProcess:
    """Keeps `ray start` running until stopped. Use it from the main thread, the only one that starts children."""

    def __init__(
        self, config: NodeConfig, *, on_start: Callable[[str], None], on_trouble: Callable[[str], None]
    ) -> None:
        self._config, self._on_start, self._on_trouble = config, on_start, on_trouble
        self._is_stopping = threading.Event()
        self._swept_s = 0.0

    def stop(self) -> None:
        """Ask `run` to end; safe in a signal handler."""
        self._is_stopping.set()

    def run(self) -> bool:
        """Start it, and again whenever it ends, until `stop`. False if it never started; then trouble was reported.

        On the way out every process that descends from this one is ended.
        """
        adopt_descendants()
        self._sweep()
        has_started = False
        others = descendants()
        with OwnedFolder(OF_RAY) as folder:
            try:
                while not self._is_stopping.is_set():
                    started, why = self._run_once(folder)
                    has_started = has_started or started
                    end_descendants(except_for=others)
                    if self._is_stopping.is_set():
                        break
                    self._on_trouble(why)
                    if not has_started:
                        return False
                    self._is_stopping.wait(_AGAIN_S)
            finally:
                end_descendants(except_for=others)
                self._sweep()
        return True

    def _run_once(self, folder: Path) -> tuple[bool, str]:
        """Run `ray start` once; return True if it started, and why it ended."""
        # A head would take another node of its cluster on this machine for itself, still running.
        (folder / _LAST_ADDRESS).unlink(missing_ok=True)
        process = subprocess.Popen(
            tied([sys.executable, "-m", "ray.scripts.scripts", *self._arguments(folder)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._variables(),
            process_group=0,  # Ctrl-C is for us
        )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        started, address, said = False, self._config.host, [""]
        try:
            while process.poll() is None and not self._is_stopping.is_set():
                for line in _taken(lines):
                    said = [*said[-20:], line] if line else said
                    if "Local node IP:" in line:
                        address = line.rpartition("Local node IP:")[2].strip()
                    if STARTED in line and not started:
                        started = True
                        self._on_start(address)
                reap({process.pid})
                if time.monotonic() - self._swept_s >= _SWEEP_S:
                    self._sweep()
        finally:
            _end(process)
        said += [line for line in _taken(lines, wait_s=0.0) if line]
        return started, _cause(said, process.returncode)

    def _sweep(self) -> None:
        """Remove folders of killed processes, agents among them: there may be no later process to do it."""
        sweep(OF_RAY)
        sweep(OF_AGENT, Environment.read().socket_root)
        self._swept_s = time.monotonic()

    def _arguments(self, folder: Path) -> list[str]:
        config = self._config
        arguments = [
            "start",
            "--block",
            "--disable-usage-stats",
            f"--num-cpus={config.cpus}",
            f"--num-gpus={config.gpus}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            f"--labels={HARDWARE_LABEL}={config.hardware}",
            f"--temp-dir={folder}",
            "--include-log-monitor=false",
        ]
        if config.host:
            arguments.append(f"--node-ip-address={config.host}")
        if not config.is_head:
            return [*arguments, f"--address={config.address}"]
        arguments += ["--head", f"--port={config.port}", "--include-dashboard=false"]
        if config.redis_address:
            arguments.append(f"--redis-password={config.redis_password}")
        return arguments

    def _variables(self) -> dict[str, str]:
        config = self._config
        variables = ray_variables(os.environ, config.token_file)
        if config.state_root:
            variables["TANDEM_STATE_DIR"] = config.state_root
        if config.redis_address:
            variables["RAY_REDIS_ADDRESS"] = config.redis_address
            variables["RAY_external_storage_namespace"] = f"tandem-{config.cluster}"
        return variables


@contextlib.contextmanager
def told_by_signals(node: RayNodeProcess) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP stop `node`."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: node.stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    with process.stdout as pipe:
        for line in pipe:
            lines.put(line.decode(errors="replace").strip())


def _taken(lines: queue.SimpleQueue[str], *, wait_s: float = _LOOK_S) -> list[str]:
    """Return all lines that are there; waits for the first."""
    taken = []
    with contextlib.suppress(queue.Empty):
        taken.append(lines.get(timeout=wait_s) if wait_s else lines.get_nowait())
        while True:
            taken.append(lines.get_nowait())
    return taken


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _cause(said: list[str], code: int | None) -> str:
    """Return why it ended, from its output: the line that names an error, else the last one."""
    named = [line for line in said if "Error" in line or "error" in line]
    line = (named or said)[-1]
    return f"Ray ended with code {code}: {line[:400]}" if line else f"Ray ended with code {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, type=Path)
    config = config_loader.load(parser.parse_args().config, NodeConfig)
    node = RayNodeProcess(
        config,
        on_start=lambda address: say({"started": f"{address}:{config.port}"}),
        on_trouble=lambda text: say({"trouble": text}),
    )
    with told_by_signals(node):
        return 0 if node.run() else 1


if __name__ == "__main__":
    sys.exit(main())
