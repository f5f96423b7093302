"""A model that caches latents, between workers of different TP: every receiving rank takes one copy of each block."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.worker.pair import alone, handed_over, pair
from tools.random_model import LATENT_RANK, TURNED, RandomModel, make_random_model
from tools.waiting import wait_for_async

MODEL = RandomModel(family="deepseek_v3", layers=2, heads=4, seed=3)
PROMPT = [(7 * i) % 500 + 2 for i in range(100)]
COUNT = 10
BLOCK_TOKENS = 16
TOKEN_KV_BYTES = MODEL.layers * (LATENT_RANK + TURNED) * 4


def greedy_of_transformers(folder: Path, prompt: list[int]) -> list[int]:
    """Of which no two candidates are so close that the order of a sum could swap them."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(COUNT):
            best = model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "choose another prompt"
            tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (4, 1)])
def test_latents_cross_between_ranks_that_all_hold_them(folder: Path, p_tp: int, d_tp: int) -> None:
    make_random_model(MODEL, folder / "model")
    longer = PROMPT + PROMPT[:30]
    expected = {len(prompt): greedy_of_transformers(folder / "model", prompt) for prompt in (PROMPT, longer)}

    async def run() -> None:
        async with pair(folder, model=folder / "model", prefill={"tp": p_tp}, decode={"tp": d_tp}) as (p, d):
            assert await handed_over(p, d, "cold", PROMPT, COUNT) == expected[len(PROMPT)]
            sent = d_tp * -(-len(PROMPT) // BLOCK_TOKENS) * BLOCK_TOKENS * TOKEN_KV_BYTES
            await wait_for_async(lambda: d.load.counters["transfer_bytes"] == sent)
            assert await handed_over(p, d, "warm", longer, COUNT) == expected[len(longer)]
            assert await alone(d, "alone", longer, COUNT) == expected[len(longer)]

    asyncio.run(run())
