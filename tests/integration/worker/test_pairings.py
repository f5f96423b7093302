"""Whole workers of the simulated engine, with KV that is read back, in all nine TP pairings: the oracle's tokens.

One worker of each TP is started for each role, and each prefill worker hands over to each decode worker.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.worker.loopback import prompt_of
from tests.integration.worker.pair import RunningWorker, handed_over, shape_in, start_worker, stop

COUNT = 12
SETTINGS: dict[str, Any] = {"engine": "sim", "chunk_tokens": 48, "max_step_tokens": 64, "layer_group": 1,
                            "max_model_len": 512, "kv_memory_bytes": 16 << 20}  # fmt: skip


def shape(folder: Path, kv_heads: int) -> Path:
    """A model folder without weights, of so many KV heads, and 8 query heads if these are enough."""
    return shape_in(folder, num_attention_heads=max(8, kv_heads), num_key_value_heads=kv_heads, head_dim=32)


async def every_pairing(folder: Path, kv_heads: int, p_tps: tuple[int, ...], d_tps: tuple[int, ...]) -> None:
    """Each pair hands over a prompt of several chunks. Its first third is in every prompt: an end that handed over
    before has it cached, at a first hand-over neither, one or the other has."""
    model = shape(folder / "tandem-tiny", kv_heads)
    secret = ClusterSecret.generate()
    secret.save(folder / "secret")
    redis = PrivateRedis.start(folder / "redis", "test-password")
    workers: dict[str, RunningWorker] = {}
    shared = prompt_of(70, 7)
    try:
        for role, tps in ((RoleName.PREFILL, p_tps), (RoleName.DECODE, d_tps)):
            for tp in tps:
                name = f"{role.value[0]}{tp}"
                workers[name] = await start_worker(folder, name, role, redis.url, model, tp=tp, **SETTINGS)
                assert len(workers[name].ready["rank_pids"]) == tp
        async with asyncio.TaskGroup() as tasks:
            for worker in workers.values():
                await worker.open(secret, tasks)
            for p_tp in p_tps:
                for d_tp in d_tps:
                    prompt = shared + prompt_of(150, 100 * p_tp + d_tp)
                    p, d = workers[f"p{p_tp}"], workers[f"d{d_tp}"]
                    tokens = await handed_over(p, d, f"from-{p_tp}-to-{d_tp}", prompt, COUNT)
                    assert tokens == expected_tokens(prompt, COUNT, 4096, eos_token_ids=(1,)), (p_tp, d_tp)
            for worker in workers.values():
                await worker.close()
    finally:
        async with AsyncExitStack() as ends:
            ends.callback(redis.stop)
            for worker in workers.values():
                ends.push_async_callback(stop, worker)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_all_nine(folder: Path, kv_heads: int) -> None:
    """With 2 KV heads ranks of TP 4 share one."""
    asyncio.run(every_pairing(folder, kv_heads, (1, 2, 4), (1, 2, 4)))


def test_three_ranks(folder: Path) -> None:
    """Of 12 KV heads: what the second one holds goes to both ranks of the other worker."""
    asyncio.run(every_pairing(folder, 12, (3,), (2,)))


def test_eight_ranks(folder: Path) -> None:
    asyncio.run(every_pairing(folder, 8, (8,), (2,)))
