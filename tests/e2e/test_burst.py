"""200 streams, 64 at a time, a fifth of them cancelled at random moments: each ends once, and nothing is left."""

import asyncio
import json
import random
import time

import httpx

from tools.running_cluster import Cluster
from tools.waiting import wait_for

REQUESTS, AT_ONCE, CANCELLED = 200, 64, 40


async def _one(client: httpx.AsyncClient, index: int, dice: random.Random, gate: asyncio.Semaphore) -> str:
    body = {
        "model": "tandem-tiny",
        "prompt": [dice.randrange(300, 4000) for _ in range(dice.choice((1, 17, 64, 200, 500)))],
        "max_tokens": dice.choice((1, 5, 20, 60)),
        "ignore_eos": True,
        "stream": True,
        "seed": index,
    }
    leave_after = dice.randrange(0, 15) if index % 5 == 0 else None
    if leave_after is not None:
        body["max_tokens"] = 200
    async with gate, client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        finishes, dones, events = 0, 0, 0
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                dones += 1
                continue
            assert '"error"' not in line, line
            events += 1
            finishes += sum(c["finish_reason"] is not None for c in json.loads(line[6:])["choices"])
            if leave_after is not None and events > leave_after:
                return "left"
        assert (finishes, dones) == (1, 1)
        return "done"


def test_burst(cluster: Cluster) -> None:
    dice = random.Random(4)

    async def run() -> list[str]:
        gate = asyncio.Semaphore(AT_ONCE)
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=cluster.api, timeout=120, limits=limits, trust_env=False) as client:
            tasks = [_one(client, index, random.Random(dice.random()), gate) for index in range(REQUESTS)]
            return await asyncio.gather(*tasks)

    endings = asyncio.run(run())
    ended_s = time.monotonic()
    assert endings.count("left") == CANCELLED
    assert endings.count("done") == REQUESTS - CANCELLED

    def is_quiet() -> bool:
        status = cluster.status()
        return status["router"]["in_flight"] == 0 and all(
            w["in_flight"] == 0 and all(b["request"] + b["pushing"] + b["reserved"] == 0 for b in w["blocks"])
            for w in status["workers"]
        )

    wait_for(is_quiet, what="no request in flight, no block held")
    print(f"quiet {time.monotonic() - ended_s:.2f} s after the last request")
    for worker in cluster.status()["workers"]:
        for blocks in worker["blocks"]:
            assert blocks["free"] + blocks["cached"] == blocks["total"]
