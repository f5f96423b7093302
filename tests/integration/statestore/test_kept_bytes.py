"""Tenants' stored bytes are counted exactly, through every change, and refused beyond the bound; on a real server."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.batch import BatchRecord, BatchStatus, FileRecord
from tandem.core.ids import Incarnation
from tandem.statestore.keys import Keys
from tandem.statestore.stores.batches import BatchStore, Opened, Saved
from tandem.statestore.stores.files import FileStore
from tandem.statestore.stores.owner_lease import OwnerLease
from tandem.statestore.stores.record_store import LEAST_CHARGE_BYTES
from tandem.statestore.stores.responses import OVERHEAD_BYTES, ResponseStore, StoredResponse

KEYS = Keys("test")
ME = Incarnation(7)
KB = 1024


def response(name: str, size: int, tenant: str = "t", chain: tuple[str, ...] = ()) -> StoredResponse:
    return StoredResponse(id=name, tenant=tenant, body=b"b" * size, items=b"[]", turn=b"[]", chain=chain)


async def truth(redis: Any, tenant: str, names: list[str]) -> int:
    """Return the counted bytes of a tenant's existing responses, read one by one."""
    total = 0
    for name in names:
        fields = await redis.hgetall(KEYS.response(name))
        if fields.get(b"tenant") == tenant.encode():
            total += OVERHEAD_BYTES + sum(len(text) for text in fields.values())
    return total


async def test_one_that_fits_and_one_that_does_not(redis: Any) -> None:
    first = response("resp_1", 5 * KB)
    store = ResponseStore(redis, KEYS, 100.0, first.size_bytes + 2 * KB)
    assert await store.kept_bytes("t") == 0
    assert await store.save(first)
    assert await store.save(first)  # the same call again, as after a lost answer
    assert await store.kept_bytes("t") == first.size_bytes == await truth(redis, "t", ["resp_1"])
    assert not await store.save(response("resp_2", 2 * KB))
    assert await store.load("t", "resp_2") is None
    assert await store.save(response("resp_2", 2 * KB, "other"))
    await store.delete("t", "resp_1")
    await store.delete("t", "resp_1")
    assert await store.kept_bytes("t") == 0
    assert await store.save(response("resp_3", 2 * KB))


async def test_what_expired_is_given_back_and_nothing_of_the_books_stays(redis: Any, until: Any) -> None:
    async def is_empty() -> bool:
        return not await redis.dbsize()

    one = response("resp_1", KB)
    store = ResponseStore(redis, KEYS, 0.3, one.size_bytes)
    assert await store.save(one)
    assert not await store.save(response("resp_2", KB))
    await until(lambda: store.save(response("resp_2", KB)))
    assert await store.kept_bytes("t") == one.size_bytes
    await until(is_empty)


async def test_what_is_continued_counts_for_as_long_as_it_stays(redis: Any, until: Any) -> None:
    short, long = ResponseStore(redis, KEYS, 0.3, KB * KB), ResponseStore(redis, KEYS, 100.0, KB * KB)
    assert await short.save(response("resp_1", KB))
    assert await short.save(response("resp_2", KB))
    assert await long.turns("t", ["resp_1"]) == [b"[]"]

    async def one_is_gone() -> bool:
        return await short.load("t", "resp_2") is None

    await until(one_is_gone)
    assert await long.kept_bytes("t") == await truth(redis, "t", ["resp_1", "resp_2"]) > 0


async def test_one_of_an_older_release_counts_once_it_is_continued(redis: Any) -> None:
    store = ResponseStore(redis, KEYS, 100.0, KB * KB)
    await redis.hset(KEYS.response("resp_1"), mapping=response("resp_1", KB).fields)
    assert await store.kept_bytes("t") == 0
    await store.turns("t", ["resp_1"])
    assert await store.kept_bytes("t") == await truth(redis, "t", ["resp_1"]) > 0
    await store.delete("t", "resp_1")
    assert await store.kept_bytes("t") == 0


@pytest.mark.parametrize("case", range(3))
async def test_the_sum_is_exact_after_anything(redis: Any, case: int) -> None:
    rng = random.Random(case)
    stores = [ResponseStore(redis, KEYS, expiry_s, 60 * KB) for expiry_s in (0.05, 0.3, 50.0)]
    names = [f"resp_{number}" for number in range(25)]
    owner = {name: rng.choice("ab") for name in names}
    for _ in range(400):
        store, name = rng.choice(stores), rng.choice(names)
        match rng.randrange(4):
            case 0 | 1:
                await store.save(response(name, rng.randrange(8 * KB), owner[name]))
            case 2:
                same = [other for other in names if owner[other] == owner[name]]
                await store.turns(owner[name], rng.sample(same, min(3, len(same))))
            case _:
                await store.delete(owner[name], name)
        for tenant in "ab":  # what expires in between makes either side smaller
            before = await truth(redis, tenant, names)
            kept = await store.kept_bytes(tenant)
            assert await truth(redis, tenant, names) <= kept <= before
            assert kept <= 60 * KB


def file(number: int, size: int, tenant: str = "t") -> FileRecord:
    return FileRecord(
        id=f"file-{number}", tenant=tenant, purpose="batch", name="n", created_s=100 + number, size_bytes=size
    )


def batch(number: int, tenant: str = "t") -> BatchRecord:
    return BatchRecord(
        id=f"batch_{number}", tenant=tenant, endpoint="/v1/completions", input_file="file-1", created_s=100 + number,
        expires_s=200,
    )  # fmt: skip


async def test_files_count_from_their_first_byte(redis: Any) -> None:
    files, most = FileStore(redis, KEYS), 1000 * KB
    assert await files.begin(file(1, 900 * KB), most)
    assert not await files.begin(file(2, 200 * KB), most)  # two uploads at a time
    assert await files.begin(file(2, 200 * KB, "other"), most)
    await files.finish(file(1, 300 * KB))
    assert await files.kept_bytes("t") == 300 * KB
    assert await files.begin(file(3, 1), most)
    assert await files.kept_bytes("t") == 300 * KB + LEAST_CHARGE_BYTES
    await files.forget("file-3")
    await files.forget("file-3")
    await redis.hset(KEYS.files, "file-1", "not readable")
    await files.forget("file-1")
    await files.forget("file-2")
    assert await redis.exists(KEYS.charges, KEYS.charged) == 0


async def test_open_batches_count_with_their_inputs_and_ended_ones_with_their_output(redis: Any) -> None:
    store, files, lease = BatchStore(redis, KEYS), FileStore(redis, KEYS), OwnerLease(redis, KEYS.batch_owner, 60)
    await lease.hold(ME)
    limits = {"most_open": 2, "most_bytes": 500 * KB}
    assert await store.open_new(batch(1), input_bytes=400 * KB, **limits) is Opened.DONE
    assert await store.open_new(batch(1), input_bytes=400 * KB, **limits) is Opened.DONE
    assert await store.open_new(batch(2), input_bytes=101 * KB, **limits) is Opened.TOO_LARGE
    assert await store.open_new(batch(2), input_bytes=100 * KB, **limits) is Opened.DONE
    assert await store.open_new(batch(3), input_bytes=0, **limits) is Opened.TOO_MANY
    assert await store.open_new(batch(4, "other"), input_bytes=0, **limits) is Opened.DONE
    assert await store.load("batch_3") is None
    ended = replace(batch(1), version=2, status=BatchStatus.COMPLETED)
    await files.begin(file(1, 0))
    assert await store.save(ended, ME, [replace(file(1, 200 * KB), is_uploaded=True)]) is Saved.DONE
    assert await files.kept_bytes("t") == 300 * KB
    await redis.zrem(KEYS.open_batches, "batch_2")  # an older router ended it
    assert await store.open_new(batch(3), input_bytes=0, **limits) is Opened.DONE
    assert await redis.zrange(KEYS.tenant_open_batches("t"), 0, -1) == [b"batch_3"]


async def test_no_more_than_so_many_batches_are_remembered(redis: Any) -> None:
    store = BatchStore(redis, KEYS)
    for number in range(6):
        await store.open_new(batch(number), input_bytes=0, most_open=9, most_bytes=10**9, most_kept=3)
        if number != 1:
            await store.save(replace(batch(number), version=2, status=BatchStatus.FAILED))
    page, _ = await store.list("t", after=None, limit=9)
    assert [record.id for record in page] == ["batch_5", "batch_4", "batch_3", "batch_1"]
    assert {json.loads(name.partition(b"_")[2]) for name in await redis.hkeys(KEYS.batches)} == {1, 3, 4, 5}
