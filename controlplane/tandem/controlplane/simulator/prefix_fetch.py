"""Prefixes that one worker gets from another before a request runs (workercore/prefix_client.py and prefix_server.py).

    asked ──▶ pinned at the source, reserved here ──ticket──▶ on the wire ──▶ cached here ──▶ the request runs

Every message is read between two steps, so a fetch waits for steps in progress at both ends. Nothing fails here; where
nothing is to be gained, or blocks are short, the next source is asked or the request computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tandem.controlplane.simulator.handoff import SimulatedNetwork
from tandem.controlplane.simulator.simulated_request import SimulatedRequest
from tandem.controlplane.simulator.worker import VirtualWorker
from tandem.core.block_hash import BlockHash
from tandem.core.ids import BlockId
from tandem.core.ledger import Holder, HoldKind
from tandem.router.routing.plan import FetchSource
from tandem.workercore import peer_block_quota


@dataclass(slots=True, kw_only=True)
class _SimulatedFetch:
    flight: SimulatedRequest
    hashes: list[BlockHash]
    """Hashes that the request can use: its last token is always computed."""
    sources: deque[FetchSource]
    source: VirtualWorker
    blocks: tuple[BlockId, ...] = ()
    reserved: int = 0

    @property
    def receiver(self) -> Holder:
        return Holder(HoldKind.RESERVED, f"fetch-{self.flight.key}#1/1")

    @property
    def sender(self) -> Holder:
        return Holder(HoldKind.PUSHING, f"fetch-{self.flight.key}#1/1")


class Fetches:
    """All fetches of one worker. `run` gets every request, at once or when its fetch has ended."""

    def __init__(self, worker: VirtualWorker, net: SimulatedNetwork, run: Callable[[SimulatedRequest], None]) -> None:
        self._worker, self._net, self._run = worker, net, run
        self._ledger = worker.space.ledgers[0]
        self._held_blocks = 0

    def begin(self, flight: SimulatedRequest) -> None:
        """Begin a fetch. To be called from an action of the worker."""
        size = self._worker.space.block_tokens
        hashes = flight.hashes[: (flight.request.prompt_tokens - 1) // size]
        own = len(self._ledger.match(hashes))
        useful = deque(s for s in flight.plan.sources if min(s.tokens // size, len(hashes)) > own)
        self._next(flight, hashes, useful)

    def _next(self, flight: SimulatedRequest, hashes: list[BlockHash], sources: deque[FetchSource]) -> None:
        if not sources:
            self._run(flight)
            return
        source = self._net.workers[sources.popleft().worker]
        fetch = _SimulatedFetch(flight=flight, hashes=hashes, sources=sources, source=source)
        self._net.tell(source, partial(self._asked, fetch))

    def _asked(self, fetch: _SimulatedFetch) -> None:
        """At the source: pin the blocks that are there."""
        ledger = fetch.source.space.ledgers[0]
        held = ledger.match(fetch.hashes)
        ledger.share(fetch.sender, held)
        self._net.tell(self._worker, partial(self._offered, fetch, len(held)))

    def _offered(self, fetch: _SimulatedFetch, count: int) -> None:
        hashes, space, scheduler = fetch.hashes[:count], self._worker.space, self._worker.scheduler
        if len(self._ledger.match(hashes)) == count:
            self._unpin(fetch)
            self._next(fetch.flight, fetch.hashes, fetch.sources)
            return
        is_short = scheduler.has_preempted or scheduler.is_starved
        is_over = peer_block_quota.is_over([self._held_blocks], [count], [self._ledger.num_blocks])
        room = None
        if not is_short and not is_over:
            room = space.reserve(fetch.receiver, hashes, count, scheduler.running_sequences)
        if room is None:
            self._unpin(fetch)
            self._run(fetch.flight)
            return
        hits = room[0].hits
        fetch.blocks, fetch.reserved = tuple(room[0].blocks[hits:]), count
        self._held_blocks += count
        self._net.tell(fetch.source, partial(self._push, fetch, hashes[hits:]))

    def _push(self, fetch: _SimulatedFetch, hashes: list[BlockHash]) -> None:
        """At the source: push all blocks at once."""
        now_s = self._net.events.now_s()
        size_bytes = len(hashes) * self._worker.calibration.block_bytes
        there_s = self._net.wires.send(fetch.source.worker, self._worker.worker, size_bytes, from_s=now_s, last_s=now_s)
        self._net.events.at(there_s, partial(self._worker.post, partial(self._verified, fetch, hashes)))
        self._net.events.at(there_s, partial(fetch.source.post, partial(self._released, fetch)))

    def _verified(self, fetch: _SimulatedFetch, hashes: list[BlockHash]) -> None:
        for block, block_hash in zip(fetch.blocks, hashes, strict=True):
            self._ledger.publish(block, block_hash)
        self._ledger.release(fetch.receiver)
        self._held_blocks -= fetch.reserved
        fetch.flight.fetched_tokens = len(hashes) * self._worker.space.block_tokens
        self._run(fetch.flight)

    def _unpin(self, fetch: _SimulatedFetch) -> None:
        self._net.tell(fetch.source, partial(self._released, fetch))

    def _released(self, fetch: _SimulatedFetch) -> None:
        fetch.source.space.ledgers[0].release(fetch.sender)
