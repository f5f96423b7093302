"""Rig of the controller's tests: a launcher that obeys the test, and a clock that the test moves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from tandem.controlplane.controller import Controller
from tandem.controlplane.launcher import (
    RunningWorker,
    WorkerExited,
    WorkerProgress,
    WorkerReady,
    WorkerReport,
    WorkerSpec,
)
from tandem.core.clock import ManualClock
from tandem.core.config import WorkerConfig
from tandem.core.desired import DesiredState, DesiredWorker, Pool, Revision
from tandem.core.errors import ModelError
from tandem.core.events import EventKind
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName

P0, P1, D0 = WorkerId("prefill-0"), WorkerId("prefill-1"), WorkerId("decode-0")


class FakeLauncher:
    def __init__(self) -> None:
        self.started: list[WorkerId] = []
        self.stopped: list[WorkerId] = []
        self.graces_s: list[float] = []
        self.stuck = False
        self.there: dict[WorkerId, RunningWorker] = {}
        self.reports: asyncio.Queue[WorkerReport] = asyncio.Queue()

    async def start_worker(self, spec: WorkerSpec) -> None:
        assert spec.worker_id not in self.there
        self.started.append(spec.worker_id)
        self.there[spec.worker_id] = RunningWorker.of(spec, is_ready=False)

    async def running(self) -> Sequence[RunningWorker]:
        return list(self.there.values())

    async def stop(self, worker_id: WorkerId, *, grace_s: float) -> None:
        self.stopped.append(worker_id)
        self.graces_s.append(grace_s)
        if self.stuck:
            raise TimeoutError("process 7 does not end although it was killed")
        del self.there[worker_id]
        self.reports.put_nowait(WorkerExited(worker_id, "exit code 0"))

    async def watch(self) -> AsyncIterator[WorkerReport]:
        while True:
            yield await self.reports.get()


class FakeDesired:
    def __init__(self) -> None:
        self.states: asyncio.Queue[DesiredState] = asyncio.Queue()
        self.saved: list[DesiredState] = []

    async def watch(self, on_change: Callable[[DesiredState], None]) -> None:
        while True:
            on_change(await self.states.get())

    async def save(self, state: DesiredState, expected_version: int) -> bool:
        assert state.version == expected_version + 1
        self.saved.append(state)
        self.states.put_nowait(state)
        return True


class Events:
    def __init__(self) -> None:
        self.seen: list[tuple[EventKind, str, str]] = []

    def record(self, kind: EventKind, subject: str, reason: str) -> None:
        self.seen.append((kind, subject, reason))

    def of(self, kind: EventKind) -> list[str]:
        return [f"{subject}: {reason}" for found, subject, reason in self.seen if found is kind]


class Harness:
    def __init__(self, *, is_continued: bool = False) -> None:
        self.launcher, self.desired, self.events, self.clock = FakeLauncher(), FakeDesired(), Events(), ManualClock()
        self.controller = Controller(
            launcher=self.launcher,
            desired=self.desired,
            make_spec=spec_of,
            events=self.events,
            clock=self.clock,
            is_continued=is_continued,
        )
        self.version = 0

    async def want(self, *, prefill: int = 0, decode: int = 0, stop: bool = False, after_s: float = 0.0) -> None:
        """Change the desired state after some time, and let every task run."""
        self.clock.advance(after_s)
        self.version += 1
        counts = ((RoleName.PREFILL, prefill), (RoleName.DECODE, decode))
        pools = tuple(Pool(name=role.value, model="m", role=role, count=count) for role, count in counts if count)
        await self.give(DesiredState(version=self.version, pools=pools, is_stopped=stop))

    async def give(self, state: DesiredState) -> None:
        self.desired.states.put_nowait(state)
        await settle()

    def ready(self, *workers: WorkerId) -> None:
        for worker in workers:
            self.launcher.there[worker] = replace(self.launcher.there[worker], is_ready=True)
            self.launcher.reports.put_nowait(WorkerReady(worker))

    def says(self, worker_id: WorkerId, text: str) -> None:
        self.launcher.reports.put_nowait(WorkerProgress(worker_id, text))

    async def dies(
        self,
        worker: WorkerId,
        reason: str = "killed by signal 9",
        *,
        is_unplaced: bool = False,
        is_place_lost: bool = False,
    ) -> None:
        """End a worker, and let every task run."""
        del self.launcher.there[worker]
        self.launcher.reports.put_nowait(WorkerExited(worker, reason, is_unplaced, is_place_lost))
        await settle()


def spec_of(pool: Pool, member: DesiredWorker, revision: Revision | None) -> WorkerSpec:
    if revision is not None and revision.model_path == "/no/such":
        raise ModelError("cannot load the model /no/such", why="no such folder")
    config = WorkerConfig(
        cluster="c", worker_id=member.worker_id, role=pool.role, pool=pool.name, model="m", model_dir="/m",
        revision=member.revision or pool.revision,
        dtype="auto", max_model_len=0, redis_url="", secret_file="", runtime_dir="",
    )  # fmt: skip
    return WorkerSpec(config=config, restart_generation=member.restart_generation)


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(50):
        await asyncio.sleep(0)


@asynccontextmanager
async def playing() -> AsyncIterator[Harness]:
    """With a controller that runs meanwhile."""
    harness = Harness()
    task = asyncio.create_task(harness.controller.run())
    try:
        async with asyncio.timeout(20):
            yield harness
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
