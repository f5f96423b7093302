"""A model that caches latents, between workers of different TP: every receiving rank takes one copy of each block."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.integration.worker.pair import alone, handed_over, pair
from tests.integration.worker.reference import clear_answer
from tools.random_model import LATENT_RANK, TURNED, RandomModel, make_random_model
from tools.waiting import wait_for_async

MODEL = RandomModel(family="deepseek_v3", layers=2, heads=4, seed=3)
PROMPT = [(7 * i) % 500 + 2 for i in range(100)]
COUNT = 10
BLOCK_TOKENS = 16
TOKEN_KV_BYTES = MODEL.layers * (LATENT_RANK + TURNED) * 4


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (4, 1)])
def test_latents_cross_between_ranks_that_all_hold_them(folder: Path, p_tp: int, d_tp: int) -> None:
    make_random_model(MODEL, folder / "model")
    longer = PROMPT + PROMPT[:30]
    expected = {len(prompt): clear_answer(folder / "model", prompt, COUNT) for prompt in (PROMPT, longer)}

    async def run() -> None:
        async with pair(folder, model=folder / "model", prefill={"tp": p_tp}, decode={"tp": d_tp}) as (p, d):
            assert await handed_over(p, d, "cold", PROMPT, COUNT) == expected[len(PROMPT)]
            sent = d_tp * -(-len(PROMPT) // BLOCK_TOKENS) * BLOCK_TOKENS * TOKEN_KV_BYTES
            await wait_for_async(lambda: d.load.counters["transfer_bytes"] == sent)
            assert await handed_over(p, d, "warm", longer, COUNT) == expected[len(longer)]
            assert await alone(d, "alone", longer, COUNT) == expected[len(longer)]

    asyncio.run(run())
