"""Three routers on one Redis find as many prefixes as one: each sees published blocks, and the others' dispatches."""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tandem.core.block_hash import BlockHash
from tandem.core.clock import ManualClock
from tandem.core.config import Disaggregation
from tandem.core.ids import Incarnation, WorkerId, new_incarnation
from tandem.core.state_enums import RoleName
from tandem.router.routing.plan import Candidate, Job
from tandem.router.routing.policies.cost import CostPolicy
from tandem.router.workers.prefix_lookup import PrefixFinder
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.events import BlockChange, BlockEvent
from tandem.statestore.index.publisher import BlockEventPublisher
from tandem.statestore.index.registry import WorkerLease
from tandem.statestore.index.replica import IndexReplica
from tandem.statestore.index.shared_speculation import SharedSpeculation
from tandem.statestore.index.speculation import PENDING_S
from tandem.statestore.keys import Keys
from tandem.statestore.records import WorkerRecord
from tests.unit.router.facts import facts
from tools.waiting import wait_for_async

SALT, BLOCK = b"tenant", 16
WORKERS, CACHE_BLOCKS = 4, 600
REQUESTS, AT_ONCE = 1200, 6
FAMILIES, FAMILY_BLOCKS = 60, 20
ALLOWED = 0.02
"""Of the hit rate, that three routers may have less."""


class Worker:
    """A prefix cache with LRU eviction that publishes to Redis."""

    def __init__(self, redis: Any, keys: Keys, number: int) -> None:
        self.facts = facts(f"p{number}", RoleName.MIXED, incarnation=new_incarnation())
        self._cache: OrderedDict[BlockHash, None] = OrderedDict()
        self._lease = WorkerLease(redis, keys, lease_s=600)
        self.publisher = BlockEventPublisher(redis, keys, self.facts.worker, self.facts.incarnation)

    async def register(self) -> None:
        worker, incarnation = self.facts.worker, self.facts.incarnation
        await self._lease.register(
            WorkerRecord(worker=worker, incarnation=incarnation, role="mixed", address="", model="m", fingerprint="f")
        )

    def compute(self, hashes: list[BlockHash]) -> int:
        """Return how many of a prompt's blocks were here."""
        hits = 0
        while hits < len(hashes) and hashes[hits] in self._cache:
            hits += 1
        for block in reversed(hashes):  # so that the last blocks go first
            self._cache[block] = None
            self._cache.move_to_end(block)
        gone = [self._cache.popitem(last=False)[0] for _ in range(max(0, len(self._cache) - CACHE_BLOCKS))]
        stored = tuple(block for block in hashes[hits:] if block in self._cache)
        self.publisher.offer([BlockEvent(BlockChange.STORED, stored), BlockEvent(BlockChange.REMOVED, tuple(gone))])
        return hits


class Router:
    """A router's knowledge and decisions: index, own dispatches, cost. Reports carry the work of others."""

    def __init__(self, redis: Any, keys: Keys, clock: ManualClock) -> None:
        self.replica = IndexReplica(redis, keys)
        self.speculation = SharedSpeculation(redis, keys, clock, new_incarnation())
        self._finder = PrefixFinder(self.replica, SALT, speculation=self.speculation)
        self._policy = CostPolicy(Disaggregation.NEVER)
        self._pending: dict[WorkerId, int] = {}
        self._used: dict[WorkerId, int] = {}
        self._uses = 0

    def follow(self, workers: Mapping[WorkerId, Worker]) -> None:
        self.replica.set_workers({name: worker.facts.incarnation for name, worker in workers.items()})

    def send(
        self, request: str, prompt: list[int], workers: Mapping[WorkerId, Worker]
    ) -> tuple[WorkerId, list[BlockHash]]:
        view = self._finder.find(prompt, [worker.facts for worker in workers.values()])
        candidates = [
            Candidate(
                worker=name,
                incarnation=worker.facts.incarnation,
                role=RoleName.MIXED,
                queued_tokens=self._pending.get(name, 0),
                reusable_tokens=view.reusable_tokens.get(name, 0),
                last_used=self._used.get(name, 0),
            )
            for name, worker in workers.items()
        ]
        chosen = self._policy.plan(Job(prompt_tokens=len(prompt), max_tokens=1), candidates).decode
        self._finder.expect(request, workers[chosen].facts, view)
        self._uses += 1
        self._used[chosen] = self._uses
        known = view.reusable_tokens.get(chosen, 0)
        self._pending[chosen] = self._pending.get(chosen, 0) + len(prompt) - known
        return chosen, list(view.hashes[chosen])

    def done(self, request: str, worker: WorkerId) -> None:
        self._finder.settle(request, worker)
        self._pending.clear()


def prompts() -> list[list[int]]:
    """Some families are asked about far more often than others; every prompt ends in a question of its own."""
    rng = random.Random(4)
    found = []
    for _ in range(REQUESTS):
        family = min(int(rng.paretovariate(0.6)) - 1, FAMILIES - 1)
        shared = [(977 * family + 13 * k * k + k) % 3000 for k in range(FAMILY_BLOCKS * BLOCK)]
        found.append([*shared, *(rng.randrange(3000) for _ in range(rng.randrange(1, 5 * BLOCK)))])
    return found


async def hit_rate(url: str, cluster: str, count: int) -> float:
    """Return the blocks found of all blocks asked for, when `count` routers take turns; requests arrive AT_ONCE at a
    time, late enough for reports to arrive, and the index follows in between."""
    keys, rng, clock = Keys(cluster), random.Random(5), ManualClock()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        redis = await connect(url)
        stack.push_async_callback(redis.aclose)
        every = [Worker(redis, keys, number) for number in range(WORKERS)]
        workers = {worker.facts.worker: worker for worker in every}
        routers = [Router(redis, keys, clock) for _ in range(count)]
        for worker in every:
            await worker.register()
        tasks = [group.create_task(worker.publisher.run()) for worker in every]
        tasks += [group.create_task(router.replica.run()) for router in routers]
        tasks += [group.create_task(router.speculation.run()) for router in routers]
        for router in routers:
            router.follow(workers)
        hits = asked = 0

        def has_followed() -> bool:
            written = {name: worker.publisher.position for name, worker in workers.items()}
            idle = all(worker.publisher.is_idle for worker in every)
            return idle and all(router.replica.positions == written for router in routers)

        def have_heard() -> bool:
            told = sum(router.speculation.told for router in routers)
            return all(router.speculation.heard == told - router.speculation.told for router in routers)

        while (await redis.pubsub_numsub(keys.sent_channel))[0][1] < count:
            await asyncio.sleep(0.001)
        await _until_they_know_each_other(routers, clock)
        queue = list(enumerate(prompts()))
        for start in range(0, len(queue), AT_ONCE):
            await wait_for_async(has_followed)
            sent = []
            for number, prompt in queue[start : start + AT_ONCE]:
                router = rng.choice(routers)
                sent.append((router, f"r{number}", *router.send(f"r{number}", prompt, workers)))
                await wait_for_async(have_heard)
            for router, request, worker_id, hashes in sent:
                hits += workers[worker_id].compute(hashes)
                asked += len(hashes)
                router.done(request, worker_id)
            clock.advance(PENDING_S)  # dispatches have expired everywhere; the index has them
        for task in tasks:
            task.cancel()
    return hits / asked


async def _until_they_know_each_other(routers: Sequence[Router], clock: ManualClock) -> None:
    """Wait until they know each other: a router that believes it is the only one sends no reports."""
    lone = [router.speculation for router in routers] if len(routers) > 1 else []
    while lone := [speculation for speculation in lone if speculation.is_alone]:
        clock.advance(PENDING_S)
        for speculation in lone:
            speculation.expect("hello", WorkerId("nobody"), Incarnation(1), [BlockHash(bytes(16))])
        await asyncio.sleep(0.01)
    told = sum(router.speculation.told for router in routers)
    await wait_for_async(lambda: all(one.speculation.heard == told - one.speculation.told for one in routers))


def test_three_routers_hit_like_one(tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path / "redis", "a secret") as server:
        one = asyncio.run(hit_rate(server.url, "one", 1))
        three = asyncio.run(hit_rate(server.url, "three", 3))
    print(f"hit rate {one:.4f} with one router, {three:.4f} with three")
    assert one > 0.5
    assert three >= one * (1 - ALLOWED)
