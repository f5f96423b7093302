"""Runs one worker inside an agent: in the agent's own process group, from a thread that lives as long as the agent.

Knows nothing of Ray. The worker's reports are kept, so that a later listener gets all of them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from tandem.controlplane import gpu_free_check
from tandem.controlplane.child_process import end_reason
from tandem.controlplane.environment import Environment
from tandem.controlplane.model_catalog import BUNDLED, bundled_model, fetched_file
from tandem.controlplane.ray.end_processes import end_group
from tandem.controlplane.ray.messages import Order, PlacedOrder
from tandem.controlplane.ray.ray_env import without_ray
from tandem.controlplane.ray.scratch_dir import OF_AGENT, OwnedFolder, sweep
from tandem.controlplane.state_dir import StateDir
from tandem.core import config_loader
from tandem.core.errors import ModelError, StartupError
from tandem.core.files import write_private
from tandem.core.parent_death_signal import tied

log = logging.getLogger(__name__)

_MAX_LINE_BYTES = 256 * 1024
_LATE_OUTPUT_S = 1.0
ORPHAN_GRACE_S = 10.0


class RayWorkerRunner:
    """One worker, once. `begin` it, `listen` to it, `stop` it, from any thread.

    A worker without a listener for `orphan_s` by the clock `now_s` has lost its controller for good, and is
    ended.
    """

    def __init__(self, *, ip: str, orphan_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._ip, self._orphan_s, self._now_s = ip, orphan_s, now_s
        self._changed = threading.Condition()
        self._reports: list[str] = []
        self._charge: PlacedOrder | None = None
        self._secret = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = self._has_ended = False
        self._heard_s = now_s()
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # the worker's group must be ours alone
        # The kernel ends the worker with the thread that started it; threads of calls come and go.
        self._life = threading.Thread(target=self._live, name="worker's life", daemon=True)
        self._life.start()

    @property
    def order(self) -> Order | None:
        """Return its order; None before it has one, and when the worker has ended."""
        with self._changed:
            return self._charge.order if self._charge is not None and not self._has_ended else None

    def begin(self, charge: PlacedOrder, secret: bytes) -> None:
        """Start the worker; a second call changes nothing."""
        with self._changed:
            if self._charge is None:
                self._charge, self._secret = charge, secret
                self._changed.notify_all()

    def listen(self, after: int, wait_s: float) -> list[str]:
        """Return reports from number `after` on, as JSON lines; waits up to `wait_s` for the first of them.

        {"progress": …}, {"ready": …}, and at last {"exited": reason}, when all its processes are gone. With
        "is_unplaced": true it never began, for lack of resources.
        """
        with self._changed:
            self._heard_s = self._now_s()
            self._changed.wait_for(lambda: len(self._reports) > after, timeout=wait_s)
            self._heard_s = self._now_s()
            return self._reports[after:]

    def stop(self, grace_s: float) -> None:
        """Ask it to end, after `grace_s` kill it, and return when it has been reported as gone. May be repeated."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
            process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
        with self._changed:
            if self._changed.wait_for(lambda: self._has_ended, timeout=grace_s):
                return
        self._kill()
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, timeout=_LATE_OUTPUT_S + 5.0)

    def wait(self) -> None:
        """Wait until the worker's life is over."""
        self._life.join()

    def await_silence(self, seconds: float) -> None:
        """Wait until there was no listener for `seconds`."""
        while (left_s := self._heard_s + seconds - self._now_s()) > 0:
            time.sleep(left_s)

    # ---- the life --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        with self._changed:
            while self._charge is None and not self._is_stopping and not self._is_orphan():
                self._changed.wait(timeout=1.0)
            charge = self._charge
        reason, is_unplaced = "it was stopped before it began", False
        if charge is not None:
            try:
                reason = self._run(charge)
            except StartupError as error:
                reason = error.message
            except gpu_free_check.HeldGpuError as error:
                reason, is_unplaced = str(error), True
            except OSError as error:
                reason = f"it could not be started on {self._ip}: {error}"
        end_group()
        with self._changed:
            self._has_ended = True
            self._reports.append(json.dumps({"exited": reason, **({"is_unplaced": True} if is_unplaced else {})}))
            self._changed.notify_all()

    def _run(self, charge: PlacedOrder) -> str:
        """Run the worker from its start to its end; return why it ended."""
        self._check(charge)
        self._await_gpus(charge)
        environment = Environment.read(without_ray(os.environ))
        sweep(OF_AGENT, environment.socket_root)
        with OwnedFolder(OF_AGENT, environment.socket_root) as folder:
            log_file = self._log_file(environment, charge)
            command = [sys.executable, *charge.order.arguments, "--config", str(self._write(folder, charge))]
            variables = environment.for_child(threads=charge.order.threads)
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(charge.gpus)
            with log_file.open("ab") as output:
                start = output.tell()
                self._start(command, variables, output.fileno())
            return self._follow(log_file, start)

    def _start(self, command: list[str], variables: dict[str, str], output: int) -> None:
        # Ray blocks signals in its processes, and a child inherits that.
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            with self._changed:
                if self._is_stopping:
                    raise StartupError("it was stopped before it began")
                self._process = subprocess.Popen(
                    tied(command),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=variables,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _follow(self, log_file: Path, log_start: int) -> str:
        assert self._process is not None
        said: list[str] = []
        reader = threading.Thread(target=self._read, args=(log_file, said), name="worker's output", daemon=True)
        reader.start()
        while True:
            try:
                code = self._process.wait(timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                if self._is_orphan():
                    log.warning("no controller has listened for %g s: the worker ends", self._orphan_s)
                    threading.Thread(target=self.stop, args=(ORPHAN_GRACE_S,), daemon=True).start()
        end_group()
        reader.join(_LATE_OUTPUT_S)
        return said[0] if said else end_reason(code, log_file, log_start, f" on {self._ip}")

    def _read(self, log_file: Path, said: list[str]) -> None:
        """Keep its reports; `said` gets the reason why it cannot go on, if it reports one."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            while line := pipe.readline(_MAX_LINE_BYTES):
                with log_file.open("ab") as output:
                    output.write(line)
                try:
                    message = json.loads(line) if line.startswith(b"{") else {}
                except ValueError:
                    continue
                if fatal := " ".join(str(message.get("fatal", "")).split()):
                    said.append(fatal)
                for kind in ("progress", "ready"):
                    if kind in message:
                        self._report({kind: message[kind]})

    def _report(self, report: dict[str, object]) -> None:
        with self._changed:
            self._reports.append(json.dumps(report))
            self._changed.notify_all()

    def _is_orphan(self) -> bool:
        return self._now_s() - self._heard_s > self._orphan_s

    def _kill(self) -> None:
        with self._changed:
            process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    # ---- its place -------------------------------------------------------------------------------------------------

    def _check(self, charge: PlacedOrder) -> None:
        """Raise StartupError for resources that this machine lacks; the worker's log would not name them."""
        host = urlsplit(charge.order.config.redis_url).hostname or ""
        is_elsewhere = charge.controller_ip not in ("", self._ip)
        if is_elsewhere and (host in ("", "localhost", "::1") or host.startswith("127.")):
            raise StartupError(
                f"{self._ip} cannot reach the cluster's Redis",
                why=f"it listens on {host or 'a socket'} of {charge.controller_ip} alone",
                todo="Start the cluster with --redis URL, which all machines reach",
            )

    def _model_dir(self, charge: PlacedOrder) -> Path:
        path = Path(charge.order.config.model_dir)
        if path.exists():
            return path
        if path.name == BUNDLED:
            try:
                return bundled_model()
            except ModelError:
                pass
        if fetched := fetched_file(path.name, Environment.read().models_root):
            return fetched
        raise StartupError(
            f"the model is not on {self._ip}",
            why=f"there is no {path}",
            todo="Put it there, or use a path that all machines share",
        )

    def _await_gpus(self, charge: PlacedOrder) -> None:
        """Return once the GPUs are free, or it is to stop: memory of an earlier worker takes a moment to be freed.
        HeldGpuError where another process goes on holding them."""
        patience = gpu_free_check.GpuMemoryWait(charge.gpu_wait_s, where=f"on {self._ip}")
        while charge.gpus and (holds := gpu_free_check.occupied(charge.gpus)):
            if news := patience.note(holds):
                self._report({"progress": news})
            with self._changed:
                if self._changed.wait_for(lambda: self._is_stopping, timeout=gpu_free_check.LOOK_EVERY_S):
                    return

    def _write(self, folder: Path, charge: PlacedOrder) -> Path:
        """Write the worker's configuration and secret, both of mode 0600, in a folder of mode 0700."""
        secret, config = folder / "secret", folder / "worker.json"
        write_private(secret, self._secret)
        ours = dataclasses.replace(
            charge.order.config,
            host=self._ip,
            runtime_dir=str(folder),
            secret_file=str(secret),
            model_dir=str(self._model_dir(charge)),
        )
        write_private(config, config_loader.dump(ours))
        return config

    def _log_file(self, environment: Environment, charge: PlacedOrder) -> Path:
        state = StateDir(environment.state_root, charge.order.config.cluster)
        state.log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        return state.log_file(charge.order.config.worker_id)
