"""The replica's table, without Redis: time of one lookup; memory under ever more prefixes, and how long they block it.

Every worker holds a random leading part of every measured prompt (so bits drop on the way), or all of it ("deep"). 200
prompts take turns, more than a cache holds; "hot" is one prompt again and again, as with a shared system prompt.
"expected" is what a lookup among the prompts just sent adds to that: of each of them on one worker, all share half.

For the memory every block hash stands for one prefix: it covers all tokens before it. Workers evict as well, but the
replica may not rely on it, so nothing is removed there.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path

from bench.report import Row, quantile
from tandem.core.block_hash import BlockHash
from tandem.core.clock import MonotonicClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.statestore.index.block_table import BlockTable
from tandem.statestore.index.speculation import Speculation

ENTRY_BLOCKS = 512
"""Blocks that one entry of a worker's stream may store."""
SAMPLES = 200


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


def run_lookups(workers: int, blocks: int, length: int) -> list[Row]:
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


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run_memory(workers: int, prefixes: int, bound_bytes: int) -> list[Row]:
    gc.collect()
    before = resident_bytes()
    table = BlockTable(bound_bytes)
    bits = [table.open_slot() for _ in range(workers)]
    for number, bit in enumerate(bits):
        table.go_live(bit, WorkerId(f"w{number}"))
    full_at, samples, took_s = 0, [], []
    entries = prefixes // ENTRY_BLOCKS
    for entry in range(entries):
        blob = os.urandom(16 * ENTRY_BLOCKS)
        blocks = [(0, BlockHash(blob[i : i + 16])) for i in range(0, len(blob), 16)]
        for bit in random.sample(bits, random.randint(1, 3)):
            begin_s = time.perf_counter()
            table.add(bit, blocks)
            took_s.append(time.perf_counter() - begin_s)
        if table.evicted and not full_at:
            full_at = entry * ENTRY_BLOCKS
        if full_at and entry % max(1, entries // SAMPLES) == 0:
            samples.append(resident_bytes() - before)
    case = f"{prefixes / 1e6:g} million prefixes, {workers} workers, bound {bound_bytes >> 20} MiB"
    rows = [Row(case, "blocks held", table.entries, "blocks")]
    if samples:
        first, most, last = samples[0], max(samples), samples[-1]
        rows += [
            Row(case, "prefixes when the bound was reached", full_at, "blocks"),
            Row(case, "RSS of the table then", first / 2**20, "MiB", bound_bytes / 2**20),
            Row(case, "RSS of the table, most after that", most / 2**20, "MiB", bound_bytes / 2**20),
            Row(case, "RSS of the table at the end", last / 2**20, "MiB", bound_bytes / 2**20),
        ]
    took_s.sort()
    rows += [
        Row(case, f"{ENTRY_BLOCKS} blocks added, median", took_s[len(took_s) // 2] * 1000, "ms"),
        Row(case, f"{ENTRY_BLOCKS} blocks added, p99.9", took_s[len(took_s) * 999 // 1000] * 1000, "ms"),
        Row(case, f"{ENTRY_BLOCKS} blocks added, longest", took_s[-1] * 1000, "ms"),
    ]
    return rows
