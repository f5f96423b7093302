"""Answers of a stopping router to requests that come then."""

from __future__ import annotations

import asyncio
from typing import Any

from tandem.core.errors import TandemError
from tandem.router.api.http.shutdown_middleware import ShutdownMiddleware

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


def test_who_is_heard_out_is_counted_and_answered_when_nobody_is_heard_any_more() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_a_client_that_goes_away_is_not_counted_any_more() -> None:
    async def run() -> None:
        parting, upload = ShutdownMiddleware(_never, lambda: True, lambda error: None), Upload()
        refused = asyncio.create_task(upload.run(parting))
        await upload.is_heard.wait()
        refused.cancel()
        await asyncio.wait([refused], timeout=PATIENCE_S)
        assert refused.cancelled()
        assert parting.refusing == 0

    asyncio.run(run())
