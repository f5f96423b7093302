"""Work for a client that leaves is given up at once; everything else about it is as if the client were not watched."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from tandem.core.errors import CancelledError, InvalidRequestError
from tandem.router.api.http.disconnect import present


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


def test_a_client_that_leaves_ends_the_work() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_afterwards_nobody_listens_and_the_task_goes_on() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_errors_and_other_ends_are_left_as_they_are() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_work_that_does_not_wait_starts_nobody() -> None:
    async def run() -> None:
        client, tasks = Client(), asyncio.all_tasks()
        with present(client.request):
            pass
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not client.listeners
        assert asyncio.all_tasks() == tasks

    asyncio.run(run())
