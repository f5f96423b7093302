"""Files, batches, responses and the owner's lease on a real server: write permission, listing, expiry."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.batch import BatchRecord, BatchStatus, FileRecord, LineError
from tandem.core.errors import UnavailableError
from tandem.core.ids import Incarnation
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.batches import KEPT_S, BatchStore, Saved
from tandem.statestore.stores.files import UPLOAD_S, FileStore
from tandem.statestore.stores.owner_lease import OwnerLease
from tandem.statestore.stores.responses import ResponseStore, StoredResponse

KEYS = Keys("test")
ME, OTHER = Incarnation(7), Incarnation(8)


def batch(number: int, tenant: str = "t") -> BatchRecord:
    return BatchRecord(
        id=f"batch_{number}",
        tenant=tenant,
        endpoint="/v1/completions",
        input_file="file-1",
        created_s=100 + number,
        expires_s=200 + number,
        metadata={"a": "b"},
        errors=(LineError(code="c", message="m", line=3),),
    )


def file(number: int, tenant: str = "t", purpose: str = "batch", expires_s: int | None = None) -> FileRecord:
    return FileRecord(
        id=f"file-{number}", tenant=tenant, purpose=purpose, name="n", created_s=100 + number, expires_s=expires_s
    )


def following(record: BatchRecord, status: BatchStatus = BatchStatus.IN_PROGRESS) -> BatchRecord:
    return replace(record, version=record.version + 1, status=status)


async def test_one_of_two_changes_wins(redis: Any) -> None:
    store = BatchStore(redis, KEYS)
    first = batch(1)
    assert await store.load(first.id) is None
    assert await store.save(following(first)) is Saved.CHANGED  # there is none yet
    assert await store.save(first) is Saved.DONE
    assert await store.save(first) is Saved.DONE  # the same call again, as after a lost answer
    assert await store.save(replace(first, total=9)) is Saved.CHANGED
    second = following(first)
    assert await store.save(second) is Saved.DONE
    assert await store.save(replace(following(first), total=9)) is Saved.CHANGED
    assert await store.load(first.id) == second


async def test_an_owner_that_lost_its_lease_changes_nothing(redis: Any) -> None:
    store, lease = BatchStore(redis, KEYS), OwnerLease(redis, KEYS.batch_owner, 60)
    files = FileStore(redis, KEYS)
    assert await store.save(batch(1)) is Saved.DONE
    assert await store.save(following(batch(1)), ME) is Saved.LOST  # it has no holder
    assert await lease.hold(OTHER)
    ended = following(batch(1), BatchStatus.COMPLETED)
    assert await store.save(ended, ME, [replace(file(1), is_uploaded=True)]) is Saved.LOST
    assert await store.load(batch(1).id) == batch(1)
    assert await files.load("t", "file-1") is None
    assert await store.save(ended, OTHER, [replace(file(1), is_uploaded=True)]) is Saved.DONE
    assert await files.load("t", "file-1") == replace(file(1), is_uploaded=True)


async def test_lists_and_what_is_open(redis: Any) -> None:
    store = BatchStore(redis, KEYS)
    for number in range(5):
        await store.save(batch(number))
    await store.save(batch(9, "other"))
    await store.save(following(batch(2), BatchStatus.FAILED))
    assert list(await store.open()) == ["batch_0", "batch_1", "batch_3", "batch_4", "batch_9"]
    page, has_more = await store.list("t", after=None, limit=2)
    assert ([record.id for record in page], has_more) == (["batch_4", "batch_3"], True)
    page, has_more = await store.list("t", after="batch_3", limit=3)
    assert ([record.id for record in page], has_more) == (["batch_2", "batch_1", "batch_0"], False)
    assert await store.list("nobody", after=None, limit=3) == ([], False)
    await store.forget_due(202 + KEPT_S)
    page, _ = await store.list("t", after=None, limit=9)
    assert [record.id for record in page] == ["batch_4", "batch_3", "batch_1", "batch_0"]
    assert await store.load("batch_2") is None


async def test_a_page_is_filled_whatever_of_it_cannot_be_read(redis: Any) -> None:
    store = BatchStore(redis, KEYS)
    for number in range(5):
        await store.save(batch(number))
    for number in (1, 2, 4):
        await redis.hset(KEYS.batches, f"batch_{number}", "2 {}")
    page, has_more = await store.list("t", after=None, limit=1)
    assert ([record.id for record in page], has_more) == (["batch_3"], True)
    page, has_more = await store.list("t", after="batch_3", limit=1)
    assert ([record.id for record in page], has_more) == (["batch_0"], False)


@pytest.mark.parametrize(
    "damage",
    [{"status": "resting"}, {"expires_s": "soon"}, {"endpoint": None}, {"errors": [1]}, {"tenant": "no name"}],
)
async def test_a_batch_that_cannot_be_read_is_left_out(redis: Any, damage: dict[str, Any]) -> None:
    store = BatchStore(redis, KEYS)
    for number in range(4):
        await store.save(batch(number))
    ended = following(batch(1), BatchStatus.FAILED)
    await store.save(ended)
    await store.save(following(batch(2), BatchStatus.FAILED))
    for number in (0, 1):
        text = json.loads((await redis.hget(KEYS.batches, f"batch_{number}")).partition(b" ")[2])
        await redis.hset(KEYS.batches, f"batch_{number}", f"2 {json.dumps(text | damage)}")
    assert await store.load("batch_0") is None
    assert await store.is_known("batch_0")
    assert not await store.is_known("batch_9")
    page, has_more = await store.list("t", after=None, limit=9)
    assert ([record.id for record in page], has_more) == (["batch_3", "batch_2"], False)
    page, has_more = await store.list("t", after="batch_2", limit=1)
    assert (page, has_more) == ([], False)
    assert list(await store.open()) == ["batch_0", "batch_3"]
    assert [one.id for one in await store.load_all(await store.open())] == ["batch_3"]
    await store.forget_due(202 + KEPT_S)
    assert set(await redis.hkeys(KEYS.batches)) == {b"batch_0", b"batch_3"}
    assert await redis.zcard(KEYS.batches_due) == 0


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"id": "file-1"}'])
async def test_a_file_that_cannot_be_read_is_left_out(redis: Any, text: str) -> None:
    files = FileStore(redis, KEYS)
    for number in (1, 2):
        await files.finish(file(number, expires_s=500))
    await redis.hset(KEYS.files, "file-1", text)
    assert await files.load("t", "file-1") is None
    page, has_more = await files.list("t", after=None, limit=9, is_ascending=True)
    assert ([record.id for record in page], has_more) == (["file-2"], False)
    assert list(await files.due(500)) == ["file-1", "file-2"]
    await files.forget("file-1")
    assert list(await files.due(500)) == ["file-2"]
    assert await redis.hkeys(KEYS.files) == [b"file-2"]


async def test_files_are_listed_once_they_are_whole(redis: Any) -> None:
    files = FileStore(redis, KEYS)
    await files.begin(file(1))
    assert await files.load("t", "file-1") is None
    assert await files.list("t", after=None, limit=9, is_ascending=False) == ([], False)
    assert list(await files.due(101 + UPLOAD_S)) == ["file-1"]
    await files.finish(file(1))
    assert await files.load("t", "file-1") == replace(file(1), is_uploaded=True)
    assert await files.load("other", "file-1") is None
    assert not await files.due(10**12)
    await files.finish(file(2, expires_s=500))
    assert not await files.due(499)
    assert list(await files.due(500)) == ["file-2"]
    await files.forget("file-2")
    await files.forget("file-2")
    assert not await files.due(10**12)
    assert await files.load("t", "file-2") is None


async def test_all_that_is_due_is_found_and_forgotten(redis: Any) -> None:
    files, batches = FileStore(redis, KEYS), BatchStore(redis, KEYS)
    for number in range(250):
        await files.finish(file(number, expires_s=500))
        await batches.save(batch(number))
        await batches.save(following(batch(number), BatchStatus.FAILED))
    assert len(await files.due(500)) == 100
    assert await files.due(500, skip=200) == [f"file-{number}" for number in sorted(range(250), key=str)][200:]
    await batches.forget_due(10**9)
    assert await batches.list("t", after=None, limit=9) == ([], False)


async def test_lists_of_files(redis: Any) -> None:
    files = FileStore(redis, KEYS)
    for number in range(450):
        await files.finish(file(number, purpose="batch" if number % 3 else "batch_output"))
    wanted = [f"file-{number}" for number in range(450)]
    page, has_more = await files.list("t", after=None, limit=450, is_ascending=True)
    assert ([record.id for record in page], has_more) == (wanted, False)
    page, has_more = await files.list("t", after="file-9", limit=3, is_ascending=False)
    assert ([record.id for record in page], has_more) == (["file-8", "file-7", "file-6"], True)
    page, has_more = await files.list("t", after=None, limit=150, is_ascending=True, purpose="batch_output")
    assert ([record.id for record in page], has_more) == (wanted[::3], False)


async def test_one_directory(redis: Any) -> None:
    files = FileStore(redis, KEYS)
    assert await files.adopt("a") == "a"
    assert await files.adopt("b") == "a"


async def test_one_owner_at_a_time(redis: Any, until: Any) -> None:
    lease = OwnerLease(redis, KEYS.batch_owner, 0.2)
    assert await lease.hold(ME)
    assert await lease.hold(ME)
    assert not await lease.hold(OTHER)
    assert not await lease.release(OTHER)
    await until(lambda: lease.hold(OTHER))  # it expires by itself
    assert not await lease.hold(ME)
    assert await lease.release(OTHER)
    assert await lease.hold(ME)


def response(number: int, chain: tuple[str, ...] = ()) -> StoredResponse:
    return StoredResponse(
        id=f"resp_{number}", tenant="t", body=b'{"n":%d}' % number, items=b"[]", turn=b"[%d]" % number, chain=chain
    )


async def test_responses(redis: Any) -> None:
    store = ResponseStore(redis, KEYS, 100.0, 10**6)
    second = response(2, ("resp_1",))
    await store.save(response(1))
    await store.save(second)
    assert await store.load("t", "resp_2") == second
    assert await store.load("other", "resp_2") is None
    key = KEYS.response("resp_1")
    assert 0 < await redis.pttl(key) <= 100_000
    await redis.pexpire(key, 5000)
    assert await store.turns("t", ["resp_1", "resp_0", "resp_2"]) == [b"[1]", None, b"[2]"]
    assert await redis.pttl(key) > 5000
    assert await store.turns("t", []) == []
    await store.delete("t", "resp_1")
    assert await store.load("t", "resp_1") is None


async def test_an_outage_is_said(redis: Any, server: PrivateRedis) -> None:
    server.stop()
    batches, files = BatchStore(redis, KEYS), FileStore(redis, KEYS)
    responses, lease = ResponseStore(redis, KEYS, 9.0, 10**6), OwnerLease(redis, KEYS.batch_owner, 1)
    for call in (
        batches.save(batch(1)),
        batches.load("batch_1"),
        batches.list("t", after=None, limit=1),
        batches.open(),
        batches.load_all(["batch_1"]),
        batches.forget_due(1.0),
        files.begin(file(1)),
        files.load("t", "file-1"),
        files.list("t", after=None, limit=1, is_ascending=True),
        files.due(1.0),
        files.forget("file-1"),
        files.adopt("a"),
        responses.save(response(1)),
        responses.load("t", "resp_1"),
        responses.turns("t", ["resp_1"]),
        responses.delete("t", "resp_1"),
        lease.hold(ME),
        lease.release(ME),
    ):
        with pytest.raises(UnavailableError):
            await call
