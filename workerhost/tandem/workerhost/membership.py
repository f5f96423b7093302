"""The worker's place in the cluster: registration, beats, lease, and the block events that it publishes.

The lease runs until 2.5 s after a router's last message came, or a beat that Redis took was sent (not answered: Redis
counts from when it came). Losing it for certain means a new incarnation: everything under the old one is void. While
the event loop stands a thread beats for it, up to the bound of STAND_S.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict

from redis.asyncio import Redis

from tandem.core.background_loop import LoopWatch, run_beside
from tandem.core.block_hash import BlockHash
from tandem.core.clock import Clock, MonotonicClock
from tandem.core.config import WorkerConfig
from tandem.core.errors import UnavailableError
from tandem.core.ids import GroupId, Incarnation, WorkerId, new_incarnation
from tandem.core.lease_timing import BEAT_S, LEASE_S
from tandem.core.logs import event
from tandem.core.metric_names import INDEX_PUBLISHING, REGISTRY_REFUSED, REJOINS, counter_key
from tandem.core.proto_mapping import from_proto
from tandem.core.state_enums import RoleName, WorkerState
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.connection import connect, open_client
from tandem.statestore.index.events import BlockChange, BlockEvent
from tandem.statestore.index.member_lease import WorkerLease
from tandem.statestore.index.publisher import BlockEventPublisher
from tandem.statestore.keys import Keys
from tandem.statestore.records import WorkerRecord

_log = logging.getLogger(__name__)
LEAVE_TIMEOUT_S = 1.0
INTRODUCTIONS, INTRODUCE_EVERY_S = 4, 0.03
"""Beats right after a change of role: watchers that just saw the old incarnation believe the new one once it beats."""


class Membership:
    """`join` once, then `run` until `leave`."""

    def __init__(
        self,
        config: WorkerConfig,
        on_lease: Callable[[float], None],
        on_new_incarnation: Callable[[Incarnation], None],
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._on_lease, self._on_new_incarnation = on_lease, on_new_incarnation
        self._clock = clock or MonotonicClock()
        self._keys = Keys(config.cluster)
        self._info = w.WorkerInfo()
        self._redis: Redis | None = None
        self._lease: WorkerLease | None = None
        self._publisher: BlockEventPublisher | None = None
        self._early: list[BlockEvent] = []
        self._until_s = 0.0
        self._term = threading.Lock()
        """Guards prolonging the lease, and looking if it is over: one that was seen to be over stays so."""
        self._watch = LoopWatch()
        self._rejoins = {"same": 0, "new": 0}
        self._turn = asyncio.Lock()
        """Guards the lease itself: beats, and changes of what is registered."""
        self._introductions = 0
        self._is_new = asyncio.Event()

    async def join(self, info: w.WorkerInfo) -> Incarnation:
        """Register under a fresh incarnation; raises StartupError or UnavailableError when Redis is out of reach."""
        self._redis = await connect(self._config.redis_url)
        self._lease = WorkerLease(self._redis, self._keys, clock=self._clock, held_until=lambda: self._until_s)
        self._info.CopyFrom(info)
        incarnation = new_incarnation()
        self._grant(await self._register(incarnation))
        self._publisher = BlockEventPublisher(
            self._redis, self._keys, WorkerId(info.worker), incarnation, until_ms=self._writes_until_ms
        )
        self._publisher.offer(self._early)
        return incarnation

    def acknowledged(self) -> None:
        """Prolong the lease: a router confirmed this incarnation just now.

        Too late after a lapse: such a message may have waited in a socket while this process was blocked, and others
        have given it up meanwhile. Only registering anew helps.
        """
        self._prolong(self.incarnation, self._clock.now_s())

    @property
    def redis(self) -> Redis:
        """The connection; after `join`."""
        assert self._redis is not None
        return self._redis

    @property
    def keys(self) -> Keys:
        return self._keys

    @property
    def incarnation(self) -> Incarnation:
        """The registered one, or the one about to be."""
        return Incarnation(self._info.incarnation)

    @property
    def has_lapsed(self) -> bool:
        """True if this incarnation was not acknowledged for a whole lease."""
        with self._term:
            return self._clock.now_s() >= self._until_s

    def publish(self, changes: Iterable[tuple[GroupId, BlockHash, bool]]) -> None:
        """Queue (group, hash, is removed) for the index; never blocks."""
        events = [
            BlockEvent(BlockChange.REMOVED if is_removed else BlockChange.STORED, (block,), group)
            for group, block, is_removed in changes
        ]
        if self._publisher is None:
            self._early.extend(events)
        else:
            self._publisher.offer(events)

    def counters(self) -> dict[str, float]:
        """Counts of publishing, by the keys of a load report."""
        published = {} if self._publisher is None else asdict(self._publisher.counters)
        refused = {} if self._lease is None else asdict(self._lease.counters)
        return (
            {counter_key(INDEX_PUBLISHING, kind=kind): float(count) for kind, count in published.items()}
            | {counter_key(REGISTRY_REFUSED, reason=reason): float(count) for reason, count in refused.items()}
            | {counter_key(REJOINS, incarnation=which): float(count) for which, count in self._rejoins.items()}
        )

    async def run(self) -> None:
        """Beat and publish until cancelled."""
        assert self._publisher is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publisher.run())
            tasks.create_task(self._beat())
            tasks.create_task(self._watch.run())
            tasks.create_task(run_beside(self._beat_beside, "lease"))

    async def say_state(self, state: WorkerState) -> None:
        """Record this state of the worker in the registry, now and whenever it registers anew. Raises UnavailableError
        if Redis does not answer."""
        assert self._lease is not None
        self._info.state = state.value
        async with self._turn:
            await self._lease.amend(_record(self._info))

    async def take_role(self, role: RoleName) -> Incarnation:
        """Register under a fresh incarnation, with this role and ready for work.

        Raises UnavailableError if Redis does not answer: then this worker keeps its incarnation. Should the
        registration have come through all the same, the next beat finds it and puts the old one back.
        """
        assert self._lease is not None
        assert self._publisher is not None
        info = w.WorkerInfo()
        async with self._turn:
            info.CopyFrom(self._info)
            info.role, info.state, info.incarnation = role.value, WorkerState.READY.value, new_incarnation()
            asked_s = self._clock.now_s()
            await self._lease.register(_record(info))
            self._info.CopyFrom(info)
            self._publisher.renew(self.incarnation)
            self._grant(asked_s)
        self._introductions = INTRODUCTIONS
        self._is_new.set()
        return self.incarnation

    async def leave(self) -> None:
        """Give the lease up, so that routers know at once."""
        if self._lease is None or self._redis is None:
            return
        try:
            await asyncio.wait_for(self._lease.deregister(), LEAVE_TIMEOUT_S)
        except (UnavailableError, TimeoutError) as error:
            event(_log, "could not deregister", logging.WARNING, error=error)

    async def close(self) -> None:
        """Close the connection; after `run` ended."""
        if self._redis is not None:
            await self._redis.aclose()

    async def _beat(self) -> None:
        assert self._lease is not None
        assert self._publisher is not None
        while True:
            try:
                async with self._turn:
                    asked_s = self._clock.now_s()
                    if self.has_lapsed or not await self._lease.beat(*self._publisher.position):
                        await self._rejoin()
                    else:
                        self._prolong(self.incarnation, asked_s)
                    if self._introductions:
                        await self._lease.announce()
            except UnavailableError as error:
                event(_log, "beat not acknowledged", logging.WARNING, error=error)
            await self._until_next_beat()

    async def _beat_beside(self) -> None:
        """On a loop beside the worker's: beat in its place while it is blocked. A refused beat is handled later, by the
        worker's own loop."""
        redis = open_client(self._config.redis_url)
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                if not self._watch.stands or self._watch.is_given_up or self.has_lapsed:
                    continue
                assert self._lease is not None
                assert self._publisher is not None
                incarnation, asked_s = self.incarnation, self._clock.now_s()
                try:
                    if await self._lease.beat(*self._publisher.position, over=redis):
                        self._prolong(incarnation, asked_s)
                except UnavailableError as error:
                    event(_log, "beat not acknowledged", logging.WARNING, error=error)
        finally:
            await redis.aclose()

    async def _until_next_beat(self) -> None:
        if self._introductions:
            self._introductions -= 1
            await asyncio.sleep(INTRODUCE_EVERY_S)
            return
        try:
            async with asyncio.timeout(BEAT_S):
                await self._is_new.wait()
        except TimeoutError:
            return
        self._is_new.clear()

    async def _rejoin(self) -> None:
        """The lease lapsed, or the registry does not know this incarnation.

        If it never lapses by this process's clock, not even while it registers (a router went on acknowledging, or
        Redis lost its data between two beats), nothing was fenced: register the same one again."""
        assert self._publisher is not None
        if not self.has_lapsed:
            asked_s = await self._register(Incarnation(self._info.incarnation))
            if not self.has_lapsed:
                self._publisher.renew(self.incarnation)
                self._grant(asked_s)
                self._rejoins["same"] += 1
                return
        incarnation = new_incarnation()
        asked_s = await self._register(incarnation)
        self._publisher.renew(incarnation)
        self._grant(asked_s)
        self._rejoins["new"] += 1
        self._on_new_incarnation(incarnation)

    def _writes_until_ms(self) -> int | None:
        assert self._lease is not None
        return None if self.has_lapsed else self._lease.deadline_ms

    async def _register(self, incarnation: Incarnation) -> float:
        """Register and return the time of the call; the caller takes the lease from then on."""
        assert self._lease is not None
        self._info.incarnation = incarnation
        asked_s = self._clock.now_s()
        await self._lease.register(_record(self._info))
        return asked_s

    def _grant(self, heard_s: float) -> None:
        """Hold the lease from `heard_s` on, unless it was already held from a later moment on."""
        with self._term:
            self._extend(heard_s)

    def _prolong(self, incarnation: Incarnation, heard_s: float) -> None:
        """The same for an incarnation that holds it, from any thread; nothing if it lapsed or was replaced."""
        with self._term:
            if incarnation == self.incarnation and self._clock.now_s() < self._until_s:
                self._extend(heard_s)

    def _extend(self, heard_s: float) -> None:
        self._until_s = max(self._until_s, heard_s + LEASE_S)
        self._on_lease(self._until_s)


def _record(info: w.WorkerInfo) -> WorkerRecord:
    return from_proto(WorkerRecord, info, state=info.state or WorkerState.READY.value)
