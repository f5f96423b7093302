"""Batches of one tenant keep those of another from nothing: poisoned, long, or of one that may ask no more."""

import asyncio
import logging
import time
from pathlib import Path

import openai
import pytest

from tandem.core.batch import BatchRecord, BatchStatus
from tandem.router.storage.batches import runner, turns
from tandem.router.storage.batches.file_store import FilesFolder
from tandem.router.storage.batches.runner import AT_ONCE
from tandem.router.storage.files import new_id
from tandem.statestore.connection import connect
from tandem.statestore.keys import Keys
from tandem.statestore.stores.batches import BatchStore, Saved
from tests.integration.router.batching import finish, lines, request, start, upload
from tests.integration.router.conftest import OTHERS
from tests.integration.router.house import RouterHarness
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for


def poisoned(house: RouterHarness, count: int, tenant: str) -> None:
    """Batches on which every run raises: their inputs were checked, and are damaged since."""
    folder = FilesFolder(Path(house.config.store.dir))
    folder.identity()

    async def save() -> None:
        redis = await connect(house.config.redis_url)
        store = BatchStore(redis, Keys(house.config.cluster))
        for number in range(count):
            name, now_s = new_id("batch_", number), int(time.time())
            folder.work(name).mkdir()
            folder.input(name).write_bytes(b"damaged\n")
            record = BatchRecord(
                id=name, tenant=tenant, endpoint="/v1/completions", input_file="file-1", created_s=now_s - 60,
                expires_s=now_s + 3600, status=BatchStatus.IN_PROGRESS, total=1,
            )  # fmt: skip
            assert await store.save(record) is Saved.DONE
        await redis.aclose()

    asyncio.run(save())


def test_poisoned_batches_delay_nobody_elses(slow: RouterHarness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "tandem.router.storage.batches.runner")
    poisoned(slow, AT_ONCE, "other")
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        wait_for(lambda: "batch failed" in [record.message for record in caplog.records])
        over = finish(client, start(client, *(request(str(n), prompt="a") for n in range(3))))
    assert over.status == "completed"


def other_batch(house: RouterHarness, name: str, file: str) -> BatchRecord:
    """A batch of the tenant "other", written down as its router would."""
    now_s = int(time.time())
    record = BatchRecord(
        id=name, tenant="other", endpoint="/v1/completions", input_file=file, created_s=now_s, expires_s=now_s + 86_400
    )

    async def save() -> None:
        redis = await connect(house.config.redis_url)
        await BatchStore(redis, Keys(house.config.cluster)).save(record)
        await redis.aclose()

    asyncio.run(save())
    return record


def loaded(house: RouterHarness, name: str) -> BatchRecord:
    async def load() -> BatchRecord | None:
        redis = await connect(house.config.redis_url)
        record = await BatchStore(redis, Keys(house.config.cluster)).load(name)
        await redis.aclose()
        return record

    record = asyncio.run(load())
    assert record is not None
    return record


def test_a_tenant_without_a_key_gets_nothing_computed(slow: RouterHarness, caplog: pytest.LogCaptureFixture) -> None:
    """Its batch rests, once its last key is revoked, and goes on with a new one."""
    caplog.set_level(logging.WARNING, "tandem.router.storage.batches.runner")
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        file = upload(client, *(request(str(n), prompt="a", max_tokens=10) for n in range(40)))
    other_batch(slow, "batch_0", file.id)
    wait_for(lambda: loaded(slow, "batch_0").completed >= 2)
    slow.call(slow.keys.lose())
    wait_for(lambda: "batch interrupted" in [record.message for record in caplog.records])
    slow.wait(lambda: not slow.router.dispatcher.flights)
    before = loaded(slow, "batch_0")
    assert before.status is BatchStatus.IN_PROGRESS
    assert 2 <= before.completed < 40
    slow.router.gate.set_keys([OTHERS])
    assert wait_for(lambda: loaded(slow, "batch_0").status is BatchStatus.COMPLETED)


def test_a_long_batch_leaves_for_another_tenants_after_its_turn(
    slow: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on later: each of its requests is answered once."""
    monkeypatch.setattr(turns, "TURN_S", 0.5)
    monkeypatch.setattr(runner, "LOOK_S", 0.1)
    monkeypatch.setattr(runner, "AT_ONCE", 1)
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        long = start(client, *(request(str(n), prompt="a", max_tokens=10) for n in range(200)))
        wait_for(lambda: (client.batches.retrieve(long.id).request_counts or long.request_counts).completed >= 3)  # type: ignore[union-attr]
        file = upload(client, request("other", prompt="a"))

        other_batch(slow, "batch_0", file.id)
        ended: BatchRecord = wait_for(lambda: (found := loaded(slow, "batch_0")).status.is_over and found)
        assert (ended.status, ended.completed) == (BatchStatus.COMPLETED, 1)
        assert client.batches.retrieve(long.id).status == "in_progress"
        for worker in slow.workers.values():
            worker.script = Script()
        over = finish(client, long)
        assert over.request_counts is not None
        assert over.request_counts.to_dict() == {"total": 200, "completed": 200, "failed": 0}
        assert [one["custom_id"] for one in lines(client, over.output_file_id)] == [str(n) for n in range(200)]
