"""Cost of the checksum: gather and scatter of 1 MiB frames with it, without it, and without the native library.

Blocks lie in random order in a pool that no cache holds. The three ways take turns, a batch of calls each.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.kvtransfer import pools
from bench.report import Row
from tandem.core.kv_layout import KVGroupSpec
from tandem.kernels import kv_payload, native
from tandem.kernels.kv_payload.binding import library

FRAME_BYTES = 1 << 20
BATCH = 16
Move = Callable[[list[int]], object]


def run(seconds: float) -> list[Row]:
    """All rows; raises RuntimeError where there is no native library."""
    cases = (
        ("64 KiB blocks", pools.SQUARE, range(4)),
        ("30 layers, 3 heads", pools.SMALL_135M, range(3)),
        ("one of 4 heads", pools.SQUARE, range(2, 3)),
    )
    return [row for name, spec, heads in cases for row in _case(name, spec, heads, seconds)]


def _case(name: str, spec: KVGroupSpec, heads: range, seconds: float) -> list[Row]:
    native = library()
    if native is None:
        raise RuntimeError("the native library cannot be built here")
    total = pools.num_blocks(spec)
    pool = memoryview(bytearray(random.Random(1).randbytes(1 << 20) * (total * spec.block_bytes() // (1 << 20) + 1)))
    pool = pool[: total * spec.block_bytes()]
    shape = kv_payload.PoolShape(
        num_blocks=total, layers=len(spec.layers), planes=spec.planes, heads=spec.heads,
        block_tokens=spec.block_tokens, row_bytes=spec.head_bytes() // spec.block_tokens,
    )  # fmt: skip
    layers = range(len(spec.layers))
    count = max(1, FRAME_BYTES // (spec.block_bytes() * len(heads) // spec.heads))
    frame = memoryview(bytearray(count * spec.block_bytes() * len(heads) // spec.heads))
    rows = []
    for way, fused in (("gather", kv_payload.gather), ("scatter", kv_payload.scatter)):

        def plain(blocks: list[int], way: str = way) -> object:
            return native.move(f"plain_{way}", pool, shape, blocks, layers, heads, frame)

        def checked(blocks: list[int], fused: Callable[..., int] = fused) -> object:
            return fused(pool, shape, blocks, layers, heads, frame)

        speeds = _speeds({"plain": plain, "fused": checked, "portable": checked}, total, count, len(frame), seconds)
        rows += [
            Row(name, f"{way} with checksum", speeds["fused"], "GiB/s", speeds["plain"]),
            Row(name, f"{way}: time the checksum adds", 100 * (speeds["plain"] / speeds["fused"] - 1), "%", 10.0),
            Row(name, f"{way} with checksum, native off", speeds["portable"], "GiB/s", speeds["plain"]),
        ]
    return rows


def _speeds(ways: dict[str, Move], total: int, count: int, size: int, seconds: float) -> dict[str, float]:
    """GiB/s of every way, the median over batches; the portable one runs with the native library off."""
    dice = random.Random(3)
    took: dict[str, list[float]] = {way: [] for way in ways}
    end_s = time.perf_counter() + seconds * len(ways)
    while time.perf_counter() < end_s or len(took["plain"]) < 5:
        order = [dice.sample(range(total), count) for _ in range(BATCH)]
        for way, move in ways.items():
            with _native(is_on=way != "portable"):
                started_s = time.perf_counter()
                for blocks in order:
                    move(blocks)
                took[way].append(time.perf_counter() - started_s)
    return {way: size * BATCH / statistics.median(times) / (1 << 30) for way, times in took.items()}


@contextmanager
def _native(*, is_on: bool) -> Iterator[None]:
    was_on = native.enable(is_on)
    try:
        yield
    finally:
        native.enable(was_on)
