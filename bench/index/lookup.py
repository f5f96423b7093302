"""Time of one lookup in the replica's table, without Redis.

Every worker holds a random leading part of every measured prompt (so bits drop on the way), or all of it ("deep"). 200
prompts take turns, more than a cache holds; "hot" is one prompt again and again, as with a shared system prompt.
"expected" is what a lookup among the prompts just sent adds to that: of each of them on one worker, all share half.
"""

from __future__ import annotations

import os
import random
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable

from bench.report import Row, quantile
from tandem.core.block_hash import BlockHash
from tandem.core.clock import MonotonicClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.statestore.index.block_table import BlockTable
from tandem.statestore.index.speculation import Speculation


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


def measure(lookup: Callable[[list[BlockHash]], object], asked: list[list[BlockHash]], rounds: int) -> dict[str, float]:
    """Microseconds a lookup; fresh hash objects, as a router makes them, so that no hash value is cached."""
    times = []
    for _ in range(rounds):
        for hashes in asked:
            fresh = [BlockHash(bytes(bytearray(block))) for block in hashes]
            begin = time.perf_counter_ns()
            lookup(fresh)
            times.append((time.perf_counter_ns() - begin) / 1000)
    return {f"p{percent}_us": round(quantile(times, percent), 1) for percent in (5, 50, 99)}


def run(workers: int, blocks: int, length: int) -> list[Row]:
    tracemalloc.start()
    table = BlockTable(1 << 40)
    bits = fill(table, workers, blocks)
    entry_bytes = tracemalloc.get_traced_memory()[0] / table.entries
    tracemalloc.stop()
    counted_bytes = table.memory_bytes / table.entries
    deep = prompts(table, bits, lambda: length, 200, length)
    mixed = prompts(table, bits, lambda: random.randint(0, length), 200, length)
    absent = [[BlockHash(os.urandom(16)) for _ in range(length)]]
    case = f"{length} blocks, {workers} workers, {table.entries} entries"
    rows = [Row(case, "bytes an entry, counted / real", counted_bytes, "bytes", entry_bytes)]
    for name, asked, rounds in (
        ("hot", deep[:1], 2000),
        ("deep", deep, 10),
        ("mixed", mixed, 10),
        ("miss", absent, 2000),
    ):
        limit = bare_walk(asked, rounds) if name != "miss" else None
        figures = measure(table.lookup, asked, rounds)
        rows += [
            Row(case, f"{name} {key}", value, "us", limit if key == "p50_us" else None)
            for key, value in figures.items()
        ]
    speculation, sent = expected(workers, length)
    case = f"{length} blocks, {workers} workers, {speculation.blocks} expected"
    rows += [Row(case, f"expected {key}", value, "us") for key, value in measure(speculation.lookup, sent, 10).items()]
    begin = time.perf_counter_ns()
    for number, prompt in enumerate(sent):
        speculation.expect(f"again-{number}", WorkerId("w0"), Incarnation(1), prompt)
        speculation.withdraw(f"again-{number}", WorkerId("w0"))
    rows.append(Row(case, "to expect and withdraw one", (time.perf_counter_ns() - begin) / 1000 / len(sent), "us"))
    return rows


def expected(workers: int, length: int) -> tuple[Speculation, list[list[BlockHash]]]:
    """As many prompts as may be expected at once, over all workers; the first half of each is the same."""
    speculation = Speculation(MonotonicClock(), pending_s=1e9)
    shared = [BlockHash(os.urandom(16)) for _ in range(length // 2)]
    sent = [[*shared, *(BlockHash(os.urandom(16)) for _ in range(length - len(shared)))] for _ in range(200)]
    for number, prompt in enumerate(sent):
        speculation.expect(f"r{number}", WorkerId(f"w{number % workers}"), Incarnation(1), prompt)
    return speculation, sent


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
