"""A router of several processes on one port, and TLS: real processes, real sockets, a real Redis."""

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.config import RouterConfig, RouterSection, ServedModel
from tandem.core.errors import StartupError
from tandem.core.ids import WorkerId
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.router.admin.multiprocess_admin import ReplicatedSettings
from tandem.router.server import multiprocess
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.member_lease import WorkerLease
from tandem.statestore.keys import Keys
from tests.integration.router.house import ADMIN_KEY, MODEL
from tests.integration.router.router_process import is_gone, register_and_beat, start
from tests.integration.router.scripted_worker import Fabric, ScriptedWorker
from tools.waiting import wait_for_async

TLS = Path(__file__).parent / "tls"
BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 4, "ignore_eos": True}
PATIENCE_S = 60.0


@pytest.fixture
def config(tmp_path: Path, redis: PrivateRedis) -> RouterConfig:
    ClusterSecret.generate().save(tmp_path / "secret")
    (tmp_path / "key").write_text(ADMIN_KEY)
    return RouterConfig(
        cluster=tmp_path.name.replace("[", "-").replace("]", "-"),
        router_id="r1",
        models=(ServedModel(name="tandem-tiny", model_dir=str(MODEL), served_names=("tiny",)),),
        redis_url=redis.url,
        secret_file=str(tmp_path / "secret"),
        admin_key_file=str(tmp_path / "key"),
        ready_file=str(tmp_path / "ready.json"),
        settings=RouterSection(port=0),
    )


def with_settings(config: RouterConfig, **settings: Any) -> RouterConfig:
    return replace(config, settings=replace(config.settings, **settings))


@asynccontextmanager
async def worker(config: RouterConfig) -> AsyncIterator[ScriptedWorker]:
    """A mixed worker that every router of the cluster finds."""
    one = ScriptedWorker(WorkerId("mixed-0"), RoleName.MIXED, Fabric(), ClusterSecret.load(Path(config.secret_file)))
    await one.start()
    redis = await connect(config.redis_url)
    beating = asyncio.create_task(register_and_beat(WorkerLease(redis, Keys(config.cluster)), one))
    try:
        yield one
    finally:
        beating.cancel()
        await one.stop()
        await redis.aclose()


async def test_a_process_that_does_not_get_to_listen_is_ended_so_that_it_can_be_started_again(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocess, "READY_S", 0.05)  # no interpreter starts in that
    late = multiprocess.Process(config, 0, ReplicatedSettings(), MonotonicClock())
    with pytest.raises(StartupError, match="did not listen"):
        await late.start()
    async with asyncio.timeout(PATIENCE_S):
        assert await late.ended() == -signal.SIGKILL
    monkeypatch.setattr(multiprocess, "READY_S", PATIENCE_S)
    await late.start()
    assert late.part is not None
    await late.stop()


@asynccontextmanager
async def running(config: RouterConfig) -> AsyncIterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process and where it listens; stopped by SIGTERM, which must end it well."""
    process = start(config, Path(config.ready_file).parent)
    try:
        await wait_for_async(lambda: Path(config.ready_file).exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        yield process, json.loads(await asyncio.to_thread(Path(config.ready_file).read_text))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


async def complete(url: str, **client: Any) -> httpx.Response:
    """One completion over a connection of its own."""
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False, **client) as http:
        return await http.post(f"{url}/v1/completions", json=BODY)


class Admin:
    """The parent's admin port."""

    def __init__(self, url: str) -> None:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S, trust_env=False)

    async def processes(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await self.http.get("/admin/v1/status")).json()["router"]["processes"]
        return rows

    async def is_ready(self) -> bool:
        status = await self.http.get("/admin/v1/status")
        return status.status_code == 200 and status.json()["is_ready"] and len(await self.processes()) == 2

    async def has_served_40(self) -> bool:
        """Completions, by the metrics of all processes together."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        counts = [float(line.split()[-1]) for line in lines if line.startswith('tandem_requests_total{api="compl')]
        assert sum(counts) <= 40
        return sum(counts) == 40


def test_processes_share_the_ports(config: RouterConfig) -> None:
    asyncio.run(_shared(with_settings(config, processes=2)))


async def _shared(config: RouterConfig) -> None:
    async with worker(config) as one, running(config) as (parent, ready):
        admin = Admin(ready["admin"])
        async with admin.http:
            await wait_for_async(admin.is_ready)
            assert one.streams == 2, "each process is a router of its own"
            answers = await asyncio.gather(*(complete(ready["http"]) for _ in range(40)))
            assert {answer.status_code for answer in answers} == {200}
            await wait_for_async(admin.has_served_40)
            first, second = await admin.processes()
            assert (await admin.http.get("/admin/v1/status")).json()["router"]["pid"] == parent.pid
            assert {first["id"], second["id"]} == {"r1-0", "r1-1"}
            await _policy_goes_to_all(admin)
            await _slo_classes_go_to_all(admin, ready["http"])
            await _the_page_shows_all(admin)
            await _one_dies(admin, ready["http"], first["pid"], second["pid"])
            pids = [row["pid"] for row in await admin.processes()]
    assert all(map(is_gone, pids)), "they end with their parent"
    assert sorted(path.name for path in Path(config.ready_file).parent.glob(".r1-*")) == []


async def _policy_goes_to_all(admin: Admin) -> None:
    assert (await admin.http.post("/admin/v1/route/policy", json={"policy": "round_robin"})).status_code == 200
    for _ in range(2):
        assert (await admin.http.get("/admin/v1/status")).json()["policy"] == "round_robin"
    assert (await admin.http.get("/admin/v1/status", headers={"authorization": "Bearer no"})).status_code == 401
    assert (await admin.http.get("/admin/v1/requests")).json() == {"requests": []}


async def _slo_classes_go_to_all(admin: Admin, url: str) -> None:
    headers = {"X-SLO-Class": "added"}
    assert (await complete(url, headers=headers)).status_code == 400
    assert (await admin.http.post("/admin/v1/slo", json={"slo": "added", "ttft_s": 60.0})).status_code == 200
    answers = [await complete(url, headers=headers) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}, "whichever process it is"
    assert (await admin.http.get("/admin/v1/status")).json()["admission"]["waiting"] == 0


async def _the_page_shows_all(admin: Admin) -> None:
    """The state of each process is merged, and the chat reaches the ports that they share."""
    assert (await admin.http.get("/ui/")).headers["content-security-policy"].startswith("default-src 'none'")
    for path in ("/admin/v1/live", "/admin/v1/traces", "/admin/v1/figures"):
        assert (await admin.http.get(path, headers={"authorization": "Bearer no"})).status_code == 401, path
    said: dict[str, Any] = {}
    async with admin.http.stream("GET", "/admin/v1/live") as stream:
        name = ""
        async for line in stream.aiter_lines():
            field, _, value = line.partition(": ")
            name = value if field == "event" else name
            if field == "data":
                said[name] = json.loads(value)
            if len(said) == 7:
                break
    assert [row["id"] for row in said["status"]["router"]["processes"]] == ["r1-0", "r1-1"]
    assert [row["worker"] for row in said["status"]["workers"]] == ["mixed-0"]
    assert len(said["requests"]["requests"]) == 30
    assert {row["router"] for row in said["requests"]["requests"]} == {"r1-0", "r1-1"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
    answer = await admin.http.post("/admin/v1/chat", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert (await admin.http.post("/admin/v1/chat", json=body, headers={"authorization": "x"})).status_code == 401


async def _one_dies(admin: Admin, url: str, victim: int, other: int) -> None:
    os.kill(victim, signal.SIGKILL)

    async def is_back() -> bool:
        status = await admin.http.get("/admin/v1/status")
        pids = [row["pid"] for row in status.json()["router"]["processes"]] if status.status_code == 200 else []
        return len(pids) == 2 and victim not in pids and other in pids and status.json()["is_ready"]

    await wait_for_async(lambda: is_gone(victim))
    answers = [await complete(url) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}, "new connections reach those that live"
    await wait_for_async(is_back)
    await _who_came_back_knows_it(admin, url)


async def _who_came_back_knows_it(admin: Admin, url: str) -> None:
    """Settings sent to all before it started. It is the first one, which the parent queries where any of them can
    answer."""
    classes = (await admin.http.get("/admin/v1/slo")).json()["classes"]
    assert {"slo": "added", "ttft_s": 60.0, "itl_s": 0.0} in classes
    assert (await admin.http.get("/admin/v1/route/policy")).json()["policy"] == "round_robin"
    answers = [await complete(url, headers={"X-SLO-Class": "added"}) for _ in range(16)]
    assert {answer.status_code for answer in answers} == {200}, "whichever process it is"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_shared_port_is_not_shared_with_another_router(config: RouterConfig, processes: int) -> None:
    asyncio.run(_refused(with_settings(config, processes=2), processes))


async def _refused(config: RouterConfig, processes: int) -> None:
    async with running(config) as (_, ready):
        port = int(ready["http"].rsplit(":", 1)[1])
        folder = Path(config.ready_file).parent / "second"
        folder.mkdir()
        second = replace(config, router_id="r2", ready_file=str(folder / "ready.json"))
        with start(with_settings(second, port=port, grpc_port=0, processes=processes), folder) as process:
            _, words = await asyncio.to_thread(process.communicate, None, PATIENCE_S)
        assert process.returncode == 2, words
        assert f"cannot listen on 127.0.0.1:{port}" in words


def test_what_keeps_a_process_from_starting_is_said_once(config: RouterConfig) -> None:
    gone = (replace(config.models[0], model_dir="/nowhere"),)
    with start(with_settings(replace(config, models=gone), processes=3), Path(config.ready_file).parent) as process:
        _, words = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, words
    assert words.count("tandem router: ") == 1
    assert "tokenizer.json" in words


def test_an_ipv6_address(config: RouterConfig) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    asyncio.run(_ipv6(with_settings(config, host="::1")))


async def _ipv6(config: RouterConfig) -> None:
    """Brackets enclose the address wherever a port follows it: in addresses for launchers, and for gRPC."""
    async with worker(config), running(config) as (_, ready):
        assert ready["http"].startswith("http://[::1]:")

        async def is_ready() -> bool:
            async with httpx.AsyncClient(trust_env=False) as http:
                return (await http.get(f"{ready['http']}/readyz")).status_code == 200

        await wait_for_async(is_ready)
        assert (await complete(ready["http"])).json()["usage"]["completion_tokens"] == 4
        async with grpc.aio.insecure_channel(ready["grpc"]) as channel:
            call: Any = i_grpc.InferenceStub(channel).Generate(i.GenerateRequest(model="tiny", text="Hi"))
            assert [one async for one in call]


def test_tls(config: RouterConfig) -> None:
    asyncio.run(_tls(with_settings(config, tls_cert=str(TLS / "cert.pem"), tls_key=str(TLS / "key.pem"))))


async def _tls(config: RouterConfig) -> None:
    trusting = ssl.create_default_context(cafile=TLS / "cert.pem")
    async with worker(config), running(config) as (_, ready):
        assert ready["http"].startswith("https://")

        async def is_ready() -> bool:
            async with httpx.AsyncClient(verify=trusting, trust_env=False) as http:
                return (await http.get(f"{ready['http']}/readyz")).status_code == 200

        await wait_for_async(is_ready)
        answer = await complete(ready["http"], verify=trusting)
        assert answer.json()["usage"]["completion_tokens"] == 4
        with pytest.raises(httpx.HTTPError):
            await complete(ready["http"].replace("https", "http"))
        old = ssl.create_default_context(cafile=TLS / "cert.pem")
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.set_ciphers("AES128-SHA256:ECDHE-RSA-AES128-SHA256:ECDHE-ECDSA-AES128-SHA256:@SECLEVEL=0")
        with pytest.raises(httpx.ConnectError):
            await complete(ready["http"], verify=old)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
        async with Admin(ready["admin"]).http as admin:
            chatted = await admin.post("/admin/v1/chat", json=body)
        assert chatted.json()["usage"]["completion_tokens"] == 4, "the page's chat takes the router's own certificate"
        credentials = grpc.ssl_channel_credentials((TLS / "cert.pem").read_bytes())
        async with grpc.aio.secure_channel(ready["grpc"], credentials) as channel:
            call: Any = i_grpc.InferenceStub(channel).Generate(i.GenerateRequest(model="tiny", text="Hi"))
            assert [one async for one in call]


@pytest.mark.parametrize(
    ("cert", "key", "words"),
    [("cert.pem", "", "router.tls_key is missing"), ("", "key.pem", "router.tls_cert is missing"),
     ("key.pem", "key.pem", "cannot serve TLS"), ("cert.pem", "none.pem", "No such file")],
)  # fmt: skip
def test_tls_files_that_are_no_pair(config: RouterConfig, cert: str, key: str, words: str) -> None:
    here = {name: str(TLS / file) for name, file in (("tls_cert", cert), ("tls_key", key)) if file}
    with start(with_settings(config, **here), Path(config.ready_file).parent) as process:
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, said
    assert words in said
