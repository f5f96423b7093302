"""A prompt computed in one process, decoded in another; tokens equal those of transformers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.pair import MODEL, RunningWorker, pair, submit


def reference(prompt: list[int], count: int) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return [int(t) for t in out[0, len(prompt) :]]


async def tokens_of(worker: RunningWorker, request: str, count: int, start: int = 0) -> list[int]:
    tokens: list[int] = []
    async with asyncio.timeout(60):
        while len(tokens) < count:
            message = await worker.messages.get()
            assert not message.HasField("failed"), message
            for chunk in message.tokens.chunks:
                assert chunk.request == request
                assert chunk.index == start + len(tokens)
                tokens += chunk.tokens
    return tokens


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_prompt_crosses(folder: Path, transport: str) -> None:
    prompt = [(7 * i) % 4000 + 10 for i in range(100)]

    async def run() -> list[int]:
        async with pair(folder, transport=transport) as (p, d):
            await d.send(submit=submit("r1", w.LEG_DECODE, p, prompt, max_tokens=12, ignore_eos=True))
            await p.send(submit=submit("r1", w.LEG_PREFILL, d, prompt, max_tokens=12, ignore_eos=True))
            first = await tokens_of(p, "r1", 1)
            rest = await tokens_of(d, "r1", 11, start=1)
            return first + rest

    assert asyncio.run(run()) == reference(prompt, 12)
