"""A prompt computed in one process, decoded in another; tokens equal those of transformers."""

from pathlib import Path

import pytest

from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.pair import pair, submit, tokens_of
from tests.integration.worker.reference import reference


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_prompt_crosses(folder: Path, transport: str) -> None:
    prompt = [(7 * i) % 4000 + 10 for i in range(100)]
    async with pair(folder, transport=transport) as (p, d):
        await d.send(submit=submit("r1", w.LEG_DECODE, p, prompt, max_tokens=12, ignore_eos=True))
        await p.send(submit=submit("r1", w.LEG_PREFILL, d, prompt, max_tokens=12, ignore_eos=True))
        first = await tokens_of(p, "r1", 1)
        rest = await tokens_of(d, "r1", 11, start=1)
        assert first + rest == reference(prompt, 12)
