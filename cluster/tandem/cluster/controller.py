"""The reconcile loop: makes what runs equal to the desired state, and says why it does what it does.

A worker that cannot start although it never worked is a mistake of the configuration: before the cluster was ready once
it ends the start-up, later it waits for the next desired state. A worker that worked and died is started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from tandem.cluster.launcher import Launcher, WorkerExited, WorkerProgress, WorkerReady, WorkerReport, WorkerSpec
from tandem.core.clock import Clock
from tandem.core.desired import DesiredState, Pool
from tandem.core.errors import StartupError
from tandem.core.events import EventKind, EventSink
from tandem.core.ids import WorkerId
from tandem.core.restarts import RestartBackoff

STOP_GRACE_S = 10.0
START_TIMEOUT_S = 300.0


class DesiredSource(Protocol):
    """Where the desired state comes from."""

    async def watch(self, on_change: Callable[[DesiredState], None]) -> None:
        """Call `on_change` with the state as it is now and after every change, until cancelled."""


class Phase(Enum):
    """Where a slot stands.

    WAITING: started when it is due. HANGING: being killed because it did not get ready; what happens then is as after
    any death. FAILED: left alone until the desired state changes.
    """

    WAITING = auto()
    STARTING = auto()
    HANGING = auto()
    READY = auto()
    STOPPING = auto()
    FAILED = auto()


@dataclass(slots=True)
class Slot:
    """One worker that should run, over all its restarts."""

    worker_id: WorkerId
    pool: Pool
    backoff: RestartBackoff
    phase: Phase = Phase.WAITING
    start_at_s: float = 0.0
    started_at_s: float = 0.0
    was_ready: bool = False


class Controller:
    """Owns all workers of one cluster. `run` it in a task; it ends when the desired state says so."""

    def __init__(
        self,
        *,
        launcher: Launcher,
        desired: DesiredSource,
        make_spec: Callable[[Pool, WorkerId], WorkerSpec],
        events: EventSink,
        clock: Clock,
        on_report: Callable[[WorkerReport], None] = lambda report: None,
    ) -> None:
        self._launcher, self._desired, self._make_spec = launcher, desired, make_spec
        self._events, self._clock, self._on_report = events, clock, on_report
        self._slots: dict[WorkerId, Slot] = {}
        self._state: DesiredState | None = None
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._stops: dict[WorkerId, asyncio.Task[None]] = {}
        self._startup_error: StartupError | None = None

    async def run(self) -> None:
        """Reconcile until the desired state is stopped; StartupError when a worker's first start fails."""
        watchers = [
            asyncio.create_task(self._desired.watch(self._note_desired)),
            asyncio.create_task(self._watch_workers()),
        ]
        try:
            while not (self._state is not None and self._state.is_stopped):
                self._changed.clear()
                await self._reconcile()
                if self._startup_error is not None:
                    raise self._startup_error
                await self._wait_for_change(watchers)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def wait_ready(self) -> None:
        """Return once every wanted worker was ready at the same time."""
        await self._settled.wait()

    async def shutdown(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stop every worker, all at once, and return when they are gone. Call it after `run` has ended."""
        running = [slot for slot in self._slots.values() if slot.phase in (Phase.STARTING, Phase.READY)]
        for slot in running:
            self._begin_stop(slot, "the cluster stops", grace_s)
        if self._stops:
            await asyncio.wait(self._stops.values(), timeout=grace_s + STOP_GRACE_S)

    def phases(self) -> dict[WorkerId, Phase]:
        """Where every worker stands."""
        return {slot.worker_id: slot.phase for slot in self._slots.values()}

    async def _reconcile(self) -> None:
        wanted = _wanted(self._state)
        for worker_id, pool in wanted.items():
            if worker_id not in self._slots:
                self._slots[worker_id] = Slot(worker_id, pool, RestartBackoff(self._clock))
        for slot in list(self._slots.values()):
            if slot.worker_id not in wanted:
                self._retire(slot)
            elif slot.phase is Phase.WAITING and slot.start_at_s <= self._clock.now_s():
                slot.phase, slot.started_at_s = Phase.STARTING, self._clock.now_s()
                again = "after it died" if slot.was_ready else f"pool {slot.pool.name} wants {slot.pool.count}"
                self._events.record(EventKind.STARTED, slot.worker_id, again)
                await self._launcher.start_worker(self._make_spec(slot.pool, slot.worker_id))
            elif slot.phase is Phase.STARTING and slot.started_at_s + START_TIMEOUT_S <= self._clock.now_s():
                slot.phase = Phase.HANGING
                self._stop(slot, f"it did not get ready within {START_TIMEOUT_S:g} s", grace_s=0.0)
        if wanted and all(slot.phase is Phase.READY for slot in self._slots.values()):
            self._settled.set()

    def _retire(self, slot: Slot) -> None:
        if slot.phase in (Phase.STARTING, Phase.READY):
            self._begin_stop(slot, f"pool {slot.pool.name} wants fewer workers", STOP_GRACE_S)
        elif slot.phase in (Phase.WAITING, Phase.FAILED):
            del self._slots[slot.worker_id]

    def _begin_stop(self, slot: Slot, reason: str, grace_s: float) -> None:
        slot.phase = Phase.STOPPING
        self._stop(slot, reason, grace_s)

    def _stop(self, slot: Slot, reason: str, grace_s: float) -> None:
        self._events.record(EventKind.STOPPING, slot.worker_id, reason)
        task = asyncio.create_task(self._launcher.stop(slot.worker_id, grace_s=grace_s))
        self._stops[slot.worker_id] = task
        task.add_done_callback(lambda ended: self._note_stopped(slot, ended))

    def _note_stopped(self, slot: Slot, ended: asyncio.Task[None]) -> None:
        """Say so when not even SIGKILL ends a worker (a driver that hangs). Once it does end, all goes on."""
        self._stops.pop(slot.worker_id, None)
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            self._events.record(EventKind.GAVE_UP, slot.worker_id, f"stopping it failed: {error}")

    def _note_desired(self, state: DesiredState) -> None:
        pools = ", ".join(f"{pool.name} {pool.count}" for pool in state.pools)
        what = "stop" if state.is_stopped else pools
        self._events.record(EventKind.DESIRED_CHANGED, "cluster", f"version {state.version}: {what}")
        self._state = state
        for slot in self._slots.values():
            if slot.phase is Phase.FAILED:
                slot.phase = Phase.WAITING
        self._changed.set()

    async def _watch_workers(self) -> None:
        async for report in self._launcher.watch():
            self._on_report(report)
            slot = self._slots.get(report.worker_id)
            if slot is None or isinstance(report, WorkerProgress):
                continue
            if isinstance(report, WorkerReady):
                self._note_ready(slot)
            else:
                self._note_exit(slot, report)
            self._changed.set()

    def _note_ready(self, slot: Slot) -> None:
        if slot.phase is Phase.STARTING:
            slot.phase, slot.was_ready = Phase.READY, True
            slot.backoff.ready()
            self._events.record(EventKind.READY, slot.worker_id, f"it serves as {slot.pool.role}")

    def _note_exit(self, slot: Slot, report: WorkerExited) -> None:
        self._events.record(EventKind.EXITED, slot.worker_id, report.reason)
        if slot.phase is Phase.STOPPING:
            del self._slots[slot.worker_id]
        elif slot.was_ready:
            delay_s = slot.backoff.died()
            slot.phase, slot.start_at_s = Phase.WAITING, self._clock.now_s() + delay_s
            self._events.record(EventKind.RESTART_PLANNED, slot.worker_id, f"in {delay_s:g} s, because it died")
        else:
            slot.phase = Phase.FAILED
            self._events.record(EventKind.GAVE_UP, slot.worker_id, "it never worked; another start will not help")
            if not self._settled.is_set():
                self._startup_error = StartupError(f"{slot.worker_id} cannot start", why=report.reason)

    async def _wait_for_change(self, watchers: list[asyncio.Task[None]]) -> None:
        """Until something changed or the next restart is due. A watcher that ended raises what ended it."""
        slots = self._slots.values()
        due = [slot.start_at_s for slot in slots if slot.phase is Phase.WAITING]
        due += [slot.started_at_s + START_TIMEOUT_S for slot in slots if slot.phase is Phase.STARTING]
        timeout_s = max(0.0, min(due) - self._clock.now_s()) if due else None
        change = asyncio.create_task(self._changed.wait())
        try:
            done, _ = await asyncio.wait([change, *watchers], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
        for watcher in watchers:
            if watcher in done:
                watcher.result()
                raise RuntimeError("a watcher of the controller ended by itself")


def _wanted(state: DesiredState | None) -> dict[WorkerId, Pool]:
    if state is None or state.is_stopped:
        return {}
    return {WorkerId(f"{pool.name}-{number}"): pool for pool in state.pools for number in range(pool.count)}
