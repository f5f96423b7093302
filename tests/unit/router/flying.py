"""Flights with an inbox, and workers' messages to them."""

from __future__ import annotations

import asyncio

from tandem.core.ids import RequestId
from tandem.core.sampling import SamplingParams
from tandem.router.dispatch.inflight_request import Flight, Inbox, Work
from tandem.router.workers.proto_convert import TokenChunk


def chunk(index: int, tokens: list[int], **more: object) -> TokenChunk:
    fields: dict[str, object] = {"request": "r", "attempt": 1, "choice": 0, **more}
    return TokenChunk(index=index, tokens=tokens, **fields)  # type: ignore[arg-type]


def flight(inbox: Inbox, n: int = 1) -> Flight:
    work = Work(prompt=[1], sampling=SamplingParams(max_tokens=100, n=n), timeout_s=1)
    return Flight(id=RequestId("r"), slot=0, work=work, inbox=inbox, started_s=0)


def read(inbox: Inbox) -> list[int]:
    async def run() -> list[int]:
        return [token for arrival in await inbox.take() for token in arrival.tokens]

    return asyncio.run(run())
