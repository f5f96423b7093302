"""Polls the running workers, and sends them the orders that were decided: drain, uncordon, change role.

An order is a step of its own beside the reconcile loop; one that fails is retried with growing delays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tandem.controlplane.reconcile import Action, ActionKind
from tandem.controlplane.supervised_worker import WorkerStatus
from tandem.controlplane.worker_control import WorkerControlClient, WorkerLook
from tandem.core.backoff import RestartBackoff
from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.core.events import EventKind, EventSink
from tandem.core.state_enums import WorkerState
from tandem.core.timeout_scale import patient

SILENT_S = patient(5.0)
"""A worker that cannot be polled for so long counts as silent."""
LOOK_TIMEOUT_S, STEP_TIMEOUT_S = 2.0, 10.0


class ControlOrders:
    """Keeps workers' reports, and the orders in progress, in their slots. `on_end`: an order has ended.
    `replace_silent_s`: a worker silent for so long is lost; 0 = none ever is."""

    def __init__(
        self,
        client: WorkerControlClient,
        events: EventSink,
        clock: Clock,
        on_end: Callable[[], None],
        *,
        replace_silent_s: float = 0.0,
    ) -> None:
        self._client, self._events, self._clock, self._on_end = client, events, clock, on_end
        self._replace_silent_s = replace_silent_s

    async def look(self, slots: Iterable[WorkerStatus]) -> None:
        """Poll all of them at once; over after `LOOK_TIMEOUT_S` at the latest."""
        await asyncio.gather(*(self._look_at(slot) for slot in slots))

    def order(self, slot: WorkerStatus, action: Action, deadline_s: float) -> None:
        """Begin to send a worker its order."""
        self._events.record(_TOLD[action.deed], slot.worker_id, action.reason)
        slot.step = asyncio.create_task(self._send(slot, action, deadline_s))

    def is_lost(self, slot: WorkerStatus) -> bool:
        """True if a worker has been silent for too long to be waited for."""
        if slot.silent_at_s is None or not self._replace_silent_s:
            return False
        return self._clock.now_s() - slot.silent_at_s >= self._replace_silent_s

    async def _look_at(self, slot: WorkerStatus) -> None:
        is_stale = slot.step is not None  # it may report the time before that order
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                said = await self._client.look(slot.worker_id)
            self._note_heard(slot)
            if not is_stale:
                slot.said = said
                self._note_flip(slot, said)
        except (TandemError, TimeoutError):
            slot.is_missed = True
            if self._clock.now_s() - slot.heard_s > SILENT_S:
                slot.said = None
                self._note_silence(slot)

    def _note_silence(self, slot: WorkerStatus) -> None:
        """Start the silence now, regardless of the past: this machine may have been suspended itself."""
        if slot.silent_at_s is None:
            slot.silent_at_s = self._clock.now_s()
            after_s = self._replace_silent_s
            then = f"if that lasts {after_s:g} s more, it is started anew" if after_s else "it is not replaced"
            self._events.record(EventKind.SILENT, slot.worker_id, f"it has not answered for {SILENT_S:g} s; {then}")

    def _note_heard(self, slot: WorkerStatus) -> None:
        now_s = self._clock.now_s()
        if slot.silent_at_s is not None:
            self._events.record(EventKind.HEARD, slot.worker_id, f"again, after {now_s - slot.heard_s:.0f} s")
        slot.heard_s, slot.is_missed, slot.silent_at_s = now_s, False, None

    def _note_flip(self, slot: WorkerStatus, said: WorkerLook) -> None:
        """Record that a flip ordered here has ended, well or not."""
        if slot.is_flipping and said.target is None and said.state is WorkerState.READY:
            slot.is_flipping = False
            if said.flip_failure:
                self._put_off(slot, ActionKind.BECOME, said.flip_failure)
            else:
                slot.steps = RestartBackoff(self._clock)
                self._events.record(EventKind.FLIPPED, slot.worker_id, f"it serves as {said.role}")

    async def _send(self, slot: WorkerStatus, action: Action, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                if action.deed is ActionKind.DRAIN:
                    await self._client.drain(slot.worker_id, deadline_s)
                elif action.deed is ActionKind.UNCORDON:
                    await self._client.uncordon(slot.worker_id)
                elif action.member is not None:
                    await self._client.become(slot.worker_id, action.member.role, deadline_s)
                    slot.is_flipping = True
        except (TandemError, TimeoutError) as error:
            self._put_off(slot, action.deed, error.message if isinstance(error, TandemError) else "no answer")
        else:
            self._note_heard(slot)
        finally:
            slot.step, slot.said = None, None  # held until it is looked at again
            self._on_end()

    def _put_off(self, slot: WorkerStatus, deed: ActionKind, why: str) -> None:
        delay_s = slot.steps.died()
        slot.step_at_s = self._clock.now_s() + delay_s
        self._events.record(EventKind.STEP_FAILED, slot.worker_id, f"{deed}: {why.rstrip('.')}; again in {delay_s:g} s")


_TOLD = {
    ActionKind.DRAIN: EventKind.DRAINING,
    ActionKind.UNCORDON: EventKind.UNCORDONED,
    ActionKind.BECOME: EventKind.FLIPPING,
}
