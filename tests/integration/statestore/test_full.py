"""Redis has reached its maxmemory: what clients leave is refused, and everything that the cluster lives by goes on."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.api_keys import KeyWish, Scope, draw
from tandem.core.batch import BatchRecord, FileRecord
from tandem.core.config import BudgetSection
from tandem.core.desired import DesiredState, Pool
from tandem.core.errors import UnavailableError
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.ids import Incarnation, new_incarnation
from tandem.core.state_enums import RoleName
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.member_lease import RouterLease
from tandem.statestore.index.registry import RegistryWatcher
from tandem.statestore.keys import Keys, Member
from tandem.statestore.records import RouterRecord
from tandem.statestore.stores.api_keys import ApiKeyStore
from tandem.statestore.stores.batches import BatchStore
from tandem.statestore.stores.budgets import BudgetStore, Charge
from tandem.statestore.stores.desired import DesiredStateStore
from tandem.statestore.stores.events import ClusterEventStore
from tandem.statestore.stores.files import FileStore
from tandem.statestore.stores.owner_lease import OwnerLease
from tandem.statestore.stores.responses import ResponseStore, StoredResponse

KEYS = Keys("test")
MAX_BYTES = 24 * 1024 * 1024
LEASE_S = 2.0


@pytest.fixture
def full(tmp_path: Path, client: Any) -> Iterator[PrivateRedis]:
    """A server that responses have filled to its maxmemory."""
    with PrivateRedis.start(tmp_path / "redis", "a secret", memory_bytes=MAX_BYTES) as server:

        async def fill() -> None:
            async with client(server.url) as redis:
                store = ResponseStore(redis, KEYS, 1000.0, 1 << 40)
                with pytest.raises(UnavailableError, match="maxmemory"):
                    await _save_all(store)
                # Memory of connections comes and goes: not so near to the bound that a small one fits at times.
                await redis.config_set("maxmemory", (await redis.info("memory"))["used_memory"] - 300_000)

        asyncio.run(fill())
        yield server


async def _save_all(store: ResponseStore) -> None:
    for number in range(1000):
        assert await store.save(response(number, 200_000))


def response(number: int, size: int) -> StoredResponse:
    return StoredResponse(id=f"resp_{number}", tenant="t", body=b"b" * size, items=b"[]", turn=b"[]")


async def test_leases_of_workers_hold_and_new_ones_are_seen(
    full: PrivateRedis, client: Any, hosted_worker: Any
) -> None:
    async with client(full.url) as redis:
        worker = hosted_worker(redis, KEYS, "w1", lease_s=LEASE_S)
        await worker.register()
        for _ in range(3):
            await redis.pexpire(KEYS.lease(Member.WORKER, "w1"), 1000)
            assert await worker.lease.beat(*worker.publisher.position)
            assert await redis.pttl(KEYS.lease(Member.WORKER, "w1")) > 1000
        found: asyncio.Queue[Any] = asyncio.Queue()
        watcher = RegistryWatcher(redis, KEYS, lease_s=LEASE_S)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watcher.run(lambda records: found.put_nowait(dict(records))))
            assert set(await found.get()) == {"w1"}
            watching.cancel()
        await redis.srem(KEYS.members(Member.WORKER), "w1")  # flushed, or forgotten
        assert await worker.lease.beat(*worker.publisher.position)
        assert await redis.sismember(KEYS.members(Member.WORKER), "w1")
        assert await worker.lease.amend(worker.record())
        assert await redis.pttl(KEYS.lease(Member.WORKER, "w1")) > 0
        router = RouterLease(redis, KEYS, lease_s=LEASE_S)
        await router.register(RouterRecord(router="r1", incarnation=new_incarnation()))  # type: ignore[arg-type]
        assert await router.beat()
        assert await worker.lease.deregister()


async def test_keys_are_made_and_revoked(full: PrivateRedis, client: Any) -> None:
    async with client(full.url) as redis:
        store = ApiKeyStore(redis, KEYS)
        _, key = draw(KeyWish(tenant="a", scopes=(Scope.INFER,)), 1000)
        await store.add(key)
        assert await store.all() == [key]
        assert await store.revoke(key.id, 2000.0)
        assert (await store.all(), await store.revoked()) == ([], [key.id])


async def test_budgets_count_for_all_routers(full: PrivateRedis, client: Any) -> None:
    async with client(full.url) as redis:
        store = BudgetStore(redis, KEYS)
        budget = BudgetSection(requests_per_minute=6)
        assert await store.spend("t", budget, Charge(requests=1, tokens=1)) == 0.0
        assert await store.spend("t", budget, Charge(requests=1, tokens=1)) > 0.0


async def test_the_desired_state_changes_and_events_are_kept(full: PrivateRedis, client: Any) -> None:
    async with client(full.url) as redis:
        desired, events = DesiredStateStore(redis, KEYS), ClusterEventStore(redis, KEYS, max_events=3)
        pool = Pool(name="m", model="x", role=RoleName.MIXED, count=1)
        first = DesiredState(version=1, pools=(pool,)).filled()
        assert await desired.save(first, 0)
        second = replace(first, version=2, pools=(replace(pool, count=3),), members=()).filled()
        assert await desired.save(second, 1)
        assert (await desired.dated())[0] == await desired.load() == second
        happened = [ClusterEvent(time_s=float(n), kind=EventKind.STARTED, subject="w", reason=str(n)) for n in range(5)]
        await events.append(happened)
        assert [event for _, event in await events.last(9)] == happened[2:]


async def test_one_router_owns_batches(full: PrivateRedis, client: Any) -> None:
    async with client(full.url) as redis:
        lease = OwnerLease(redis, KEYS.batch_owner, LEASE_S)
        assert await lease.hold(Incarnation(7))
        assert await lease.hold(Incarnation(7))
        assert not await lease.hold(Incarnation(8))
        assert await lease.release(Incarnation(7))


async def test_what_clients_leave_is_refused_and_deleting_makes_room(full: PrivateRedis, client: Any) -> None:
    async with client(full.url) as redis:
        responses, files, batches = (
            ResponseStore(redis, KEYS, 1000.0, 1 << 40),
            FileStore(redis, KEYS),
            BatchStore(redis, KEYS),
        )
        file = FileRecord(id="file-1", tenant="t", purpose="batch", name="n", created_s=1)
        batch = BatchRecord(id="batch_1", tenant="t", endpoint="/", input_file="file-1", created_s=1, expires_s=2)
        for call in (
            responses.save(response(1_000_000, 100)),
            files.begin(file, 1 << 40),
            batches.open_new(batch, input_bytes=1, most_open=9, most_bytes=1 << 40),
        ):
            with pytest.raises(UnavailableError, match="maxmemory"):
                await call
        assert await responses.load("t", "resp_0") is not None
        assert await responses.turns("t", ["resp_0"]) == [b"[]"]
        await files.forget("file-1")  # deleting is not refused, even of what is not there
        before = await responses.kept_bytes("t")
        for number in range(3):
            await responses.delete("t", f"resp_{number}")
        assert await responses.kept_bytes("t") < before - 600_000
        assert await responses.save(response(1_000_000, 100))
        assert await files.begin(file, 1 << 40)
