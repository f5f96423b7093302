"""Time of one lookup in the replica's table, without Redis: `python bench/index_lookup.py [--blocks N] [--workers N]`.

Every worker holds a random leading part of every measured prompt (so bits drop on the way), or all of it ("deep").
200 prompts take turns, which no cache holds; "hot" is one prompt again and again, as with a shared system prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    tracemalloc.start()
    table = BlockTable(2 * args.blocks + 1_000_000)
    bits = fill(table, args.workers, args.blocks)
    entry_bytes = tracemalloc.get_traced_memory()[0] / table.entries
    tracemalloc.stop()
    deep = prompts(table, bits, lambda: args.length, 200, args.length)
    mixed = prompts(table, bits, lambda: random.randint(0, args.length), 200, args.length)
    result = {
        "blocks": table.entries,
        "workers": args.workers,
        "prompt_blocks": args.length,
        "entry_bytes": round(entry_bytes),
        "hot": measure(table, deep[:1], 2000),
        "deep": measure(table, deep, 10),
        "mixed": measure(table, mixed, 10),
        "miss": measure(table, [[BlockHash(os.urandom(16)) for _ in range(args.length)]], 2000),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
