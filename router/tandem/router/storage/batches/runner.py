"""Runs the batches of the cluster on one router at a time: the one that holds the lease on the directory.

The lease is fenced by an incarnation that is drawn anew each time it is taken. Losing it stops everything at once; the
store refuses the writes of an owner that has not noticed yet, and its journal segments are its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from tandem.core.clock import Clock
from tandem.core.errors import TandemError, UnavailableError
from tandem.core.ids import Incarnation, new_incarnation
from tandem.core.logs import event
from tandem.router.storage.batches.concurrency import Pace, Slots
from tandem.router.storage.batches.executor import BatchContext, BatchRun, Calls, LeaseLostError
from tandem.router.storage.batches.input_file import Limits
from tandem.router.storage.batches.turns import OpenBatch, Turns
from tandem.router.storage.files import Files, sweep
from tandem.statestore.pubsub import Wakeups
from tandem.statestore.stores.batches import BatchStore
from tandem.statestore.stores.owner_lease import OwnerLease

_log = logging.getLogger(__name__)
LEASE_S = 5.0
BEAT_S = 1.0
AT_ONCE = 8
"""Batches that run side by side; the others wait for their turn."""
PACE_S = 0.1
SWEEP_S = 30.0
LOOK_S = 2.0


class BatchRunner:
    """`run` in a task for as long as the router serves; cancelling it gives the lease to another router at once.

    `waiting` returns how many interactive requests wait now; `models` which names are served; `serves` True if a tenant
    may still ask for anything.
    """

    def __init__(
        self,
        *,
        batches: BatchStore,
        files: Files,
        lease: OwnerLease,
        wakeups: Wakeups,
        calls: Calls,
        clock: Clock,
        models: Callable[[], frozenset[str]],
        waiting: Callable[[], int],
        serves: Callable[[str], bool],
        limits: Limits,
        at_once: int,
    ) -> None:
        self._batches, self._files, self._lease, self._wakeups = batches, files, lease, wakeups
        self._calls, self._clock, self._models, self._waiting = calls, clock, models, waiting
        self._limits, self._serves = limits, serves
        self._known: dict[str, OpenBatch] = {}
        self._slots = Slots()
        self._pace = Pace(at_once)

    @property
    def running(self) -> int:
        """Requests of batches that run now."""
        return self._slots.running

    async def run(self) -> None:
        """Own the directory whenever no other router does, until cancelled. Survives outages of Redis and of the
        disk."""
        trouble = ""
        while True:
            incarnation = new_incarnation()
            try:
                await self._files.check()
                if await self._lease.hold(incarnation):
                    trouble = ""
                    await self._own(incarnation)
            except TandemError as error:
                if error.message != trouble:  # once, not once a second
                    trouble = error.message
                    event(_log, "batches wait", logging.WARNING, why=trouble)
            await asyncio.sleep(BEAT_S)

    async def _own(self, incarnation: Incarnation) -> None:
        event(_log, "runs batches", incarnation=incarnation)
        work = asyncio.create_task(self._work(incarnation))
        try:
            await self._hold_on(incarnation, work)
        finally:
            work.cancel()
            await asyncio.wait([work])
            with suppress(UnavailableError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._lease.release(incarnation)
            event(_log, "runs no batches any more", incarnation=incarnation)
        if not work.cancelled() and (error := work.exception()) is not None:
            _log.error("batches stopped", exc_info=error)

    async def _hold_on(self, incarnation: Incarnation, work: asyncio.Task[None]) -> None:
        """Renew the lease; returns when it is lost, may be lost, or the work has ended by itself."""
        held_until_s = self._clock.now_s() + LEASE_S
        while not work.done():
            await asyncio.wait([work], timeout=BEAT_S)
            asked_s = self._clock.now_s()
            try:
                async with asyncio.timeout(max(0.1, held_until_s - asked_s)):
                    if not await self._lease.hold(incarnation):
                        return
                held_until_s = asked_s + LEASE_S
            except (UnavailableError, TimeoutError):
                if self._clock.now_s() >= held_until_s:
                    return

    async def _work(self, incarnation: Incarnation) -> None:
        shop = BatchContext(
            incarnation=incarnation,
            batches=self._batches,
            files=self._files.store,
            folder=self._files.folder,
            slots=self._slots,
            calls=self._calls,
            clock=self._clock,
            wall_s=self._files.wall_s,
            models=self._models,
            limits=self._limits,
            file_expiry_s=self._files.expiry_s,
            check_room=self._files.check_room,
            serves=self._serves,
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._wakeups.run())
                group.create_task(self._keep_pace())
                group.create_task(self._keep_clean())
                await self._start_runs(shop, group)
        except* LeaseLostError:
            event(_log, "batches are another router's now", incarnation=incarnation)

    async def _start_runs(self, shop: BatchContext, group: asyncio.TaskGroup) -> None:
        turns = Turns(AT_ONCE)
        runs: dict[str, BatchRun] = {}
        while True:
            with suppress(UnavailableError):
                for batch in turns.begin(await self._opened(), self._clock.now_s()):
                    group.create_task(self._run_one(shop, batch, turns, runs))
            for batch in turns.leave(self._clock.now_s()):
                if batch in runs:
                    runs[batch].leave()
            await self._wakeups.wait(LOOK_S)

    async def _opened(self) -> dict[str, OpenBatch]:
        """All that can be read: the others keep none from a turn."""
        ids = await self._batches.open()
        self._known = {batch: self._known[batch] for batch in ids if batch in self._known}
        for record in await self._batches.load_all([batch for batch in ids if batch not in self._known]):
            self._known[record.id] = OpenBatch(record.tenant, record.created_s)
        return self._known

    async def _run_one(self, shop: BatchContext, batch: str, turns: Turns, runs: dict[str, BatchRun]) -> None:
        """One batch as far as it goes now; after trouble it rests, and gives its turn to the next."""
        try:
            record = await self._batches.load(batch)
            if record is None:  # gone from the store, which may have forgotten its last second
                turns.cut_off(batch, self._clock.now_s())
                return
            runs[batch] = BatchRun(shop, record)
            await runs[batch].run()
            turns.ended(batch)
        except LeaseLostError:
            raise
        except UnavailableError as error:
            turns.cut_off(batch, self._clock.now_s())
            event(_log, "batch interrupted", logging.WARNING, batch=batch, why=str(error))
        except (OSError, TandemError) as error:
            rest_s = turns.failed(batch, self._clock.now_s())
            event(_log, "batch interrupted", logging.WARNING, batch=batch, why=str(error), rests_s=rest_s)
        except Exception:  # noqa: BLE001 - one batch must not stop the others; it is tried again, ever more rarely
            turns.failed(batch, self._clock.now_s())
            _log.exception("batch failed", extra={"fields": {"batch": batch}})
        finally:
            runs.pop(batch, None)
            self._wakeups.ring()  # another batch may begin

    async def _keep_pace(self) -> None:
        while True:
            self._slots.allow(self._pace.look(self._clock.now_s(), self._waiting(), self._slots.running))
            await asyncio.sleep(PACE_S)

    async def _keep_clean(self) -> None:
        while True:
            try:
                await sweep(self._files, self._batches)
            except (OSError, UnavailableError) as error:
                event(_log, "files not swept", logging.WARNING, why=str(error))
            except Exception:  # noqa: BLE001 - batches run all the same
                _log.exception("files not swept")
            await asyncio.sleep(SWEEP_S)
