"""A router that is asked to stop: no new requests, running answers are completed, and no wait is endless."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.core.config import RouterConfig, StoreSection
from tandem.core.ids import WorkerId
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tandem.statestore.connection import connect
from tandem.statestore.index.member_lease import NO_INCARNATION, WorkerLease
from tandem.statestore.keys import Keys, Member
from tests.integration.router.house import ADMIN_KEY
from tests.integration.router.knocking import knocking
from tests.integration.router.router_process import PATIENCE_S, is_gone, register_and_beat, start
from tests.integration.router.scripted_worker import Fabric, Script, ScriptedWorker
from tools.waiting import wait_for, wait_for_async

MANY = 400
"""Tokens of an answer that is far from complete when the router is asked to stop."""


@dataclass(frozen=True)
class Served:
    """A router's process, and what the workers in this one do."""

    process: subprocess.Popen[str]
    url: str
    grpc: str
    admin: str
    script: Script
    redis: Any
    keys: Keys
    client: httpx.AsyncClient

    def send(self, **body: Any) -> Any:
        """A context manager: an answer that begins to be streamed."""
        whole = {"model": "tiny", "prompt": "Hi", "max_tokens": MANY, "ignore_eos": True, "stream": True, **body}
        return self.client.stream("POST", f"{self.url}/v1/completions", json=whole)

    async def stop(self) -> None:
        """Ask it to stop, and wait until it has taken notice."""
        self.process.send_signal(signal.SIGTERM)
        await wait_for_async(self._is_not_ready)

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    async def _is_not_ready(self) -> bool:
        fresh = {"connection": "close"}
        return (await self.client.get(f"{self.url}/readyz", headers=fresh)).status_code == 503

    async def pids(self) -> list[int]:
        """Return the ids of the processes, where there are several."""
        key = {"authorization": f"Bearer {ADMIN_KEY}"}
        status = (await self.client.get(f"{self.admin}/admin/v1/status", headers=key)).json()
        return [row["pid"] for row in status["router"]["processes"]]


@asynccontextmanager
async def served(
    config: RouterConfig, redis_url: str, folder: Path, drain_s: float, processes: int = 1
) -> AsyncIterator[Served]:
    """A router with a pair of workers, with answers that take twenty seconds."""
    settings = replace(config.settings, drain_s=drain_s, processes=processes)
    store = StoreSection(dir=str(folder / "files"))
    secret, script, fabric = ClusterSecret.load(Path(config.secret_file)), Script(step_s=0.05), Fabric()
    roles = (RoleName.PREFILL, RoleName.DECODE)
    workers = [ScriptedWorker(WorkerId(f"{role}-0"), role, fabric, secret, script) for role in roles]
    redis, keys = await connect(redis_url), Keys(config.cluster)
    process = start(replace(config, redis_url=redis_url, settings=settings, store=store), folder)
    async with asyncio.TaskGroup() as group, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        for worker in workers:
            await worker.start()
        beats = [group.create_task(register_and_beat(WorkerLease(redis, keys), worker)) for worker in workers]
        try:
            ready = Path(config.ready_file)
            await asyncio.to_thread(wait_for, ready.exists)
            places = json.loads(await asyncio.to_thread(ready.read_text))
            on = Served(process, places["http"], places["grpc"], places["admin"], script, redis, keys, client)

            async def is_ready() -> bool:
                return (await client.get(f"{on.url}/readyz")).status_code == 200

            await wait_for_async(is_ready)
            yield on
        finally:
            process.kill()
            await asyncio.to_thread(process.communicate)
            for beat in beats:
                beat.cancel()
            for worker in workers:
                await worker.stop()
            await redis.aclose()


async def events(answer: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: ")]


async def test_answers_are_completed_and_nothing_new_begins(
    config: RouterConfig, redis_url: str, tmp_path: Path
) -> None:
    async with served(config, redis_url, tmp_path, drain_s=60) as on:

        async def runs_batches() -> bool:
            return bool(await on.redis.exists(on.keys.batch_owner))

        await wait_for_async(runs_batches)
        async with on.send() as answer, grpc.aio.insecure_channel(on.grpc) as channel:
            call = i_grpc.InferenceStub(channel).Generate(request(MANY))
            responses = aiter(call)
            first = await anext(responses)
            await on.stop()
            await check_refusals(on, channel)
            assert not await runs_batches(), "its lease is free for another router while answers go on"
            on.script.step_s = 0.0
            assert (await events(answer))[-1] == "[DONE]"
            rest = await rest_of(responses)
            texts = [token for one in (first, *rest) for delta in one.choices for token in delta.token_ids]
            assert len(texts) == MANY
            assert rest[-1].finished
        assert await on.exit_code() == 0
        left = await on.redis.hget(on.keys.lease(Member.ROUTER, config.router_id), "incarnation")
        assert left == NO_INCARNATION


async def rest_of(responses: AsyncIterator[i.GenerateResponse]) -> list[i.GenerateResponse]:
    return [response async for response in responses]


def request(tokens: int) -> i.GenerateRequest:
    sampling = i.GenerateSampling(max_tokens=tokens, ignore_eos=True)
    return i.GenerateRequest(model="tiny", text="Hi", sampling=sampling)


async def check_refusals(on: Served, channel: Any) -> None:
    assert (await on.client.get(f"{on.url}/health")).status_code == 503
    assert (await on.client.get(f"{on.url}/livez")).status_code == 200
    for path in ("/v1/completions", "/v1/files", "/v1/batches"):
        refused = await on.client.post(f"{on.url}{path}", json={"model": "tiny", "prompt": "Hi"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"
        assert "this router is stopping" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
    stub: Any = i_grpc.InferenceStub(channel)
    begins: tuple[Callable[[], Any], ...] = (
        lambda: stub.Generate(request(2)).read(),
        lambda: stub.ListModels(i.ListModelsRequest()),
        lambda: stub.Tokenize(i.TokenizeRequest(text="Hi")),
        lambda: stub.Detokenize(i.DetokenizeRequest(ids=[1])),
    )
    for begin in begins:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await begin()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "this router is stopping" in str(caught.value.details())
        trailing: Any = caught.value.trailing_metadata()
        assert dict(trailing)["grpc-retry-pushback-ms"] == "1000"
    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_what_takes_longer_is_told_so(config: RouterConfig, redis_url: str, tmp_path: Path) -> None:
    async with served(config, redis_url, tmp_path, drain_s=0.5) as on:
        whole = {"model": "tiny", "prompt": "Hi", "max_tokens": MANY, "ignore_eos": True}
        async with on.send() as answer, grpc.aio.insecure_channel(on.grpc) as channel:
            lines = answer.aiter_lines()
            await anext(lines)
            waiting = asyncio.create_task(on.client.post(f"{on.url}/v1/completions", json=whole))
            call = i_grpc.InferenceStub(channel).Generate(request(MANY))
            responses = aiter(call)
            await anext(responses)
            on.process.send_signal(signal.SIGTERM)
            last = [line async for line in lines if line.startswith("data: ")][-1]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert error["code"] == "unavailable"
            assert "it was asked to 0.5 s ago" in error["message"]
            refused = await waiting
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert refused.headers["retry-after"] == "1"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rest_of(responses)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await on.exit_code() == 0


async def test_every_process_completes_its_answers(config: RouterConfig, redis_url: str, tmp_path: Path) -> None:
    async with served(config, redis_url, tmp_path, drain_s=60, processes=2) as on, contextlib.AsyncExitStack() as s:
        answers = [await s.enter_async_context(on.send()) for _ in range(6)]
        await on.stop()
        on.script.step_s = 0.0
        for answer in answers:
            assert (await events(answer))[-1] == "[DONE]"
        assert await on.exit_code() == 0


async def test_nobody_is_reset_while_processes_end_one_by_one(
    config: RouterConfig, redis_url: str, tmp_path: Path
) -> None:
    async with served(config, redis_url, tmp_path, drain_s=60, processes=3) as on:
        pids = await on.pids()
        with knocking(on.url, clients=6) as knock:
            async with on.send() as answer:
                await wait_for_async(lambda: knock.statuses[200] > 20)
                for pid in (*pids, on.process.pid):  # as a supervisor does that signals all of them
                    os.kill(pid, signal.SIGTERM)
                await wait_for_async(lambda: sum(map(is_gone, pids)) == 2)
                told = knock.statuses[503]
                await wait_for_async(lambda: knock.statuses[503] > told + 20)
                assert knock.refused == 0, "the port is open as long as there is an answer to complete"
                on.script.step_s = 0.0
                assert (await events(answer))[-1] == "[DONE]"
            assert await on.exit_code() == 0
        assert knock.broken == []
        assert set(knock.statuses) == {200, 503}
        assert knock.refused == 6


def test_who_sends_much_while_it_stops_reads_why_it_is_refused(
    config: RouterConfig, redis_url: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with served(config, redis_url, tmp_path, drain_s=60) as on, on.send() as answer:
            await on.stop()

            async def body() -> AsyncIterator[bytes]:
                for _ in range(16):
                    yield b" " * 65536

            refused = await on.client.post(f"{on.url}/v1/files", content=body())
            assert refused.status_code == 503
            assert "this router is stopping" in refused.json()["error"]["message"]
            on.script.step_s = 0.0
            assert (await events(answer))[-1] == "[DONE]"

    asyncio.run(run())


async def test_a_stop_does_not_wait_for_uploads_that_are_refused(
    config: RouterConfig, redis_url: str, tmp_path: Path
) -> None:
    """One is begun after the other, and none ends."""
    async with served(config, redis_url, tmp_path, drain_s=600) as on, asyncio.TaskGroup() as group:
        address = on.url.removeprefix("http://").rsplit(":", 1)
        async with on.send() as answer:
            await on.stop()
            reader, writer = await begin_upload(address)
            others = group.create_task(begin_uploads(address))
            on.script.step_s = 0.0
            assert (await events(answer))[-1] == "[DONE]"
        assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).startswith(b"HTTP/1.1 503 ")
        assert await on.exit_code() == 0
        others.cancel()
        writer.close()


async def begin_upload(address: list[str]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n.")
    return reader, writer


async def begin_uploads(address: list[str]) -> None:
    """One a second until the port is closed."""
    async with contextlib.AsyncExitStack() as stack:
        with contextlib.suppress(OSError):
            while True:
                _, writer = await begin_upload(address)
                stack.callback(writer.close)
                await asyncio.sleep(1.0)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(
    config: RouterConfig, redis_url: str, tmp_path: Path, second: signal.Signals, processes: int
) -> None:
    whole = served(config, redis_url, tmp_path, drain_s=600, processes=processes)
    async with whole as on, on.send() as answer:
        on.script.step_s = 600.0
        await on.stop()
        on.process.send_signal(second)
        assert await on.exit_code() == -second
        with pytest.raises(httpx.HTTPError):
            await events(answer)
