"""Workers of several ranks: the same fp32 tokens as one rank, alone and at the end of a transfer from any other TP."""

import asyncio
import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.pair import RunningWorker, alone, handed_over, pair, submit
from tests.integration.worker.reference import reference
from tools.waiting import wait_for_async

PROMPT = [(7 * i) % 4000 + 10 for i in range(100)]
COUNT = 12
BLOCK_TOKENS = 16
TOKEN_KV_BYTES = 5 * 2 * 4 * 32 * 4
"""Of the bundled model in fp32: layers, planes, KV heads, width, bytes."""


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2), (2, 4)])
async def test_tokens_cross_between_any_two(folder: Path, p_tp: int, d_tp: int) -> None:
    """Alone on each, through a transfer, and again where the decode worker has most of the prompt already."""

    other, longer = PROMPT[::-1], PROMPT + PROMPT[:30]
    expected = {len(prompt): reference(prompt, COUNT) for prompt in (PROMPT, longer)}  # slow: before streams are open
    expected_alone = reference(other, COUNT)
    async with pair(folder, prefill={"tp": p_tp}, decode={"tp": d_tp}) as (p, d):
        assert [len(p.ready["rank_pids"]), len(d.ready["rank_pids"])] == [p_tp, d_tp]
        assert await alone(p, "p-alone", other, COUNT) == expected_alone
        assert await alone(d, "d-alone", other, COUNT) == expected_alone
        for request, prompt in (("cold", PROMPT), ("warm", longer)):
            assert await handed_over(p, d, request, prompt, COUNT) == expected[len(prompt)]


async def test_chunks_and_layer_groups_of_every_rank_arrive_computed(folder: Path) -> None:
    """Chunks pushed layer by layer while the rest is computed: a rank that pushed too early would send zeros. Bytes are
    counted over all ranks."""
    prompts = {f"r{k}": [(31 * i + 7 * k) % 4000 + 10 for i in range(700)] for k in range(4)}
    expected = {request: reference(prompt, COUNT) for request, prompt in prompts.items()}
    async with pair(folder, tp=2, chunk_tokens=48, max_step_tokens=64, layer_group=1) as (p, d):
        for request, prompt in prompts.items():
            await d.send(submit=submit(request, w.LEG_DECODE, p, prompt, max_tokens=COUNT, ignore_eos=True))
            await p.send(submit=submit(request, w.LEG_PREFILL, d, prompt, max_tokens=COUNT, ignore_eos=True))
        first, rest = await all_tokens(p, prompts, 1), await all_tokens(d, prompts, COUNT - 1)
        for request in prompts:
            assert first[request] + rest[request] == expected[request]
        blocks = sum(-(-len(prompt) // BLOCK_TOKENS) for prompt in prompts.values())
        await wait_for_async(lambda: p.load.counters["handovers"] >= len(prompts))
        await wait_for_async(lambda: d.load.counters["transfer_bytes"] >= 1)
        whole = blocks * BLOCK_TOKENS * TOKEN_KV_BYTES
        assert p.load.counters["kv_sent_bytes"] == d.load.counters["kv_received_bytes"] == whole
        await wait_for_async(lambda: d.load.counters["transfer_bytes"] == whole)


async def test_every_block_comes_back_from_a_crowd_of_which_half_is_cancelled(folder: Path) -> None:
    """Two ranks on both ends. Requests that are not cancelled end as if the others had not been."""
    rng = random.Random(5)
    prompts = [[rng.randrange(10, 4000) for _ in range(rng.randrange(20, 400))] for _ in range(24)]
    kept = {f"r{k}": prompt for k, prompt in enumerate(prompts) if k % 2}
    expected = {request: reference(prompt, COUNT) for request, prompt in kept.items()}
    async with pair(folder, tp=2) as (p, d):
        for k, prompt in enumerate(prompts):
            await d.send(submit=submit(f"r{k}", w.LEG_DECODE, p, prompt, max_tokens=COUNT, ignore_eos=True))
            await p.send(submit=submit(f"r{k}", w.LEG_PREFILL, d, prompt, max_tokens=COUNT, ignore_eos=True))
            if k >= 8 and k % 2 == 0:
                for worker in (p, d):
                    await worker.send(cancel=w.Cancel(request=f"r{k - 8}", attempt=1, reason="a test"))
        for k in range(16, 24, 2):
            for worker in (p, d):
                await worker.send(cancel=w.Cancel(request=f"r{k}", attempt=1, reason="a test"))
        first, rest = await all_tokens(p, kept, 1), await all_tokens(d, kept, COUNT - 1)
        for request in kept:
            assert first[request] + rest[request] == expected[request]
        await wait_for_async(lambda: not held(p) and not held(d))


async def test_a_receiving_rank_dies_in_the_middle_and_the_senders_ranks_let_everything_go(folder: Path) -> None:
    expected = reference(PROMPT, COUNT)
    async with pair(folder, tp=2, chunk_tokens=48, max_step_tokens=64, layer_group=1) as (p, d):
        for k in range(4):
            prompt = [(31 * i + 7 * k) % 4000 + 10 for i in range(1500)]
            await d.send(submit=submit(f"r{k}", w.LEG_DECODE, p, prompt, max_tokens=50, ignore_eos=True))
            await p.send(submit=submit(f"r{k}", w.LEG_PREFILL, d, prompt, max_tokens=50, ignore_eos=True))
        await wait_for_async(lambda: any(b.pushing for b in p.load.blocks))
        os.kill(int(d.ready["rank_pids"][1]), signal.SIGKILL)
        await wait_for_async(lambda: not held(p))
        after = submit("after", w.LEG_FULL, p, PROMPT, max_tokens=COUNT, ignore_eos=True)
        await p.send(submit=after)
        assert (await all_tokens(p, ["after"], COUNT))["after"] == expected


async def all_tokens(worker: RunningWorker, requests: Iterable[str], count: int) -> dict[str, list[int]]:
    """The first `count` tokens of each request; those of others are passed over."""
    tokens: dict[str, list[int]] = {request: [] for request in requests}
    async with asyncio.timeout(60):
        while any(len(some) < count for some in tokens.values()):
            message = await worker.messages.get()
            assert message.failed.request not in tokens, message
            for chunk in message.tokens.chunks:
                if chunk.request in tokens:
                    tokens[chunk.request] += chunk.tokens
    return tokens


def held(worker: RunningWorker) -> int:
    """Blocks that requests, tickets and pushes hold, and transfers that are open."""
    blocks = sum(b.request + b.pushing + b.reserved for b in worker.load.blocks)
    return blocks + int(worker.load.counters["transfer_open"]) + worker.load.in_flight
