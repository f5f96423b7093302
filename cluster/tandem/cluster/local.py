"""Workers as child processes of this one: `python -m tandem.worker`, one process group each."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

from tandem.cluster.child_process import ChildProcess, message_in
from tandem.cluster.environment import Environment
from tandem.cluster.launcher import (
    RunningWorker,
    WorkerExited,
    WorkerProgress,
    WorkerReady,
    WorkerReport,
    WorkerSpec,
)
from tandem.cluster.state_dir import HeldState
from tandem.core.ids import WorkerId
from tandem.core.logs import event

log = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "tandem.worker")


class LocalLauncher:
    """A launcher for this machine. `async with` it: leaving kills whatever still runs."""

    def __init__(
        self,
        held: HeldState,
        environment: Environment,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        hurry: asyncio.Event | None = None,
    ) -> None:
        self._held, self._environment, self._command, self._hurry = held, environment, tuple(command), hurry
        self._children: dict[WorkerId, ChildProcess] = {}
        self._running: dict[WorkerId, RunningWorker] = {}
        self._followers: dict[WorkerId, asyncio.Task[None]] = {}
        self._reports: asyncio.Queue[WorkerReport] = asyncio.Queue()

    async def __aenter__(self) -> LocalLauncher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():
            child.kill()
        if self._followers:
            await asyncio.wait(self._followers.values(), timeout=5.0)
        for follower in self._followers.values():
            follower.cancel()

    async def start_worker(self, spec: WorkerSpec) -> None:
        worker_id = spec.worker_id
        assert worker_id not in self._children, f"{worker_id} runs already"
        try:
            path = self._held.write_config(worker_id, spec.config)
            child = ChildProcess.start(
                [*self._command, "--config", str(path)],
                variables=self._environment.for_child(threads=spec.threads),
                log_file=self._held.state.log_file(worker_id),
            )
        except OSError as error:
            self._reports.put_nowait(WorkerExited(worker_id, f"it could not be started: {error}"))
            return
        event(log, "worker started", worker=worker_id, pid=child.pid)
        self._children[worker_id] = child
        self._running[worker_id] = RunningWorker.of(spec, is_ready=False)
        self._followers[worker_id] = asyncio.create_task(self._follow(worker_id, child))

    async def stop(self, worker_id: WorkerId, *, grace_s: float) -> None:
        child = self._children.get(worker_id)
        if child is not None:
            await child.stop(grace_s=grace_s, hurry=self._hurry)

    async def running(self) -> Sequence[RunningWorker]:
        return list(self._running.values())

    async def watch(self) -> AsyncIterator[WorkerReport]:
        while True:
            yield await self._reports.get()

    async def _follow(self, worker_id: WorkerId, child: ChildProcess) -> None:
        """Report what the worker says until it is gone; the last report is always WorkerExited."""
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
            del self._children[worker_id], self._running[worker_id], self._followers[worker_id]

    def _hear(self, worker_id: WorkerId, said: dict[str, Any]) -> str:
        """Pass on what it says; returns why it ends, if it says that."""
        if "progress" in said:
            self._reports.put_nowait(WorkerProgress(worker_id, str(said["progress"])))
        elif "ready" in said:
            details = said["ready"] if isinstance(said["ready"], dict) else {}
            self._running[worker_id] = dataclasses.replace(self._running[worker_id], is_ready=True)
            self._reports.put_nowait(WorkerReady(worker_id, details))
        return " ".join(str(said.get("fatal", "")).split())
