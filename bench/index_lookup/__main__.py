"""Time of one lookup in the replica's table, without Redis.

Every worker holds a random leading part of every measured prompt (so bits drop on the way), or all of it ("deep").
200 prompts take turns, which no cache holds; "hot" is one prompt again and again, as with a shared system prompt.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path

from bench.report import Row, publish
from tandem.core.blockhash import BlockHash
from tandem.core.ids import WorkerId
from tandem.prefixindex.blocktable import BlockTable


def fill(table: BlockTable, workers: int, blocks: int) -> list[int]:
    """`blocks` random blocks, each on one to three workers; returns the workers' slots."""
    bits = [table.open_slot() for _ in range(workers)]
    for number, bit in enumerate(bits):
        table.go_live(bit, WorkerId(f"w{number}"))
    for start in range(0, blocks, 1000):
        chunk = [(0, BlockHash(os.urandom(16))) for _ in range(min(1000, blocks - start))]
        for bit in random.sample(bits, random.randint(1, 3)):
            table.add(bit, chunk)
    return bits


def prompts(
    table: BlockTable, bits: list[int], depth: Callable[[], int], count: int, length: int
) -> list[list[BlockHash]]:
    """Prompts of `length` blocks, the first `depth()` of them on each worker."""
    made = []
    for _ in range(count):
        hashes = [BlockHash(os.urandom(16)) for _ in range(length)]
        for bit in bits:
            table.add(bit, [(0, block) for block in hashes[: depth()]])
        made.append(hashes)
    return made


def measure(table: BlockTable, asked: list[list[BlockHash]], rounds: int) -> dict[str, float]:
    """Microseconds a lookup; fresh hash objects, as a router makes them, so that no hash value is cached."""
    times = []
    for _ in range(rounds):
        for hashes in asked:
            fresh = [BlockHash(bytes(bytearray(block))) for block in hashes]
            begin = time.perf_counter_ns()
            table.lookup(fresh)
            times.append((time.perf_counter_ns() - begin) / 1000)
    cuts = statistics.quantiles(times, n=100)
    return {"p5_us": round(cuts[4], 1), "p50_us": round(statistics.median(times), 1), "p99_us": round(cuts[98], 1)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.index_lookup", description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="blocks of a prompt")
    args = parser.parse_args()
    tracemalloc.start()
    table = BlockTable(2 * args.blocks + 1_000_000)
    bits = fill(table, args.workers, args.blocks)
    entry_bytes = tracemalloc.get_traced_memory()[0] / table.entries
    tracemalloc.stop()
    deep = prompts(table, bits, lambda: args.length, 200, args.length)
    mixed = prompts(table, bits, lambda: random.randint(0, args.length), 200, args.length)
    absent = [[BlockHash(os.urandom(16)) for _ in range(args.length)]]
    case = f"{args.length} blocks, {args.workers} workers, {table.entries} entries"
    rows = [Row(case, "bytes an entry", entry_bytes, "bytes")]
    for name, asked, rounds in (
        ("hot", deep[:1], 2000),
        ("deep", deep, 10),
        ("mixed", mixed, 10),
        ("miss", absent, 2000),
    ):
        limit = bare_walk(asked, rounds) if name != "miss" else None
        figures = measure(table, asked, rounds)
        rows += [
            Row(case, f"{name} {key}", value, "us", limit if key == "p50_us" else None)
            for key, value in figures.items()
        ]
    publish("index_lookup", rows, args.out)
    return 0


def bare_walk(asked: list[list[BlockHash]], rounds: int) -> float:
    """The machine's limit: median microseconds of one dictionary read a block, in C, over the same hashes."""
    known = {block: 1 for hashes in asked for block in hashes}
    times = []
    for _ in range(rounds):
        for hashes in asked:
            fresh = [bytes(bytearray(block)) for block in hashes]
            begin = time.perf_counter_ns()
            deque(map(known.get, fresh), maxlen=0)  # type: ignore[arg-type]
            times.append((time.perf_counter_ns() - begin) / 1000)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
