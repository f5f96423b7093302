"""Workers as child processes of this one: `python -m tandem.worker`, one process group each."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.controlplane import gpu_free_check
from tandem.controlplane.child_process import ChildProcess, message_in
from tandem.controlplane.environment import NATIVE_CACHE, Environment
from tandem.controlplane.launcher import LauncherBase, RunningWorker, WorkerExited, WorkerProgress, WorkerSpec
from tandem.controlplane.state_dir import HeldState
from tandem.core.ids import WorkerId
from tandem.core.logs import event

log = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "tandem.worker")


class LocalLauncher(LauncherBase):
    """A launcher for this machine. `async with` it: leaving kills the remaining workers."""

    def __init__(
        self,
        held: HeldState,
        environment: Environment,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        hurry: asyncio.Event | None = None,
        gpu_wait_s: float = gpu_free_check.WAIT_S,
    ) -> None:
        super().__init__()
        self._held, self._environment, self._command, self._hurry = held, environment, tuple(command), hurry
        self._gpu_wait_s = gpu_wait_s
        self._placings: dict[WorkerId, asyncio.Task[None]] = {}
        self._gpus: dict[WorkerId, tuple[str, ...]] = {}
        """The GPUs that a child may hold."""
        self._children: dict[WorkerId, ChildProcess] = {}
        self._running: dict[WorkerId, RunningWorker] = {}
        self._followers: dict[WorkerId, asyncio.Task[None]] = {}

    async def __aenter__(self) -> LocalLauncher:
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker_id in list(self._placings):
            await self.stop(worker_id, grace_s=0.0)
        for child in self._children.values():
            child.kill()
        if self._followers:
            await asyncio.wait(self._followers.values(), timeout=5.0)
        for follower in self._followers.values():
            follower.cancel()

    async def start_worker(self, spec: WorkerSpec) -> None:
        worker_id = spec.worker_id
        assert worker_id not in self._running, f"{worker_id} runs already"
        self._running[worker_id] = RunningWorker.of(spec, is_ready=False)
        gpus = gpus_of(spec, self._environment.variables)
        if gpus and gpu_free_check.can_tell():
            placing = self._placings[worker_id] = asyncio.create_task(self._await_gpus(worker_id, gpus))
            placing.add_done_callback(lambda ended: self._note_placing(spec, gpus, ended))
        else:
            self._start(spec, gpus)

    def _note_placing(self, spec: WorkerSpec, gpus: tuple[str, ...], placing: asyncio.Task[None]) -> None:
        """Start the worker once its GPUs are free; report its exit if the wait ended otherwise."""
        del self._placings[spec.worker_id]
        error = None if placing.cancelled() else placing.exception()
        if placing.cancelled():
            self._note_exit(WorkerExited(spec.worker_id, "it was stopped before it had a place"))
        elif isinstance(error, gpu_free_check.HeldGpuError):
            self._note_exit(WorkerExited(spec.worker_id, str(error), is_unplaced=True))
        elif error is not None:
            self._note_exit(WorkerExited(spec.worker_id, f"it could not be started: {error}"))
        else:
            self._start(spec, gpus)

    async def _await_gpus(self, worker_id: WorkerId, gpus: tuple[str, ...]) -> None:
        """Wait for free GPUs; HeldGpuError where a program goes on holding them. A GPU used by another worker of
        ours is shared on purpose, and the amount free on it means nothing."""
        patience = gpu_free_check.GpuMemoryWait(self._gpu_wait_s)
        while True:
            ours = {gpu for held in self._gpus.values() for gpu in held}
            others = [gpu for gpu in gpus if gpu not in ours]
            holds = await asyncio.to_thread(gpu_free_check.occupied, others, only_by_programs=True)
            if not holds:
                return
            if news := patience.note(holds):
                self._reports.put_nowait(WorkerProgress(worker_id, news))
            await asyncio.sleep(gpu_free_check.LOOK_EVERY_S)

    def _start(self, spec: WorkerSpec, gpus: tuple[str, ...]) -> None:
        worker_id = spec.worker_id
        try:
            path = self._held.write_config(worker_id, spec.config)
            child = ChildProcess.start(
                [*self._command, "--config", str(path)],
                variables={NATIVE_CACHE: str(self._held.state.path / "native")}
                | self._environment.for_child(threads=spec.threads),
                log_file=self._held.state.log_file(worker_id),
            )
        except OSError as error:
            self._note_exit(WorkerExited(worker_id, f"it could not be started: {error}"))
            return
        event(log, "worker started", worker=worker_id, pid=child.pid)
        self._children[worker_id] = child
        self._gpus[worker_id] = gpus
        self._followers[worker_id] = asyncio.create_task(self._follow(worker_id, child))

    async def stop(self, worker_id: WorkerId, *, grace_s: float) -> None:
        placing = self._placings.get(worker_id)
        if placing is not None:
            placing.cancel()
            await asyncio.wait([placing])
        child = self._children.get(worker_id)
        if child is not None:
            await child.stop(grace_s=grace_s, hurry=self._hurry)

    async def running(self) -> Sequence[RunningWorker]:
        return list(self._running.values())

    async def _follow(self, worker_id: WorkerId, child: ChildProcess) -> None:
        """Report the worker's progress until it is gone; the last report is always WorkerExited."""
        fatal = ""
        try:
            try:
                async for line in child.lines():
                    fatal = self._hear(worker_id, message_in(line)) or fatal
            except OSError as error:  # no memory for watching its output
                fatal = f"its output cannot be read: {error}"
                child.kill()
            code = await child.wait()
            reason = fatal or child.end_reason(code)
            self._reports.put_nowait(WorkerExited(worker_id, reason))
        finally:
            child.kill()
            del self._children[worker_id], self._running[worker_id], self._followers[worker_id], self._gpus[worker_id]

    def _note_exit(self, report: WorkerExited) -> None:
        """Report the end of a worker that never ran."""
        del self._running[report.worker_id]
        self._reports.put_nowait(report)

    def _hear(self, worker_id: WorkerId, said: dict[str, Any]) -> str:
        """Pass on its report; return why it ends, if the report gives a reason."""
        if self._pass_on(worker_id, said):
            self._running[worker_id] = dataclasses.replace(self._running[worker_id], is_ready=True)
        return " ".join(str(said.get("fatal", "")).split())


def gpus_of(spec: WorkerSpec, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that its ranks compute on, where there are any: the first ones visible by `variables`. None for a
    worker that computes on CPUs."""
    settings = spec.config.settings
    is_on_gpu = settings.device.startswith("cuda") or (settings.device == "auto" and _may_find_gpu(settings.engine))
    if not is_on_gpu:
        return ()
    seen = variables.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return tuple(str(rank) for rank in range(settings.tp))
    return tuple(gpu.strip() for gpu in seen.split(",") if gpu.strip() not in ("", "-1"))[: settings.tp]


def _may_find_gpu(engine: str) -> bool:
    """True if a worker that chooses its device itself may take a GPU. torch is not imported here."""
    try:
        return engine == "model" and not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
