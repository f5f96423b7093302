"""Answers of several processes of a router, merged."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tandem.core import metric_names as names
from tandem.router.admin import multiprocess_admin
from tandem.router.admin.app import POLICY_PATH, SLO_PATH
from tandem.router.admin.multiprocess_admin import ReplicatedSettings, RouterMember, added_up, create_parts_admin
from tandem.router.admission import status as admission_status


def text(requests: int, seconds: float, worker_steps: int) -> str:
    registry = CollectorRegistry()
    Counter("requests", "Requests.", ["api"], registry=registry).labels("chat").inc(requests)
    Histogram("wait_seconds", "Waiting.", buckets=(1.0, 2.0), registry=registry).observe(seconds)
    Gauge("in_flight", "Now.", registry=registry).set(requests)
    Counter("steps", "By a worker.", ["worker"], registry=registry).labels("d0").inc(worker_steps)
    return generate_latest(registry).decode()


def test_samples_are_added_but_for_what_workers_reported() -> None:
    families = {family.name: family for family in added_up([text(3, 0.5, 70), text(4, 1.5, 71)])}
    values = {(s.name, *sorted(s.labels.values())): s.value for f in families.values() for s in f.samples}
    assert values["requests_total", "chat"] == 7
    assert values[("in_flight",)] == 7
    assert (values["wait_seconds_count",], values["wait_seconds_sum",]) == (2, 2.0)
    assert [values["wait_seconds_bucket", le] for le in ("1.0", "2.0", "+Inf")] == [1, 2, 2]
    assert values["steps_total", "d0"] == 70, "both heard it from the worker"
    assert families["wait_seconds"].type == "histogram"
    assert families["requests"].documentation == "Requests."


def test_the_last_order_for_each_thing_is_kept() -> None:
    orders = ReplicatedSettings()
    first, other, last = b'{"slo":"a","ttft_s":1}', b'{"slo":"b"}', b'{"slo":"a","ttft_s":2}'
    for path, body in ((SLO_PATH, first), (POLICY_PATH, b'{"policy":"random"}'), (SLO_PATH, other), (SLO_PATH, last),
                       (POLICY_PATH, b'{"policy":"cost"}')):  # fmt: skip
        orders.keep(path, body)
    assert sorted(orders.every()) == [(POLICY_PATH, b'{"policy":"cost"}'), (SLO_PATH, last), (SLO_PATH, other)]


KEY = "a key that nobody guesses"
LIMIT = 1000


def test_what_every_process_knows_of_the_index_is_no_sum() -> None:
    texts = [f"# TYPE {names.INDEX_BLOCKS} gauge\n{names.INDEX_BLOCKS} {count}\n" for count in (70, 72)]
    (family,) = added_up(texts)
    assert [sample.value for sample in family.samples] == [72]


@pytest.mark.parametrize(
    ("metric", "labels", "of_each", "together"),
    [
        (names.WORKER_UP, '{worker="d0"}', (1, 0), 0),
        (names.WORKER_UP, '{worker="d0"}', (0, 1), 0),
        (names.WORKER_UP, '{worker="d0"}', (1, 1), 1),
        (names.WORKER_REGISTERED, '{worker="d0"}', (0, 1), 1),
        (names.BREAKER, '{worker="d0"}', (0, 2), 2),
        (names.BREAKER, '{worker="d0"}', (2, 1), 2),
        (names.RETRY_BUDGET, "", (20, 0.5), 0.5),
    ],
)
def test_a_worker_is_as_the_process_has_it_that_is_worst_off(
    metric: names.Metric, labels: str, of_each: tuple[float, ...], together: float
) -> None:
    (family,) = added_up([f"# TYPE {metric} gauge\n{metric}{labels} {value}\n" for value in of_each])
    assert [sample.value for sample in family.samples] == [together]


def test_every_gauge_of_routers_is_added_but_for_those() -> None:
    """Review each new gauge: is the sum over processes meaningful?"""
    gauges = {
        one for one in names.CATALOGUE.values() if one.source is names.MetricSource.ROUTER and one.kind == "gauge"
    }
    assert gauges - multiprocess_admin._LEAST - multiprocess_admin._MOST == {
        names.ROUTER_IN_FLIGHT, names.ROUTER_PROCESS_UP, names.BATCH_RUNNING, names.WAITING, names.ADMISSION_WAITING,
    }  # fmt: skip


def status(in_flight: int, *workers: dict[str, Any]) -> bytes:
    router = {"incarnation": "7", "in_flight": in_flight, "pid": 1}
    return orjson.dumps({"is_ready": True, "workers": workers, "admission": {}, "router": router})


CUT_OFF = (b"", b"HTTP/1.1", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{")


class Processes:
    """Admin ports that answer every request with the next of `bodies`; None never, and CUT_OFF not to the end."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def part(self, stack: contextlib.AsyncExitStack, name: str, body: bytes | None) -> RouterMember:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head.split(b"\r\n")[0])
            if body in CUT_OFF:
                writer.write(body or b"")
            elif body is not None:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            else:
                await reader.read()  # until the client has gone
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        await stack.enter_async_context(server)
        return RouterMember(name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 10)


@contextlib.asynccontextmanager
async def asking(*bodies: bytes | None) -> AsyncIterator[tuple[httpx.AsyncClient, Processes]]:
    processes = Processes()
    async with contextlib.AsyncExitStack() as stack:
        parts = [await processes.part(stack, f"r-{number}", body) for number, body in enumerate(bodies)]
        made = create_parts_admin(
            "r", 1, lambda: parts, ReplicatedSettings(), admin_key=KEY.encode(), max_body_bytes=LIMIT
        )
        transport = httpx.ASGITransport(made)
        yield await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://r")), processes


@pytest.mark.parametrize("answer", CUT_OFF)
async def test_a_process_that_dies_while_it_is_asked_is_named_and_the_others_are_heard(answer: bytes) -> None:
    async with asking(text(3, 0.5, 70).encode(), answer) as (client, _):
        lines = (await client.get("/metrics")).text.splitlines()
    assert f'{names.ROUTER_PROCESS_UP}{{process="r-0"}} 1.0' in lines
    assert f'{names.ROUTER_PROCESS_UP}{{process="r-1"}} 0.0' in lines


async def test_a_process_that_hangs_is_named_and_the_others_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocess_admin, "TOGETHER_S", 0.5)
    monkeypatch.setattr(admission_status, "added_up", lambda pages: {"pages": len(pages)})
    async with asking(status(3), None) as (client, _):
        page: dict[str, Any] = (await client.get("/admin/v1/status")).json()
    first, second = page["router"]["processes"]
    assert (page["router"]["in_flight"], page["admission"]) == (3, {"pages": 1})
    assert (first["id"], first["is_ready"]) == ("r-0", True)
    assert (second["id"], second["is_ready"], second["pid"]) == ("r-1", False, 10)
    assert "r-1 of this router does not answer" in second["trouble"]
    async with asking(text(3, 0.5, 70).encode(), None) as (client, _):
        lines = (await client.get("/metrics")).text.splitlines()
    assert 'requests_total{api="chat"} 3.0' in lines
    assert f'{names.ROUTER_PROCESS_UP}{{process="r-0"}} 1.0' in lines
    assert f'{names.ROUTER_PROCESS_UP}{{process="r-1"}} 0.0' in lines
    async with asking(None, None) as (client, _):
        assert (await client.get("/metrics")).status_code == 503


async def test_the_status_of_workers_is_not_that_of_the_first_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_status, "added_up", lambda pages: {})
    fine = {"worker": "d0", "is_connected": True, "is_registered": True, "state": "ready", "trouble": ""}
    first, second = ({**fine, "breaker": name, "router_in_flight": n} for name, n in (("closed", 2), ("open", 3)))
    async with asking(status(2, first), status(3, second, {**second, "worker": "d1"})) as (client, _):
        rows = (await client.get("/admin/v1/status")).json()["workers"]
    assert [(row["worker"], row["router_in_flight"], row["breaker"]) for row in rows] == [
        ("d0", 5, "open"), ("d1", 3, "open"),
    ]  # fmt: skip


async def test_who_has_no_key_is_not_read_and_who_has_one_only_so_far() -> None:
    async with asking(b"{}") as (client, processes):
        for given in ("", "Bearer wrong", f"Basic {KEY}"):
            answer = await client.post("/admin/v1/kv/repair", content=b" " * 9, headers={"authorization": given})
            assert answer.status_code == 401
        client.headers["authorization"] = f"Bearer {KEY}"
        for path, most in (("route/explain", LIMIT), ("route/policy", 1 << 16)):
            assert (await client.post(f"/admin/v1/{path}", content=b" " * (most + 1))).status_code == 413
        assert processes.asked == []
        assert (await client.post("/admin/v1/route/explain?a=b%20c", content=b" " * LIMIT)).status_code == 200
        assert processes.asked == [b"POST /admin/v1/route/explain?a=b%20c HTTP/1.1"]
        assert (await client.get("/admin/v1/x", headers={"host": "["})).status_code == 200
