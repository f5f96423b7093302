"""The `openai` client uploads files and runs batches; workers are scripted, Redis and the directory are real."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
from openai.types import Batch, FileObject

from tandem.core.config import StoreSection
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tests.integration.router.batching import Request, finish, lines, request, start, upload
from tests.integration.router.house import Build, RouterHarness
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for

CHAT: Final = "/v1/chat/completions"


@pytest.fixture
def client(keeping: RouterHarness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keeping.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_files(client: openai.OpenAI) -> None:
    data = b'{"a": 1}\n' * 30_000  # more than one read from the socket
    file = client.files.create(file=("été.jsonl", data), purpose="batch")
    FileObject.model_validate(file.model_dump(), strict=True)
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(data), "été.jsonl", "batch", "processed")
    assert file.expires_at == file.created_at + 30 * 86_400
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == data
    short = client.files.create(
        file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert short.expires_at == short.created_at + 3600
    assert [one.id for one in client.files.list(limit=1)][:2] == [short.id, file.id]
    assert [one.id for one in client.files.list(order="asc", purpose="batch")][-2:] == [file.id, short.id]
    deleted = client.files.delete(short.id)
    assert (deleted.id, deleted.deleted) == (short.id, True)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(short.id)


@pytest.mark.parametrize(
    ("asked", "status", "data"),
    [
        ("bytes=2-4", 206, b"cde"),
        ("bytes=4-", 206, b"ef"),
        ("bytes=5-99", 206, b"f"),
        ("bytes=6-", 200, b"abcdef"),  # what cannot be served as asked is sent whole
        ("bytes=4-2", 200, b"abcdef"),
        ("bytes=0-1,3-4", 200, b"abcdef"),
        ("lines=1", 200, b"abcdef"),
    ],
)
def test_parts_of_a_file(keeping: RouterHarness, client: openai.OpenAI, asked: str, status: int, data: bytes) -> None:
    file = client.files.create(file=("a", b"abcdef"), purpose="batch")
    answer = httpx.get(f"{keeping.url}/v1/files/{file.id}/content", headers={"range": asked})
    assert (answer.status_code, answer.content) == (status, data)


@pytest.mark.parametrize("name", ["file-none", "file-" + "x" * 100, "..", "file-a:b", "batch_1"])
def test_ids_that_are_none(client: openai.OpenAI, keeping: RouterHarness, name: str) -> None:
    assert httpx.get(f"{keeping.url}/v1/files/{name}").status_code == 404
    assert httpx.get(f"{keeping.url}/v1/batches/{name}").status_code == 404
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")


def files_of(keeping: RouterHarness) -> list[str]:
    return sorted(path.name for path in (Path(keeping.config.store.dir) / "files").iterdir())


@pytest.mark.parametrize(
    ("fields", "file", "status", "param"),
    [
        ({}, b"x", 400, "purpose"),
        ({"purpose": "fine-tune"}, b"x", 400, "purpose"),
        ({"purpose": "none"}, b"x", 400, "purpose"),
        ({"purpose": "batch", "other": "1"}, b"x", 400, "other"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, b"x", 400, "expires_after[anchor]"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
            b"x",
            400,
            "expires_after[seconds]",
        ),
        ({"purpose": "batch"}, None, 400, "file"),
        ({"purpose": "batch"}, b"x" * 1_000_001, 413, "file"),
    ],
)
def test_uploads_that_are_refused_leave_nothing(
    keeping: RouterHarness, fields: dict[str, str], file: bytes | None, status: int, param: str
) -> None:
    before = files_of(keeping)
    files = {"file": ("f", file)} if file is not None else {"none": ("", b"")}
    answer = httpx.post(f"{keeping.url}/v1/files", data=fields, files=files)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert files_of(keeping) == before


def test_what_is_no_upload(keeping: RouterHarness) -> None:
    assert httpx.post(f"{keeping.url}/v1/files", json={}).status_code == 415
    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert httpx.post(f"{keeping.url}/v1/files", content=b"nothing", headers=headers).status_code == 400
    big = httpx.post(f"{keeping.url}/v1/files", content=iter([b"--x\r\n\r\n"] + [b"y" * 65_536] * 20), headers=headers)
    assert big.status_code in (400, 413)


@pytest.mark.parametrize("endpoint", ["/v1/completions", CHAT, "/v1/responses"])
def test_a_batch(client: openai.OpenAI, keeping: RouterHarness, endpoint: str) -> None:
    key = {"/v1/completions": "prompt", CHAT: "messages", "/v1/responses": "input"}[endpoint]
    limit = "max_output_tokens" if endpoint == "/v1/responses" else "max_tokens"

    def ask(number: int) -> Request:
        text = f"Number {number}"
        said: Any = [{"role": "user", "content": text}] if endpoint == CHAT else text
        body = {"model": "tiny", "temperature": 0, limit: 3, key: said}
        return {"custom_id": f"id-{number}", "method": "POST", "url": endpoint, "body": body}

    batch = start(client, *(ask(n) for n in range(40)), endpoint=endpoint, metadata={"a": "b"})
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", endpoint, {"a": "b"})
    assert batch.expires_at == batch.created_at + 86_400
    over = finish(client, batch)
    assert (over.status, over.errors, over.error_file_id, over.model) == ("completed", None, None, "tiny")
    assert over.request_counts is not None
    assert over.request_counts.to_dict() == {"total": 40, "completed": 40, "failed": 0}
    answers = lines(client, over.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"id-{n}" for n in range(40)]
    assert len({answer["id"] for answer in answers}) == 40
    for number, answer in enumerate(answers):
        direct = httpx.post(f"{keeping.url}{endpoint}", json=ask(number)["body"])
        mine, theirs = (_said(one) for one in (answer["response"]["body"], direct.json()))
        assert mine == theirs
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
    assert over.usage is not None
    assert over.usage.output_tokens == 120
    assert over.usage.total_tokens == over.usage.input_tokens + 120
    output = client.files.retrieve(over.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert [over.in_progress_at, over.finalizing_at, over.completed_at] == sorted(
        [over.in_progress_at or 0, over.finalizing_at or 0, over.completed_at or 0]
    )


def _said(body: dict[str, Any]) -> Any:
    if "output" in body:
        return body["output"][0]["content"]
    return [choice.get("text", choice.get("message")) for choice in body["choices"]]


def test_wrong_requests_stand_in_the_error_file(client: openai.OpenAI) -> None:
    batch = start(
        client,
        request("good", prompt="a"),
        request("wrong", prompt="a", temperature=9),
        request("long", prompt=[5] * 4096),
        request("good too", prompt="b"),
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    over = finish(client, batch)
    assert over.status == "completed"
    assert over.request_counts is not None
    assert over.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    assert [one["custom_id"] for one in lines(client, over.output_file_id)] == ["good", "good too"]
    wrong = lines(client, over.error_file_id)
    assert [(one["custom_id"], one["response"]["status_code"]) for one in wrong] == [("wrong", 400), ("long", 400)]
    assert wrong[0]["response"]["body"]["error"]["param"] == "temperature"
    file = client.files.retrieve(over.error_file_id or "")
    assert file.expires_at == file.created_at + 3600


def test_a_wrong_input_fails_the_batch_with_its_lines(client: openai.OpenAI) -> None:
    batch = start(client, request("a", prompt="a"), request("a", prompt="a"), request("b", url=CHAT, prompt="a"))
    over = finish(client, batch)
    assert (over.status, over.output_file_id, over.error_file_id) == ("failed", None, None)
    assert over.errors is not None
    assert [(e.line, e.code, e.param) for e in over.errors.data or []] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "mismatched_url", "url"),
    ]
    assert over.failed_at is not None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"more": 1}, "more"),
    ],
)
def test_wrong_batches(client: openai.OpenAI, keeping: RouterHarness, changes: dict[str, Any], param: str) -> None:
    file = upload(client, request("a", prompt="a"))
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **changes}
    answer = httpx.post(f"{keeping.url}/v1/batches", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def test_output_is_no_input(client: openai.OpenAI) -> None:
    over = finish(client, start(client, request("a", prompt="a")))
    with pytest.raises(openai.BadRequestError, match="not an input file of a batch"):
        client.batches.create(input_file_id=over.output_file_id or "", endpoint=CHAT, completion_window="24h")


def test_batches_are_listed_newest_first(client: openai.OpenAI) -> None:
    made = [start(client, request("a", prompt="a")) for _ in range(3)]
    for batch in made:
        finish(client, batch)
    ids = [batch.id for batch in client.batches.list(limit=2)]
    assert len(ids) == len(set(ids))
    assert set(ids[:3]) == {batch.id for batch in made}


def test_the_input_may_be_deleted_at_once(client: openai.OpenAI) -> None:
    file = upload(client, *(request(str(n), prompt="a") for n in range(30)))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    client.files.delete(file.id)
    assert finish(client, batch).status == "completed"


def test_cancelled(slow: RouterHarness) -> None:
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        batch = start(client, *(request(str(n), prompt="a", max_tokens=10) for n in range(100)))
        wait_for(lambda: (client.batches.retrieve(batch.id).request_counts or batch.request_counts).completed >= 3)  # type: ignore[union-attr]
        raw = client.batches.with_raw_response.cancel(batch.id)
        asked = Batch.model_validate_json(raw.content, strict=True)
        assert asked.status == "cancelling"
        assert asked.cancelling_at is not None
        over = finish(client, batch)
        assert over.status == "cancelled"
        assert over.request_counts is not None
        good, bad = lines(client, over.output_file_id), lines(client, over.error_file_id)
        assert Counter(one["custom_id"] for one in good + bad) == Counter(str(n) for n in range(100))
        assert len(good) == over.request_counts.completed >= 3
        assert {one["error"]["code"] for one in bad} == {"batch_cancelled"}
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            client.batches.cancel(batch.id)
        slow.wait(lambda: not slow.router.dispatcher.flights)


def test_interactive_requests_go_first(slow: RouterHarness) -> None:
    """While a client waits for a worker, batches stop; when none does, they go on."""
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        batch = start(client, *(request(str(n), prompt="a", max_tokens=10) for n in range(60)))
        slow.wait(lambda: any(flight.is_background for flight in slow.router.dispatcher.flights))
        link = next(link for link in slow.router.table.links if link.worker == "prefill-0")
        worker = slow.workers["prefill-0"]
        worker.load = w.LoadReport(queued_requests=50)
        slow.wait(lambda: link.load.queued_requests == 50)
        slow.wait(lambda: not any(flight.is_background for flight in slow.router.dispatcher.flights), 30)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        worker.load = w.LoadReport(queued_requests=0)
        over = finish(client, batch)
        assert over.request_counts is not None
        assert over.request_counts.to_dict() == {"total": 60, "completed": 60, "failed": 0}
        names = [one["custom_id"] for one in lines(client, over.output_file_id)]
        assert names == [str(n) for n in range(60)]


def test_another_directory_is_refused(
    build: Build, redis: PrivateRedis, keeping: RouterHarness, tmp_path: Path
) -> None:
    house = build(redis_url=redis.url, store=StoreSection(dir=str(tmp_path / "other")))
    house.wait_ready()
    with (
        openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.InternalServerError, match="not the directory for files of this cluster"),
    ):
        upload(client, request("a", prompt="a"))


def test_no_latency_of_a_client(client: openai.OpenAI, keeping: RouterHarness) -> None:
    """Batches count in totals, but their waiting time counts in no time to first token."""
    latencies = [f"tandem_{name}_seconds_count" for name in ("time_to_first_token", "request_duration")]
    before = [keeping.metric(name) for name in latencies]
    tokens = keeping.metric("tandem_generation_tokens_total")
    finish(client, start(client, *(request(str(n), prompt="a") for n in range(5))))
    assert [keeping.metric(name) for name in latencies] == before
    assert keeping.metric("tandem_generation_tokens_total") == tokens + 15
    assert keeping.metric("tandem_batch_running_requests") == 0


def test_another_router_goes_on(build: Build, redis: PrivateRedis, tmp_path: Path) -> None:
    """Two routers, one Redis, one directory: either takes everything, one runs it, then the other goes on."""
    store = StoreSection(dir=str(tmp_path / "files"), batch_requests_at_once=4)
    shared: Any = {"cluster": tmp_path.name, "redis_url": redis.url, "store": store}
    first = build(script=Script(step_s=0.02), **shared)
    first.wait_ready()
    with openai.OpenAI(base_url=f"{first.url}/v1", api_key="none", max_retries=0) as client:
        batch = start(client, *(request(str(n), prompt=[300 + n]) for n in range(150)))
        wait_for(lambda: (client.batches.retrieve(batch.id).request_counts or batch.request_counts).completed >= 5)  # type: ignore[union-attr]
    second = build(**shared)
    second.wait_ready()
    with openai.OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0) as client:
        assert client.batches.retrieve(batch.id).status == "in_progress"
        assert not [submit for worker in second.workers.values() for submit in worker.submitted]
        first.stop()
        over = finish(client, batch)
        assert over.request_counts is not None
        assert over.request_counts.to_dict() == {"total": 150, "completed": 150, "failed": 0}
        assert [one["custom_id"] for one in lines(client, over.output_file_id)] == [str(n) for n in range(150)]
        mine = [len(house.workers["decode-0"].submitted) for house in (first, second)]
        assert all(mine)
        assert 150 <= sum(mine) <= 150 + store.batch_requests_at_once


def test_a_lost_lease_stops_everything_until_it_is_free(
    slow: RouterHarness, redis: PrivateRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """Another owner holds the directory for a while: nothing runs here meanwhile, then everything ends as usual."""
    caplog.set_level(logging.INFO, "tandem.router.storage.batches.runner")
    owner = Keys(slow.config.cluster).batch_owner

    async def hand_over(to: str | None) -> None:
        thief = await connect(redis.url)
        await (thief.set(owner, to) if to is not None else thief.delete(owner))
        await thief.aclose()

    def is_stopped() -> bool:
        return "runs no batches any more" in [record.message for record in caplog.records]

    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        batch = start(client, *(request(str(n), prompt="a", max_tokens=10) for n in range(120)))
        work = Path(slow.config.store.dir) / "batches" / batch.id
        wait_for(lambda: list(work.glob("*.journal")))
        asyncio.run(hand_over("12345"))
        slow.wait(is_stopped)
        slow.wait(lambda: not slow.router.dispatcher.flights)
        before = client.batches.retrieve(batch.id)
        assert before.status == "in_progress"
        assert before.request_counts is not None
        assert before.request_counts.completed < 120
        for worker in slow.workers.values():
            worker.script = Script()
        asyncio.run(hand_over(None))
        over = finish(client, batch)
        assert over.request_counts is not None
        assert over.request_counts.to_dict() == {"total": 120, "completed": 120, "failed": 0}
        assert [one["custom_id"] for one in lines(client, over.output_file_id)] == [str(n) for n in range(120)]
    assert len(list(work.glob("*.journal"))) == 2  # one of each time that it was owned
