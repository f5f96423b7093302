"""A tenant's storage is bounded and refused by name; other tenants, and requests that store nothing, go on."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tandem.core.api_keys import KeyWish, Scope, draw
from tandem.core.config import StoreSection
from tandem.core.desired import DesiredState, Pool
from tandem.core.errors import UnavailableError
from tandem.core.state_enums import RoleName
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.api_keys import ApiKeyStore
from tandem.statestore.stores.desired import DesiredStateStore
from tandem.statestore.stores.responses import ResponseStore, StoredResponse
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness, ask
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for

ASK: dict[str, Any] = {"model": "tiny", "input": "Say something.", "max_output_tokens": 3, "temperature": 0}
FILE = b"x" * 100_000


@pytest.fixture
def house(build: Build, redis: PrivateRedis, tmp_path: Path) -> RouterHarness:
    store = StoreSection(
        dir=str(tmp_path / "files"),
        max_response_bytes=20_000,
        max_tenant_response_bytes=20_000,
        max_tenant_file_bytes=350_000,
        max_tenant_open_batches=2,
    )
    house = build(cluster=tmp_path.name, redis_url=redis.url, store=store, script=Script(step_s=0.02))
    house.wait_ready()
    return house


@pytest.fixture
def client(house: RouterHarness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def respond(house: RouterHarness, **more: Any) -> httpx.Response:
    return httpx.post(f"{house.url}/v1/responses", json={**ASK, **more}, timeout=60)


def upload(house: RouterHarness, data: bytes = FILE) -> httpx.Response:
    return httpx.post(f"{house.url}/v1/files", data={"purpose": "batch"}, files={"file": ("f", data)}, timeout=60)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    assert answer.headers.get("x-should-retry") == "false" or answer.status_code == 413
    return answer.status_code, error["code"], error["message"]


def test_a_response_that_is_too_large(house: RouterHarness) -> None:
    begun = len(house.workers["decode-0"].submitted)
    status, code, message = refusal(respond(house, instructions="word " * 4500))
    assert (status, code) == (413, "request_too_large")
    assert "max_response_bytes" in message
    assert "store: false" in message
    assert len(house.workers["decode-0"].submitted) == begun


def test_responses_of_a_tenant(house: RouterHarness, client: openai.OpenAI) -> None:
    kept = [client.responses.create(**ASK)]
    while (answer := respond(house)).status_code == 200 and answer.json()["store"]:
        kept.append(client.responses.retrieve(answer.json()["id"]))
    status, code, message = refusal(answer if answer.status_code != 200 else respond(house))
    assert (status, code) == (429, "quota_exceeded")
    assert "max_tenant_response_bytes" in message
    assert len(kept) > 2
    assert respond(house, store=False).status_code == 200
    for one in kept[:2]:
        client.responses.delete(one.id)
    assert respond(house).json()["store"] is True


def test_a_batch_of_responses_ends_although_none_can_be_stored(house: RouterHarness, client: openai.OpenAI) -> None:
    while respond(house).status_code == 200:
        continue
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/responses", "body": ASK} for n in range(3)]
    file = upload(house, "\n".join(json.dumps(line) for line in lines).encode()).json()["id"]
    batch = client.batches.create(input_file_id=file, endpoint="/v1/responses", completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
    errors = client.files.content(client.batches.retrieve(batch.id).error_file_id or "").text.splitlines()
    assert [json.loads(line)["response"]["status_code"] for line in errors] == [429] * 3


def test_files_of_a_tenant(house: RouterHarness) -> None:
    kept = [upload(house).json()["id"] for _ in range(3)]
    status, code, message = refusal(upload(house))
    assert (status, code) == (429, "quota_exceeded")
    assert "max_tenant_file_bytes" in message
    assert upload(house, b"x" * 10).status_code == 429  # a record takes memory, too
    httpx.delete(f"{house.url}/v1/files/{kept[0]}")
    assert upload(house).status_code == 200
    assert len(list((Path(house.config.store.dir) / "files").iterdir())) == 3


def test_open_batches_of_a_tenant(house: RouterHarness, client: openai.OpenAI) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 10}
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(200)]
    file = upload(house, "\n".join(json.dumps(line) for line in lines).encode()).json()["id"]
    ask: dict[str, Any] = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    first, _ = (client.batches.create(**ask) for _ in range(2))
    status, code, message = refusal(httpx.post(f"{house.url}/v1/batches", json=ask))
    assert (status, code) == (429, "quota_exceeded")
    assert "max_tenant_open_batches" in message
    works = Path(house.config.store.dir) / "batches"
    assert len(list(works.iterdir())) == 2
    client.batches.cancel(first.id)
    wait_for(lambda: client.batches.retrieve(first.id).status == "cancelled")
    assert client.batches.create(**ask).status == "validating"


def test_a_full_redis_refuses_what_is_left_here_and_nothing_else(build: Build, tmp_path: Path) -> None:
    """Responses fill it to its maxmemory; requests, keys and scaling go on."""
    limits = {"max_response_bytes": 1 << 30, "max_tenant_response_bytes": 1 << 40, "min_free_bytes": 0}
    with PrivateRedis.start(tmp_path / "redis", "a secret", memory_bytes=24 << 20) as server:
        house = build(redis_url=server.url, store=StoreSection(dir=str(tmp_path / "files"), **limits))
        house.wait_ready()
        asyncio.run(_fill(server.url))
        answer = respond(house)
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        assert upload(house).status_code == 503
        assert ask(house).status_code == 200
        admin = {"authorization": f"Bearer {ADMIN_KEY}"}
        assert httpx.get(f"{house.admin_url}/admin/v1/status", headers=admin).status_code == 200
        asyncio.run(_changed(server.url))


async def _fill(url: str) -> None:
    redis: Any = await connect(url)
    store = ResponseStore(redis, Keys("test"), 1000.0, 1 << 40)
    try:
        for number in range(1000):
            name = f"resp_{number:032x}"
            await store.save(StoredResponse(id=name, tenant="t", body=b"b" * 200_000, items=b"[]", turn=b"[]"))
    except UnavailableError as error:
        assert "maxmemory" in error.why  # noqa: PT017 - how many fit depends on the server
    # Memory of connections comes and goes: not so near to the bound that a small one fits at times.
    await redis.config_set("maxmemory", (await redis.info("memory"))["used_memory"] // 2)
    await redis.aclose()


async def _changed(url: str) -> None:
    """The desired state changes, and a key is made and revoked."""
    redis = await connect(url)
    desired, keys = DesiredStateStore(redis, Keys("test")), ApiKeyStore(redis, Keys("test"))
    pool = Pool(name="m", model="x", role=RoleName.MIXED, count=1)
    assert await desired.save(DesiredState(version=1, pools=(pool,)).filled(), 0)
    _, key = draw(KeyWish(tenant="a", scopes=(Scope.INFER,)), 1000)
    await keys.add(key)
    assert await keys.all() == [key]
    assert await keys.revoke(key.id, 2000.0)
    await redis.aclose()


def test_nothing_is_taken_on_a_disk_without_room(build: Build, redis: PrivateRedis, tmp_path: Path) -> None:
    store = StoreSection(dir=str(tmp_path / "files"), min_free_bytes=1 << 60)
    house = build(cluster=tmp_path.name, redis_url=redis.url, store=store)
    house.wait_ready()
    answer = upload(house)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert "min_free_bytes" in answer.json()["error"]["message"]
    assert not list((Path(house.config.store.dir) / "files").iterdir())
    assert respond(house).status_code == 200
