"""A worker reports its memory plan before it allocates any, and does not start where there is too little."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import pytest

from tandem.core.cpu_level import cpu_level, product_words
from tests.integration.worker.alone import worker_of
from tools.waiting import wait_for_async


def test_a_worker_says_what_its_memory_is_for(folder: Path) -> None:
    async def run() -> list[str]:
        async with worker_of(folder, 1, kv_memory_bytes=64 << 20) as worker:
            worker.process.send_signal(signal.SIGTERM)
            return worker.progress

    progress = asyncio.run(run())
    (line,) = [line for line in (folder / "m0.log").read_text().splitlines() if " memory planned " in line]
    said = {name: int(size) for name, size in re.findall(r"(\w+)_bytes=(\d+)", line)}
    assert list(said) == ["weights", "kv", "activations", "sampler", "graphs", "total"]
    assert sum(said.values()) == 2 * said["total"]
    assert (64 << 20) - (1 << 20) < said["kv"] <= 64 << 20
    assert any(words.startswith("memory of a rank: ") and "64MiB" in words for words in progress)
    assert f"computes in float32; matrix products: {product_words(cpu_level(), 'float32')}" in progress


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_takes_its_memory_once_it_is_ready(folder: Path, tp: int) -> None:
    """No request comes, and none later can find that the memory is gone."""

    def taken() -> list[int]:
        return [int(size) for size in re.findall(r"KV memory is taken bytes=(\d+)", (folder / "m0.log").read_text())]

    async def run() -> None:
        async with worker_of(folder, tp, kv_memory_bytes=32 << 20) as worker:
            await wait_for_async(lambda: len(taken()) == tp)
            worker.process.send_signal(signal.SIGTERM)

    asyncio.run(run())
    assert all((31 << 20) < size <= 32 << 20 for size in taken())


@pytest.mark.parametrize("tp", [1, 2])
def test_too_little_memory_is_refused_before_any_is_taken(folder: Path, tp: int) -> None:
    async def run() -> None:
        async with worker_of(folder, tp, kv_memory_bytes=1 << 50):
            pass

    with pytest.raises(RuntimeError, match=r"of memory and \d+\w+ are free.*[Gg]ive --kv-memory \d+MiB or less"):
        asyncio.run(run())
