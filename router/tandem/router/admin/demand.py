"""This router's reports to the planner: its latest requests, its workers' speeds, its SLO classes."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.core.demand import Demand, WorkerSeen
from tandem.core.errors import UnavailableError
from tandem.core.ids import RouterId, WorkerId
from tandem.core.logs import event
from tandem.router.admin.scaling_handlers import UniqueBlocks
from tandem.router.admission.slo_classes import SloClasses
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.workers.connection import WorkerLink
from tandem.router.workers.proto_convert import WorkerFacts
from tandem.router.workers.table import WorkerTable
from tandem.statestore.stores.planning import PlanningStore

_log = logging.getLogger(__name__)


_UNIQUE_S = 30.0
"""Interval at which blocks that only one worker holds are counted: that walks the whole index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandReporter:
    """`window_s`: how far back requests are reported. `unique_blocks` None = blocks that only one worker holds are not
    counted."""

    dispatcher: Dispatcher
    table: WorkerTable
    classes: SloClasses
    clock: Clock
    unique_blocks: UniqueBlocks | None
    window_s: float

    def demand(self, alone: Mapping[WorkerId, int] | None = None) -> Demand:
        """As things are now. `alone`: blocks that only one worker holds, by worker."""
        book, traces = self.dispatcher.demand, self.dispatcher.traces
        seen = [_seen(link, link.facts, alone or {}) for link in self.table.links if link.facts is not None]
        return Demand(
            asked=tuple(book.asked(self.dispatcher.flights, traces, self.clock.now_s(), self.window_s)),
            workers=tuple(seen),
            promises=self.classes.sections,
            link_bytes_per_s=self.table.usual_link_speed(),
        )

    async def tell(self, store: PlanningStore, router: RouterId, every_s: float) -> None:
        """Write it every `every_s` until cancelled; during an outage the planner gets nothing, and does not plan."""
        alone: Mapping[WorkerId, int] = {}
        counted_s = -math.inf
        while True:
            try:
                if self.unique_blocks is not None and self.clock.now_s() - counted_s >= _UNIQUE_S:
                    alone, counted_s = await self.unique_blocks(), self.clock.now_s()
                if not await store.tell(router, self.demand(alone)):
                    event(_log, "planner hears of no more routers", logging.WARNING, router=router)
            except UnavailableError as error:
                event(_log, "planner not told", logging.WARNING, why=error.message)
            await asyncio.sleep(every_s)


def _seen(link: WorkerLink, facts: WorkerFacts, alone: Mapping[WorkerId, int]) -> WorkerSeen:
    load = link.load
    return WorkerSeen(
        worker=facts.worker,
        role=facts.role,
        takes_work=link.takes_work,
        prefill_speed=load.prefill_speed,
        decoding_sequences=load.decoding_sequences,
        decode_step_s=load.decode_step_s,
        decode_sequence_s=load.decode_sequence_s,
        in_flight=max(load.in_flight, len(link.requests)),
        unique_prefix_bytes=alone.get(link.worker, 0) * facts.block_tokens * facts.token_kv_bytes,
        kv_tokens=min(facts.num_blocks, default=0) * facts.block_tokens,
        kv_token_bytes=facts.token_kv_bytes,
    )
