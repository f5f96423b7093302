"""Flights with an inbox, and workers' messages to them."""

import asyncio

from tandem.core.ids import RequestId
from tandem.core.sampling import SamplingParams
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest, InFlightRequest
from tandem.router.workers.proto_convert import TokenChunk


def chunk(index: int, tokens: list[int], **more: object) -> TokenChunk:
    fields: dict[str, object] = {"request": "r", "attempt": 1, "choice": 0, **more}
    return TokenChunk(index=index, tokens=tokens, **fields)  # type: ignore[arg-type]


def flight(inbox: ArrivalQueue, n: int = 1) -> InFlightRequest:
    work = GenerationRequest(prompt=[1], sampling=SamplingParams(max_tokens=100, n=n), timeout_s=1)
    return InFlightRequest(id=RequestId("r"), slot=0, work=work, inbox=inbox, started_s=0)


def read(inbox: ArrivalQueue) -> list[int]:
    async def run() -> list[int]:
        return [token for arrival in await inbox.take() for token in arrival.tokens]

    return asyncio.run(run())
