"""Memory of a router's replica while ever more distinct prefixes come in, and how long they block it.

Every block hash stands for one prefix: it covers all tokens before it. Workers evict as well, but the replica may not
rely on it, so here nothing is removed.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import time
from pathlib import Path

from bench.report import Row
from tandem.core.block_hash import BlockHash
from tandem.core.ids import WorkerId
from tandem.statestore.index.block_table import BlockTable

ENTRY_BLOCKS = 512
"""Blocks that one entry of a worker's stream may store."""
SAMPLES = 200


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run(workers: int, prefixes: int, bound_bytes: int) -> list[Row]:
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
