"""A launcher that has Ray place workers. Ray itself runs in a driver process, which may die: workers do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.controlplane.child_process import ChildProcess, message_in
from tandem.controlplane.environment import Environment
from tandem.controlplane.launcher import LauncherBase, RunningWorker, WorkerExited, WorkerProgress, WorkerSpec
from tandem.controlplane.ray.messages import DriverConfig, Order, from_json
from tandem.controlplane.ray.ray_env import ray_variables
from tandem.controlplane.state_dir import HeldState
from tandem.core.errors import ConfigError, StartupError
from tandem.core.ids import WorkerId
from tandem.core.logs import event

log = logging.getLogger(__name__)

DRIVER_COMMAND = (sys.executable, "-m", "tandem.controlplane.ray.driver")
WORKER_ARGUMENTS = ("-m", "tandem.worker")
_DRIVER = "ray-driver"
_ATTACH_TIMEOUT_S = 60.0
_AGAIN_S = 1.0
_LEAVE_S = 15.0
_CHECK = "Check the address, and the token in --ray-token-file"


def check_installed() -> None:
    """Raise StartupError if Ray is missing."""
    if importlib.util.find_spec("ray") is None:
        raise StartupError(
            "Ray is not installed",
            why="--launcher ray needs it, and Tandem's other extras do not bring it",
            todo="Install it with `pip install 'tandem-serve[ray]'`, on every machine",
        )


@dataclass(slots=True)
class _LaunchedWorker:
    """One worker that was ordered. `heard`: number of its reports so far; `grace_s`: set once it has to end; `node`:
    the address where it got a place, "" = unknown."""

    running: RunningWorker
    path: str
    gone: asyncio.Event
    heard: int = 0
    node: str = ""
    grace_s: float | None = None


class RayLauncher(LauncherBase):
    """A launcher over the Ray cluster at `address`. `async with` it: leaving ends its workers."""

    def __init__(
        self,
        held: HeldState,
        environment: Environment,
        *,
        cluster: str,
        address: str,
        token_file: str,
        place_timeout_s: float,
        node_ip: str = "",
        arguments: Sequence[str] = WORKER_ARGUMENTS,
        hurry: asyncio.Event | None = None,
    ) -> None:
        super().__init__()
        self._held, self._environment, self._hurry = held, environment, hurry
        self._cluster, self._address, self._token_file, self._node_ip = cluster, address, token_file, node_ip
        self._place_timeout_s, self._arguments = place_timeout_s, tuple(arguments)
        self._workers: dict[WorkerId, _LaunchedWorker] = {}
        self._driver: ChildProcess | None = None
        self._was_attached = self._is_attached = False
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RayLauncher:
        self._keeping = asyncio.create_task(self._keep_driver())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._keeping is not None
        try:
            for worker_id in self._workers:
                self._tell({"stop": worker_id, "grace_s": 0.0})
            gone = [asyncio.create_task(worker.gone.wait()) for worker in self._workers.values()]
            if gone and self._is_attached:
                await asyncio.wait(gone, timeout=_LEAVE_S)
            for task in gone:
                task.cancel()
        finally:
            self._keeping.cancel()
            if self._driver is not None:
                self._driver.kill()
                await self._driver.wait_at_most(_LEAVE_S)
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def start_worker(self, spec: WorkerSpec) -> None:
        worker_id = spec.worker_id
        assert worker_id not in self._workers, f"{worker_id} runs already"
        order = Order(
            config=dataclasses.replace(spec.config, secret_file="", runtime_dir=""),
            threads=spec.threads,
            hardware=spec.hardware,
            arguments=self._arguments,
            needs_gpu=_needs_gpu(spec),
        )
        try:
            path = self._held.write_config(worker_id, order)
        except OSError as error:
            self._reports.put_nowait(WorkerExited(worker_id, f"it could not be started: {error}"))
            return
        self._workers[worker_id] = _LaunchedWorker(RunningWorker.of(spec, is_ready=False), str(path), asyncio.Event())
        self._tell_start(worker_id)

    async def stop(self, worker_id: WorkerId, *, grace_s: float) -> None:
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.grace_s = grace_s
        self._tell({"stop": worker_id, "grace_s": grace_s})
        gone = asyncio.create_task(worker.gone.wait())
        hurried = asyncio.create_task(self._hurry.wait()) if self._hurry is not None else None
        try:
            waits = [gone, *([hurried] if hurried is not None else [])]
            await asyncio.wait(waits, timeout=grace_s + _LEAVE_S, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                worker.grace_s = 0.0
                self._tell({"stop": worker_id, "grace_s": 0.0})
                await asyncio.wait([gone], timeout=_LEAVE_S)
            if not gone.done():
                raise TimeoutError("Ray has not ended it, or does not report it")
        finally:
            gone.cancel()
            if hurried is not None:
                hurried.cancel()

    async def running(self) -> Sequence[RunningWorker]:
        return [worker.running for worker in self._workers.values()]

    @property
    def nodes(self) -> dict[WorkerId, str] | None:
        """Return the address of each worker's node; "" = it waits for a place, or got one from a controller before this
        one. None: no driver is connected to Ray now."""
        return {name: worker.node for name, worker in self._workers.items()} if self._is_attached else None

    # ---- the driver ------------------------------------------------------------------------------------------------

    async def _keep_driver(self) -> None:
        """Start it, and again whenever it ends."""
        config = DriverConfig(
            cluster=self._cluster,
            address=self._address,
            node_ip=self._node_ip,
            secret_file=str(self._held.state.secret_file),
            place_timeout_s=self._place_timeout_s,
        )
        path = self._held.write_config(_DRIVER, config)
        while True:
            try:
                why = await self._run_driver(str(path))
            except OSError as error:
                why = f"the driver could not be started: {error}"
            except Exception as error:  # a bug: workers live on, and the next driver finds them
                log.exception("what the driver of Ray said could not be taken in")
                why = f"{type(error).__name__}: {error}"
            finally:
                self._is_attached = False
            event(log, "the driver of Ray has ended", logging.WARNING, why=repr(why))
            if not self._was_attached:  # it never worked: the configuration is wrong
                for worker_id in list(self._workers):
                    self._note_exit(worker_id, f"Ray at {self._address} does not take us: {why}. {_CHECK}")
            await asyncio.sleep(_AGAIN_S)

    async def _run_driver(self, path: str) -> str:
        """Run the driver once; return why it ended."""
        self._driver = driver = ChildProcess.start(
            [*DRIVER_COMMAND, "--config", path],
            variables=ray_variables(self._environment.variables, self._token_file),
            log_file=self._held.state.log_file(_DRIVER),
            takes_input=True,
        )
        slow = asyncio.get_running_loop().call_later(_ATTACH_TIMEOUT_S, driver.kill)
        fatal = ""
        try:
            async for line in driver.lines():
                said = message_in(line)
                if "attached" in said:
                    slow.cancel()
                    self._was_attached = self._is_attached = True
                    for worker_id in self._workers:
                        self._tell_start(worker_id)
                    self._tell({"find": "others"})
                elif "worker" in said:
                    self._hear(WorkerId(str(said["worker"])), said)
                fatal = str(said.get("fatal", fatal))
            return fatal or driver.end_reason(await driver.wait())
        finally:
            slow.cancel()
            driver.kill()

    def _tell_start(self, worker_id: WorkerId) -> None:
        worker = self._workers[worker_id]
        self._tell({"start": worker_id, "order": worker.path, "after": worker.heard})
        if worker.grace_s is not None:
            self._tell({"stop": worker_id, "grace_s": worker.grace_s})

    def _tell(self, command: dict[str, Any]) -> None:
        """Send a command to the driver. Nothing is lost without one: the next driver gets every worker at its start."""
        if self._is_attached and self._driver is not None:
            with contextlib.suppress(OSError):
                self._driver.write(json.dumps(command))

    def _hear(self, worker_id: WorkerId, said: dict[str, Any]) -> None:
        if "found" in said:
            try:
                self._take_over(worker_id, from_json(str(said["found"]), Order))
            except ConfigError as error:
                event(log, "a worker of another release is ended", logging.WARNING, worker=worker_id, why=error.message)
                self._tell({"leave": said["place_name"]})
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.heard = int(said.get("after", worker.heard))
        if "exited" in said:
            flags = {name: bool(said.get(name)) for name in ("is_unplaced", "is_place_lost")}
            self._note_exit(worker_id, str(said["exited"]), **flags)
        elif "place" in said:
            ip, *gpus = said["place"]
            worker.heard, worker.node = 0, str(ip)
            on = f"on {ip}" + (f", GPU {', '.join(gpus)}" if gpus else "")
            self._reports.put_nowait(WorkerProgress(worker_id, f"it has a place {on}"))
        elif self._pass_on(worker_id, said):
            worker.running = dataclasses.replace(worker.running, is_ready=True)

    def _take_over(self, worker_id: WorkerId, order: Order) -> None:
        """Take over a worker of a controller that is gone and that no later order named: it is ours from now on."""
        if worker_id in self._workers:
            return
        spec = WorkerSpec(config=order.config, threads=order.threads, hardware=order.hardware)
        path = self._held.write_config(worker_id, order)
        self._workers[worker_id] = _LaunchedWorker(RunningWorker.of(spec, is_ready=False), str(path), asyncio.Event())
        self._tell_start(worker_id)

    def _note_exit(
        self, worker_id: WorkerId, reason: str, *, is_unplaced: bool = False, is_place_lost: bool = False
    ) -> None:
        worker = self._workers.pop(worker_id)
        worker.gone.set()
        self._reports.put_nowait(WorkerExited(worker_id, reason, is_unplaced, is_place_lost))


def _needs_gpu(spec: WorkerSpec) -> bool | None:
    """True if it needs a GPU; None: if there are GPUs where it may run."""
    settings = spec.config.settings
    if settings.device == "auto" and settings.engine == "model":
        return None
    return settings.device.startswith("cuda")
