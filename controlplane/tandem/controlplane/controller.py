"""The reconcile loop: makes the running workers equal to the desired state, and reports the reasons of its actions.

The next actions are decided in reconcile.py, from the record and the observed state; here they are carried out. This
object remembers only how often a worker died and which step is in progress; a new controller works without both.

A worker that cannot start although it never worked is a configuration mistake: before the cluster was first ready
it ends the start-up, later it waits for the next desired state. Where a start goes on with a record that was changed
since it was configured, the cluster was ready before: the start-up ends only when no worker is left. A worker that
worked and died is started again, and so is one that lost its machine while it started, and, later, one for which there
was no room: machines join.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from tandem.controlplane.control_orders import SILENT_S, ControlOrders
from tandem.controlplane.launcher import (
    Launcher,
    RunningWorker,
    WorkerExited,
    WorkerProgress,
    WorkerReady,
    WorkerReport,
    WorkerSpec,
)
from tandem.controlplane.reconcile import Action, ActionKind, ObservedPhase, ObservedWorker, plan
from tandem.controlplane.rollout_controller import DEATHS_THAT_COUNT, Rolling, is_rolling
from tandem.controlplane.supervised_worker import RUNS, WorkerPhase, WorkerStatus
from tandem.controlplane.worker_control import WorkerControlClient
from tandem.core.backoff import FIRST_S, RestartBackoff
from tandem.core.clock import Clock
from tandem.core.desired import DesiredState, DesiredWorker, Pool, Revision
from tandem.core.errors import StartupError, TandemError
from tandem.core.events import EventKind, EventSink
from tandem.core.ids import WorkerId
from tandem.core.timeout_scale import patient

STOP_GRACE_S = 10.0
START_TIMEOUT_S = patient(300.0)
LOOK_EVERY_S, WAIT_EVERY_S, RELIST_EVERY_S = 0.1, 1.0, 5.0
"""Seconds between looks: while a step is in progress, while workers only wait, and else."""


MakeSpec = Callable[[Pool, DesiredWorker, Revision | None], WorkerSpec]
"""Return how to start a member; TandemError if it cannot be. The revision: its differences from the configuration."""


class DesiredSource(Protocol):
    """Source of the desired state, and store of the progress of rollouts."""

    async def watch(self, on_change: Callable[[DesiredState], None]) -> None:
        """Call `on_change` with the state as it is now and after every change, until cancelled."""

    async def save(self, state: DesiredState, expected_version: int) -> bool:
        """Write it if the stored version is that one; False = it was changed concurrently. Raises TandemError."""


class PodFollower(Protocol):
    """Makes the record follow workers that come and go by themselves."""

    async def followed(self, state: DesiredState) -> DesiredState:
        """Return `state` with only those members that have a worker; no other is to be started."""


class Controller:
    """Owns all workers of one cluster. `run` it in a task; it ends when the desired state is stopped."""

    def __init__(
        self,
        *,
        launcher: Launcher,
        desired: DesiredSource,
        make_spec: MakeSpec,
        events: EventSink,
        clock: Clock,
        on_report: Callable[[WorkerReport], None] = lambda report: None,
        client: WorkerControlClient | None = None,
        is_continued: bool = False,
        replace_silent_s: float = 0.0,
        following: PodFollower | None = None,
    ) -> None:
        """`is_continued`: an earlier controller made this desired state come true, as far as it could.
        `replace_silent_s`: a silent worker is started anew after so long; 0 = never."""
        self._launcher, self._desired, self._make_spec = launcher, desired, make_spec
        self._events, self._clock, self._on_report = events, clock, on_report
        self._rolling, self._following = Rolling(desired.save, events), following
        self._slots: dict[WorkerId, WorkerStatus] = {}
        self._state: DesiredState | None = None
        self._changed = asyncio.Event()
        self._orders: ControlOrders | None = None
        if client is not None:
            ended = self._changed.set
            self._orders = ControlOrders(client, events, clock, ended, replace_silent_s=replace_silent_s)
        self._settled = asyncio.Event()
        self._stops: dict[WorkerId, asyncio.Task[None]] = {}
        self._waits: dict[WorkerId, str] = {}
        self._look_every_s = RELIST_EVERY_S
        self._startup_error: StartupError | None = None
        self._is_continued = is_continued

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
            tasks = [*watchers, *(slot.step for slot in self._slots.values() if slot.step is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_ready(self) -> None:
        """Return once every wanted worker was ready at the same time; at once where the desired state is continued:
        workers that could not start before need not start now."""
        if not self._is_continued:
            await self._settled.wait()

    async def shutdown(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stop every worker, all at once, and return when they are gone. Call it after `run` has ended."""
        running = [slot for slot in self._slots.values() if slot.phase in (WorkerPhase.STARTING, WorkerPhase.READY)]
        for slot in running:
            self._begin_stop(slot, "the cluster stops", grace_s)
        if self._stops:
            await asyncio.wait(self._stops.values(), timeout=grace_s + STOP_GRACE_S)

    def look_again(self) -> None:
        """Reconcile again soon: a change is known."""
        self._changed.set()

    def phases(self) -> dict[WorkerId, WorkerPhase]:
        """Return the phase of every worker."""
        return {slot.worker_id: slot.phase for slot in self._slots.values()}

    # ---- observing ---------------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        state = current = self._state
        if state is None or state.is_stopped:
            return
        if self._following is not None:
            state = await self._following.followed(state)
        running = {worker.worker_id: worker for worker in await self._launcher.running()}
        for worker in running.values():
            if worker.worker_id not in self._slots:
                self._adopt(worker)
        await self._look(running)
        if current is not self._state:
            return  # there is a newer one, and `_changed` is set
        self._forget(state, running)
        seen = [self._seen(slot, running[name]) for name, slot in self._slots.items() if name in running]
        held = {name for name, slot in self._slots.items() if self._is_held(slot, name in running)}
        made = plan(state, seen, held=held, can_steer=self._orders is not None)
        for action in made.actions:
            await self._do(action, state)
        self._note_waits(made.waits)
        is_busy = self._following is None and await self._rolling.step(state, seen, held, self._broken())
        is_busy = is_busy or bool(made.actions) or any(_is_under_way(one, one.worker_id in held) for one in seen)
        is_missed = any(slot.is_missed and slot.phase is WorkerPhase.READY for slot in self._slots.values())
        is_waiting = bool(made.waits) or is_missed
        self._look_every_s = LOOK_EVERY_S if is_busy else WAIT_EVERY_S if is_waiting else RELIST_EVERY_S
        self._end_hanging()
        if state.members and self._is_settled(state):
            self._settled.set()

    def _broken(self) -> dict[WorkerId, str]:
        """Return the workers that will not work, with the reasons."""
        found = {name: slot.trouble for name, slot in self._slots.items() if slot.phase is WorkerPhase.FAILED}
        for name, slot in self._slots.items():
            if slot.phase is WorkerPhase.WAITING and slot.deaths >= DEATHS_THAT_COUNT:
                found[name] = f"it died {slot.deaths} times, at last: {slot.trouble}"
        return found

    def _adopt(self, worker: RunningWorker) -> None:
        """Adopt a worker that an earlier controller started."""
        slot = self._slots[worker.worker_id] = self._new_slot(worker.worker_id)
        slot.phase, slot.was_ready = (WorkerPhase.READY, True) if worker.is_ready else (WorkerPhase.STARTING, False)
        slot.started_at_s = slot.heard_s = self._clock.now_s()

    def _new_slot(self, worker_id: WorkerId) -> WorkerStatus:
        return WorkerStatus(worker_id, RestartBackoff(self._clock), RestartBackoff(self._clock))

    async def _look(self, running: Collection[WorkerId]) -> None:
        if self._orders is not None:
            slots = self._slots.items()
            await self._orders.look(
                [slot for name, slot in slots if slot.phase is WorkerPhase.READY and name in running]
            )

    def _seen(self, slot: WorkerStatus, worker: RunningWorker) -> ObservedWorker:
        said, role = slot.said, worker.role
        if slot.phase is not WorkerPhase.READY:
            life = ObservedPhase.STARTING if slot.phase is WorkerPhase.STARTING else ObservedPhase.STOPPING
        elif self._orders is None:
            life = ObservedPhase.READY
        elif said is None:
            life = ObservedPhase.SILENT
        else:
            life, role = ObservedPhase.FLIPPING if said.target is not None else ObservedPhase(said.state), said.role
        return ObservedWorker(
            worker_id=worker.worker_id,
            model=worker.model,
            role=role,
            life=life,
            target=said.target if life is ObservedPhase.FLIPPING and said is not None else None,
            ranks=worker.ranks,
            revision=worker.revision,
            restart_generation=worker.restart_generation,
        )

    def _is_held(self, slot: WorkerStatus, is_running: bool) -> bool:
        now_s = self._clock.now_s()
        if slot.phase is WorkerPhase.WAITING:
            return slot.start_at_s > now_s
        has_ended = slot.phase in RUNS and not is_running  # its end will be reported in a moment
        is_unheard = slot.said is None and now_s - slot.heard_s <= SILENT_S
        if slot.phase is WorkerPhase.READY and self._orders is not None and is_unheard:
            return True
        return has_ended or slot.phase is WorkerPhase.FAILED or slot.step is not None or slot.step_at_s > now_s

    def _forget(self, state: DesiredState, running: Mapping[WorkerId, RunningWorker]) -> None:
        """Drop slots of workers that neither run nor are wanted."""
        for name, slot in list(self._slots.items()):
            if (
                slot.phase in (WorkerPhase.WAITING, WorkerPhase.FAILED)
                and name not in running
                and state.member(name) is None
            ):
                del self._slots[name]

    def _is_settled(self, state: DesiredState) -> bool:
        phases = self.phases()
        wanted = {member.worker_id for member in state.members}
        return wanted == phases.keys() and all(phase is WorkerPhase.READY for phase in phases.values())

    # ---- acting ------------------------------------------------------------------------------------------------------

    async def _do(self, action: Action, state: DesiredState) -> None:
        if action.deed is ActionKind.START and action.member is not None:
            await self._start(action.member, state, action.reason)
        elif action.deed is ActionKind.STOP:
            self._begin_stop(self._slots[action.worker_id], action.reason, STOP_GRACE_S)
        elif self._orders is not None:
            deadline_s = state.drain_deadline_of(action.worker_id)
            self._orders.order(self._slots[action.worker_id], action, deadline_s)

    async def _start(self, member: DesiredWorker, state: DesiredState, reason: str) -> None:
        pool = state.pool(member.pool)
        slot = self._slots.setdefault(member.worker_id, self._new_slot(member.worker_id))
        slot.phase, slot.started_at_s = WorkerPhase.STARTING, self._clock.now_s()
        slot.said, slot.is_flipping, slot.is_missed, slot.silent_at_s = None, False, False, None
        if not slot.is_unplaced:
            told = "after it died" if slot.was_ready and slot.start_at_s else reason
            self._events.record(EventKind.STARTED, slot.worker_id, told)
        try:
            spec = self._make_spec(pool, member, state.revision(pool.model, state.revision_of(member)))
        except TandemError as error:
            self._note_exit(slot, WorkerExited(slot.worker_id, error.message.rstrip(".")))
            self._changed.set()
            return
        await self._launcher.start_worker(spec)

    def _begin_stop(self, slot: WorkerStatus, reason: str, grace_s: float) -> None:
        slot.phase = WorkerPhase.STOPPING
        self._stop(slot, reason, grace_s)

    def _stop(self, slot: WorkerStatus, reason: str, grace_s: float) -> None:
        self._events.record(EventKind.STOPPING, slot.worker_id, reason)
        task = asyncio.create_task(self._launcher.stop(slot.worker_id, grace_s=grace_s))
        self._stops[slot.worker_id] = task
        task.add_done_callback(lambda ended: self._note_stopped(slot, ended))

    def _end_hanging(self) -> None:
        now_s = self._clock.now_s()
        for slot in self._slots.values():
            why = ""
            if slot.phase is WorkerPhase.STARTING and slot.started_at_s + START_TIMEOUT_S <= now_s:
                why = f"it did not get ready within {START_TIMEOUT_S:g} s"
            elif slot.phase is WorkerPhase.READY and self._orders is not None and self._orders.is_lost(slot):
                why = f"it has not answered for {now_s - slot.heard_s:.0f} s"
            if why:
                slot.phase = WorkerPhase.HANGING
                self._stop(slot, why, grace_s=0.0)

    # ---- reports -----------------------------------------------------------------------------------------------------

    def _note_stopped(self, slot: WorkerStatus, ended: asyncio.Task[None]) -> None:
        """Report a worker that not even SIGKILL ends (a driver that hangs). Once it does end, all goes on."""
        self._stops.pop(slot.worker_id, None)
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            self._events.record(EventKind.GAVE_UP, slot.worker_id, f"stopping it failed: {error}")

    def _note_desired(self, state: DesiredState) -> None:
        pools = ", ".join(f"{pool.name} {pool.count}" for pool in state.pools if pool.count)
        what = "stop" if state.is_stopped else pools
        self._events.record(EventKind.DESIRED_CHANGED, "cluster", f"version {state.version}: {what}")
        self._state = state.filled()
        for slot in self._slots.values():
            slot.step_at_s = 0.0
            if slot.phase is WorkerPhase.FAILED:
                slot.phase = WorkerPhase.WAITING
        self._changed.set()

    def _note_waits(self, waits: Mapping[WorkerId, str]) -> None:
        for worker_id, why in waits.items():
            if self._waits.get(worker_id) != why:
                self._events.record(EventKind.WAITING, worker_id, why)
        self._waits = dict(waits)

    async def _watch_workers(self) -> None:
        async for report in self._launcher.watch():
            self._on_report(report)
            slot = self._slots.get(report.worker_id)
            if slot is None:
                continue
            if isinstance(report, WorkerProgress):
                self._note_place(slot, report)
                continue
            if isinstance(report, WorkerReady):
                self._note_ready(slot)
            else:
                self._note_exit(slot, report)
            self._changed.set()

    def _note_place(self, slot: WorkerStatus, report: WorkerProgress) -> None:
        """Record that a worker waits for a machine with room, or has one: until it runs, only events show it."""
        if report.missing_place and report.missing_place != slot.awaited:
            self._events.record(EventKind.WAITING, slot.worker_id, report.missing_place)
        elif slot.awaited and not report.missing_place:
            self._events.record(EventKind.STARTED, slot.worker_id, report.text)
        slot.awaited = report.missing_place

    def _note_ready(self, slot: WorkerStatus) -> None:
        if slot.phase is WorkerPhase.STARTING:
            slot.phase, slot.was_ready, slot.awaited = WorkerPhase.READY, True, ""
            slot.said, slot.heard_s = None, self._clock.now_s()
            slot.backoff.ready()
            member = self._state.member(slot.worker_id) if self._state is not None else None
            as_what = f"it serves as {member.role}" if member is not None else "it serves"
            self._events.record(EventKind.READY, slot.worker_id, as_what)

    def _note_exit(self, slot: WorkerStatus, report: WorkerExited) -> None:
        is_told = report.is_unplaced and slot.is_unplaced and report.reason == slot.trouble
        if not is_told:
            self._events.record(EventKind.EXITED, slot.worker_id, report.reason)
        slot.trouble, slot.is_unplaced = report.reason, False
        if not report.is_unplaced:
            slot.awaited = ""
        if slot.step is not None:
            slot.step.cancel()
        is_wanted = self._state is None or self._state.member(slot.worker_id) is not None
        if not is_wanted or report.is_for_good:
            del self._slots[slot.worker_id]
        elif slot.phase is WorkerPhase.STOPPING:
            slot.phase, slot.start_at_s = WorkerPhase.WAITING, 0.0
        elif slot.was_ready or report.is_place_lost or (report.is_unplaced and not self._is_start_up()):
            delay_s = slot.backoff.died()
            if not report.is_unplaced:
                slot.deaths = 1 if delay_s == FIRST_S else slot.deaths + 1
            slot.phase, slot.start_at_s = WorkerPhase.WAITING, self._clock.now_s() + delay_s
            slot.is_unplaced = report.is_unplaced
            if not is_told:
                why = "as there may be room by then" if report.is_unplaced else "because it died"
                why = "because its place is gone" if report.is_place_lost else why
                self._events.record(EventKind.RESTART_PLANNED, slot.worker_id, f"in {delay_s:g} s, {why}")
        else:
            slot.phase = WorkerPhase.FAILED
            why = "there is no room to start in" if report.is_unplaced else "another start will not help"
            self._events.record(EventKind.GAVE_UP, slot.worker_id, f"it never worked; {why}")
            if self._is_start_up():
                self._startup_error = StartupError(f"{slot.worker_id} cannot start", why=report.reason)

    def _is_start_up(self) -> bool:
        """True if a worker that never works ends the start-up."""
        if self._settled.is_set() or (self._state is not None and is_rolling(self._state)):
            return False
        if not self._is_continued or self._state is None:
            return True
        slots = [self._slots.get(member.worker_id) for member in self._state.members]
        return all(slot is not None and slot.phase is WorkerPhase.FAILED for slot in slots)

    async def _wait_for_change(self, watchers: list[asyncio.Task[None]]) -> None:
        """Wait for a change, or until the next look is due. A watcher that ended raises its exception."""
        change = asyncio.create_task(self._changed.wait())
        try:
            done, _ = await asyncio.wait(
                [change, *watchers], timeout=self._next_look_s(), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            change.cancel()
        for watcher in watchers:
            if watcher in done:
                watcher.result()
                raise RuntimeError("a watcher of the controller ended by itself")

    def _next_look_s(self) -> float | None:
        """Return seconds until the next restart, retry or look is due; None = wait for a change."""
        slots = self._slots.values()
        waiting = [slot for slot in slots if slot.phase is WorkerPhase.WAITING]
        due = [slot.start_at_s for slot in waiting if slot.worker_id not in self._waits]
        due += [slot.started_at_s + START_TIMEOUT_S for slot in slots if slot.phase is WorkerPhase.STARTING]
        now_s = self._clock.now_s()
        due += [slot.step_at_s for slot in slots if slot.step_at_s > now_s]
        if self._orders is not None:
            due.append(now_s + self._look_every_s)
        return max(0.0, min(due) - now_s) if due else None


def _is_under_way(one: ObservedWorker, is_held: bool) -> bool:
    """True if it changes by itself, or its state is still unknown."""
    return one.life in (ObservedPhase.DRAINING, ObservedPhase.FLIPPING) or (
        one.life is ObservedPhase.SILENT and is_held
    )
