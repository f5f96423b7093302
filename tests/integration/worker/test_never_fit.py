"""Requests that could not run on an idle worker are refused at once, with the reason, and do not wait behind others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.core.config import SimSection
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.pair import RunningWorker, pair, submit

PROMPT = [(7 * i) % 4000 + 10 for i in range(40)]
SLOW = SimSection(decode_step_s=0.02)
"""The answer that runs meanwhile takes ten seconds."""


async def refused(worker: RunningWorker, request: str, leg: Any, **sampling: Any) -> tuple[str, str]:
    """Code and reason, which come before the running answer's end."""
    await worker.send(submit=submit(request, leg, worker, PROMPT, ignore_eos=True, **sampling))
    async with asyncio.timeout(60):
        while True:
            message = await worker.messages.get()
            assert not any(chunk.finish for chunk in message.tokens.chunks), "it waited for the other one's end"
            if message.failed.request == request:
                return message.failed.code, message.failed.message


@pytest.mark.parametrize("leg", [w.LEG_FULL, w.LEG_DECODE], ids=["whole", "decode"])
def test_a_request_that_can_never_fit_is_refused_at_once(folder: Path, leg: Any) -> None:
    async def run() -> list[tuple[str, str]]:
        async with pair(folder, engine="sim", sim=SLOW, kv_memory_bytes=16 << 20, max_model_len=2048) as (_, d0):
            await d0.send(submit=submit("long", w.LEG_FULL, d0, PROMPT, max_tokens=500, ignore_eos=True))
            async with asyncio.timeout(60):
                while not (await d0.messages.get()).tokens.chunks:
                    pass
            return [
                await refused(d0, "blocks", leg, max_tokens=1900, n=16),
                await refused(d0, "context", leg, max_tokens=2009),
            ]

    blocks, context = asyncio.run(run())
    assert blocks[0] == context[0] == "context_length_exceeded"
    assert "needs up to 1922 KV blocks" in blocks[1]
    assert "this worker has 204" in blocks[1]
    assert "lower max_tokens or n" in blocks[1]
    assert "the context length here is 2048" in context[1]
