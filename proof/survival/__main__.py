"""Worker processes killed and stopped in every phase while clients ask for everything: no answer differs by a token.

The fault matrix of tests/chaos/strikes.py, with the simulated engine and with the bundled model in deterministic fp32.
What is right comes from a cluster of one worker that nobody strikes. Struck are two prefill and two decode workers;
nobody waits for one that was lost, so only the spare can help. Cells that are done stay in --out: a run that was
stopped, or ran out of --seconds, goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.strikes import CELLS, Cell, strike
from tests.chaos.survivors import asked_calmly, check
from tests.e2e.cluster import Cluster, running

ROOT = Path(__file__).parents[2]
STRUCK = """
[pools]
prefill = 2
decode = 2
[router]
disaggregation = "always"
worker_wait_s = 0.0
"""
CALM = """
[pools]
mixed = 1
"""
SIM = """
[worker]
engine = "sim"
threads = 1
"""
PACE = """
[worker.sim]
prefill_tokens_per_s = 1500.0
decode_step_s = 0.02
"""
MODEL = """
[model]
dtype = "float32"
[worker]
threads = 1
is_deterministic = true
"""
CONFIGS = {"sim": (STRUCK + SIM + PACE, CALM + SIM), "model": (STRUCK + MODEL, CALM + MODEL)}
SIZES = {"sim": (60, 600), "model": (48, 500)}
"""Tokens of an answer, and of a prompt."""


def run_cell(struck: Cluster, calm: Cluster, engine: str, cell: Cell, seed: int) -> dict[str, Any]:
    """What was hit. Raises AssertionError at the first answer that is not the undisturbed one."""
    salt = zlib.crc32(f"{seed} {cell}".encode()) % 100_000
    bodies, right = asked_calmly(calm, *SIZES[engine], salt)
    began_s = time.monotonic()
    hit = strike(struck, cell, bodies)
    check(hit.clients, right)
    took_s = round(time.monotonic() - began_s, 1)
    return {"requests": len(bodies), "struck": hit.phases, "reattempts": hit.reattempts, "took_s": took_s}


def run(engine: str, todo: list[tuple[Cell, int]], record: dict[str, Any], out: Path, ends_s: float) -> None:
    """All cells of one engine that are still to do, while there is time."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="td-")))
        clusters = []
        for number, text in enumerate(CONFIGS[engine]):
            path = folder / f"{number}.toml"
            path.write_text(text)
            clusters.append(stack.enter_context(running("--config", str(path))))
        for cell, seed in todo:
            if time.monotonic() > ends_s:
                return
            result = run_cell(clusters[0], clusters[1], engine, cell, seed)
            record["cells"][_key(engine, cell, seed)] = result
            out.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{_key(engine, cell, seed)}: {result}", flush=True)


def _key(engine: str, cell: Cell, seed: int) -> str:
    return f"{engine}, {cell}, seed {seed}"


def main() -> int:
    """0 if all of it is done."""
    parser = argparse.ArgumentParser(prog="proof.survival", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "proof" / "results" / "survival.json")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--passes", type=int, default=1, help="how often the matrix is gone through")
    parser.add_argument("--engines", default="sim,model")
    parser.add_argument("--seconds", type=float, default=900.0, help="after which no cell is begun")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"name": "survival", "cells": {}}
    if arguments.out.exists():
        record = json.loads(arguments.out.read_text())
    seeds = range(arguments.seed, arguments.seed + arguments.passes)
    engines = arguments.engines.split(",")
    ends_s, is_done = time.monotonic() + arguments.seconds, True
    for engine in engines:
        every = [(cell, seed) for seed in seeds for cell in CELLS]
        todo = [(cell, seed) for cell, seed in every if _key(engine, cell, seed) not in record["cells"]]
        if todo:
            run(engine, todo, record, arguments.out, ends_s)
        is_done = is_done and all(_key(engine, cell, seed) in record["cells"] for cell, seed in every)
    _report(record["cells"])
    print("all done" if is_done else "not done: run it again, it goes on where it was")
    return 0 if is_done else 1


def _report(cells: dict[str, Any]) -> None:
    requests = sum(cell["requests"] for cell in cells.values())
    print(f"{len(cells):7} strikes, {requests} requests, every answer the undisturbed one")
    phases: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    for cell in cells.values():
        phases.update(cell["struck"])
        causes.update(cell["reattempts"])
    for phase, count in sorted(phases.items()):
        print(f"{count:7} requests of a struck worker in phase {phase}")
    for cause, count in sorted(causes.items()):
        print(f"{count:7} attempts after a failure: {cause}")


if __name__ == "__main__":
    sys.exit(main())
