"""Saves hot prefixes of workers that drain: others fetch them while the worker still answers.

    draining ──▶ held back: its acknowledgement ──▶ a request of one token a prefix, at others, with it as the source
                                                    └──▶ all saved, too late, or it has no time: acknowledged

A worker is drained once every router has acknowledged, so it waits for this: a few seconds at most, and no longer than
it leaves its requests time. What fails is left behind, and so is what would come after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.ids import new_request_id
from tandem.core.logs import event
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import WorkerState
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest
from tandem.router.routing.observed_traffic import MIN_FOLLOWERS, HotPrefix, Saving, saving
from tandem.router.routing.plan import FetchSource, Plan
from tandem.router.workers.connection import WorkerLink
from tandem.router.workers.prefix_lookup import PrefixFinder
from tandem.router.workers.table import WorkerTable

_log = logging.getLogger(__name__)
EXPECTED_S: Final = 2.0
"""Limit of the expected time of fetching a worker's prefixes, by the measured rates of links."""
LONGEST_S: Final = 4.0
"""Limit of the time that it really takes."""
_BACKLOG_BYTES = 1 << 20


class EventBook(Protocol):
    """Store of the cluster's events."""

    async def append(self, events: Sequence[ClusterEvent]) -> None:
        """Raises TandemError if they cannot be."""


class PrefixMigration:
    """Belongs to the event loop. `on_state` is called with every state of a worker; without `run` nothing is held
    back."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        table: WorkerTable,
        prefixes: PrefixFinder,
        clock: Clock,
        events: EventBook | None,
        wall_s: Callable[[], float],
    ) -> None:
        self._dispatcher, self._table, self._prefixes, self._clock = dispatcher, table, prefixes, clock
        self._events, self._wall_s = events, wall_s
        self._group: asyncio.TaskGroup | None = None
        self._runs: dict[WorkerLink, asyncio.Task[None]] = {}
        self._saved: asyncio.Queue[ClusterEvent] = asyncio.Queue()
        """Events to be written to the book; no worker waits for it."""

    async def run(self) -> None:
        """Save what is worth it, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                await self._keep_events()
        finally:
            self._group = None

    def on_state(self, link: WorkerLink) -> None:
        """It takes work again, takes none from now on, or hands its requests back."""
        run = self._runs.get(link)
        if link.state is not WorkerState.DRAINING or link.hands_back or link.keeps_blocks:
            if run is not None:
                run.cancel()
            return
        is_under_way = run is not None and not run.cancelling()
        if self._group is None or is_under_way or not self._hot(link):
            return
        link.hold()
        run = self._runs[link] = self._group.create_task(self._carry(link))
        run.add_done_callback(lambda run: self._ended(link, run))

    def _ended(self, link: WorkerLink, run: asyncio.Task[None]) -> None:
        if self._runs.get(link) is run:  # else the worker drains again, and waits for the next one
            del self._runs[link]
            link.acknowledge()

    async def _carry(self, link: WorkerLink) -> None:
        began_s, count, moved_bytes, expected_s = self._clock.now_s(), 0, 0, 0.0
        try:
            async with asyncio.timeout(LONGEST_S):
                for prefix in self._hot(link):
                    found = self._look(link, prefix)
                    if found is not None and expected_s + found.fetch_s <= EXPECTED_S:
                        expected_s += found.fetch_s
                        tokens = await self._fetch(link, prefix, found)
                        if not tokens:  # the fetching worker computed it, and would compute the next one, too
                            break
                        count, moved_bytes = count + 1, moved_bytes + int(tokens * found.token_bytes)
                    await asyncio.sleep(0)
        except TimeoutError:
            event(_log, "prefixes left behind", worker=link.worker, saved=count)
        except Exception:  # noqa: BLE001 - what is not saved is computed; the worker's drain goes on
            _log.exception("prefixes of worker %s were not saved", link.worker)
        finally:  # also of what was cut short
            if count:
                took_s = self._clock.now_s() - began_s
                what = f"{count} prefix{'es' if count > 1 else ''} of it, {moved_bytes:,} bytes, in {took_s:.2f} s"
                self._tell(link, f"others fetched {what}")

    def _tell(self, link: WorkerLink, what: str) -> None:
        event(_log, "prefixes saved", worker=link.worker, what=what)
        self._saved.put_nowait(
            ClusterEvent(time_s=self._wall_s(), kind=EventKind.PREFIXES_SAVED, subject=link.worker, reason=what)
        )

    async def _keep_events(self) -> None:
        while True:
            happened = await self._saved.get()
            if self._events is None:
                continue
            try:
                await self._events.append([happened])
            except TandemError as error:
                event(_log, "event not kept", logging.WARNING, why=error.message)

    def _hot(self, link: WorkerLink) -> list[HotPrefix]:
        """Prefixes recently requested of workers like this one, the last first."""
        every = [] if link.facts is None else self._dispatcher.hot.latest(link.facts.model)
        return [one for one in every if self._prefixes.followers(one.key) >= MIN_FOLLOWERS]

    def _look(self, link: WorkerLink, prefix: HotPrefix) -> Saving | None:
        """How to save the prefix as things stand now, None = not worth it: others may have done it."""
        if link.facts is None:
            return None
        staying = [other.facts for other in self._table.usable(link.facts.model) if other.facts is not None]
        view, now_s = self._prefixes.find(prefix.prompt, [*staying, link.facts], prefix.salt), self._clock.now_s()
        others = self._table.candidates(view, now_s, model=link.facts.model)
        return saving(prefix, self._table.candidate(link, view, now_s), others)

    async def _fetch(self, link: WorkerLink, prefix: HotPrefix, found: Saving) -> int:
        """So many tokens of it were fetched."""
        source = FetchSource(worker=link.worker, tokens=prefix.tokens)
        plan = Plan(decode=found.to.worker, prefill=None, reason="saved", sources=(source,))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        work = GenerationRequest(
            prompt=prefix.prompt, sampling=sampling, timeout_s=LONGEST_S, model=prefix.model, salt=prefix.salt
        )
        inbox = ArrivalQueue(_BACKLOG_BYTES)
        try:
            with self._dispatcher.submit(new_request_id("save"), 0, work, inbox, plan) as flight:
                while not flight.is_finished:
                    await inbox.take()
        except TandemError as error:
            event(_log, "prefix not saved", logging.WARNING, worker=link.worker, why=error.message)
            return 0
        return max(0, (flight.cached_tokens or 0) - found.to.reusable_tokens)
