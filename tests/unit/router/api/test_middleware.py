"""Test the ASGI middleware: disconnects, pacing and shutdown."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from starlette.requests import Request

from tandem.core.errors import CancelledError, CapacityError, InvalidRequestError, TandemError
from tandem.router.api.frontend import BURST, EACH_S, TURNS, RequestPacer
from tandem.router.api.http.middleware import ShutdownMiddleware, present


class Client:
    """A request with a client that stays until the test makes it leave."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.listeners = 0
        self.request = Request({"type": "http", "headers": []}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        self.listeners += 1
        try:
            await self.leaves.wait()
        finally:
            self.listeners -= 1
        return {"type": "http.disconnect"}


async def test_a_client_that_leaves_ends_the_work() -> None:
    client, begun, ended = Client(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def serve() -> None:
        with present(client.request):
            await work()

    task = asyncio.create_task(serve())
    await begun.wait()
    client.leaves.set()
    with pytest.raises(CancelledError, match="the client closed the connection"):
        await task
    assert ended.is_set()
    assert not client.listeners


async def test_afterwards_nobody_listens_and_the_task_goes_on() -> None:
    client = Client()
    with present(client.request):
        for _ in range(3):
            await asyncio.sleep(0)
        assert client.listeners == 1
    client.leaves.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not client.listeners
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()


async def test_errors_and_other_ends_are_left_as_they_are() -> None:
    client = Client()
    with pytest.raises(InvalidRequestError), present(client.request):
        raise InvalidRequestError("it is wrong")

    async def serve() -> None:
        with present(client.request):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_does_not_wait_starts_nobody() -> None:
    client, tasks = Client(), asyncio.all_tasks()
    with present(client.request):
        pass
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not client.listeners
    assert asyncio.all_tasks() == tasks


async def _let_in(
    intake: RequestPacer, tenants: Sequence[str]
) -> tuple[list[tuple[int, str]], list[asyncio.Task[None]]]:
    """Return the admitted requests, each with its turn of the loop after the first one."""
    entered: list[tuple[int, str]] = []
    turn = 0

    async def enter(tenant: str) -> None:
        await intake.turn(tenant)
        entered.append((turn, tenant))

    tasks = [asyncio.create_task(enter(tenant)) for tenant in tenants]
    for turn in range(1, TURNS * len(tenants) + 8):  # noqa: B007 - `enter` reads it
        await asyncio.sleep(0)
    return entered, tasks


async def test_whoever_comes_alone_does_not_wait() -> None:
    intake = RequestPacer()
    for _ in range(3):
        async with asyncio.timeout(1.0):
            await intake.turn("a")
        assert intake.waiting == 0
        await asyncio.sleep(0)


async def test_a_burst_at_once_then_one_in_a_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    intake = RequestPacer()
    for _ in range(2):
        entered, _ = await _let_in(intake, ["a"] * (BURST + 6))
        turns = [turn for turn, _ in entered]
        assert turns[:BURST] == [1] * BURST
        assert {later - turn for turn, later in pairwise(turns[BURST:])} == {TURNS}
        assert len(turns) == BURST + 6
        entered, _ = await _let_in(intake, ["a"])
        assert entered[0][0] > 1, "it has just let in one that waited"
        now_s += 2 * BURST * EACH_S


async def test_tenants_take_turns() -> None:
    entered, _ = await _let_in(RequestPacer(), ["greedy"] * 20 + ["modest"])
    assert [tenant for _, tenant in entered].index("modest") <= BURST + 2


async def test_who_has_most_waiting_pays_for_a_full_intake() -> None:
    intake = RequestPacer(limit=3)
    entered, tasks = await _let_in(intake, ["greedy"] * (BURST + 4) + ["modest"])
    refused = [task.exception() for task in tasks if task.exception() is not None]
    assert [type(error) for error in refused] == [CapacityError, CapacityError]
    assert tasks[-1].exception() is None, "it had least"
    assert len(entered) == BURST + 3


async def test_who_leaves_waits_no_more() -> None:
    intake = RequestPacer()
    for _ in range(BURST - 1):
        await intake.turn("z")
    first, second, third = (asyncio.create_task(intake.turn(tenant)) for tenant in "abc")
    await asyncio.sleep(0)
    assert intake.waiting == 2
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await asyncio.gather(first, third)
    await asyncio.sleep(0)
    assert intake.waiting == 0


PATIENCE_S = 20.0


async def _never(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nothing is let through")


class Upload:
    """A request with an endless body."""

    def __init__(self) -> None:
        self.is_heard = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if not self.is_heard.is_set():
            self.is_heard.set()
            return {"type": "http.request", "body": b"x", "more_body": True}
        return await asyncio.Future()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def run(self, parting: ShutdownMiddleware) -> None:
        scope = {"type": "http", "path": "/v1/files", "method": "POST", "headers": []}
        await parting(scope, self.receive, self.send)


async def test_who_is_heard_out_is_counted_and_answered_when_nobody_is_heard_any_more() -> None:
    told: list[TandemError] = []
    parting = ShutdownMiddleware(_never, lambda: True, told.append)
    early, late = Upload(), Upload()
    async with asyncio.timeout(PATIENCE_S):
        refused = asyncio.create_task(early.run(parting))
        await early.is_heard.wait()
        assert (parting.refusing, early.sent) == (1, [])
        parting.stop_reading_bodies()
        await refused
        await late.run(parting)
    assert [upload.sent[0]["status"] for upload in (early, late)] == [503, 503]
    assert parting.refusing == 0
    assert [error.code for error in told] == ["unavailable"] * 2


async def test_a_client_that_goes_away_is_not_counted_any_more() -> None:
    parting, upload = ShutdownMiddleware(_never, lambda: True, lambda error: None), Upload()
    refused = asyncio.create_task(upload.run(parting))
    await upload.is_heard.wait()
    refused.cancel()
    await asyncio.wait([refused], timeout=PATIENCE_S)
    assert refused.cancelled()
    assert parting.refusing == 0
