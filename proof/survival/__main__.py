"""Worker processes killed and stopped in every phase while clients ask for everything: no answer differs by a token.

The fault matrix of tests/chaos/strikes.py, with the simulated engine and with the bundled model in deterministic fp32.
Right answers come from a cluster of one worker without faults. Struck are two prefill and two decode workers; a lost
one is not waited for, so only the spare can help. Cells that are done stay in --out: a run that was stopped, or ran out
of --seconds, goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from proof.record import Record, add_every, arguments_of, said_how_to_repeat, share
from tests.chaos.strikes import CELLS, Cell, strike
from tests.chaos.survivors import asked_calmly, check
from tools.running_cluster import Cluster, running

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
    """Return what was hit. Raises AssertionError at the first answer that is not the undisturbed one."""
    salt = zlib.crc32(f"{seed} {cell}".encode()) % 100_000
    bodies, right = asked_calmly(calm, *SIZES[engine], salt)
    began_s = time.monotonic()
    hit = strike(struck, cell, bodies)
    check(hit.clients, right)
    took_s = round(time.monotonic() - began_s, 1)
    return {"requests": len(bodies), "struck": hit.phases, "reattempts": hit.reattempts, "took_s": took_s}


def run(engine: str, todo: list[tuple[Cell, int]], record: Record, ends_s: float) -> None:
    """Run all remaining cells of one engine, while there is time."""
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(running(config=text)) for text in CONFIGS[engine]]
        for cell, seed in todo:
            if time.monotonic() > ends_s:
                return
            with said_how_to_repeat("survival", f'--seed {seed} --engines {engine} --only "{cell}"'):
                result = run_cell(clusters[0], clusters[1], engine, cell, seed)
            record.content["cells"][_key(engine, cell, seed)] = result
            record.save()
            print(f"{_key(engine, cell, seed)}: {result}", flush=True)


def _due(seed: int, arguments: argparse.Namespace) -> Sequence[Cell]:
    if arguments.only:
        return [cell for cell in CELLS if str(cell) == arguments.only]
    return share(CELLS, seed, arguments.every)


def _key(engine: str, cell: Cell, seed: int) -> str:
    return f"{engine}, {cell}, seed {seed}"


def main() -> int:
    parser = arguments_of("survival", __doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--passes", type=int, default=1, help="how often the matrix is gone through")
    parser.add_argument("--engines", default="sim,model")
    add_every(parser)
    parser.add_argument("--only", choices=[str(cell) for cell in CELLS], metavar="CELL", help="one cell alone")
    parser.add_argument("--seconds", type=float, default=900.0, help="after which no cell is begun")
    arguments = parser.parse_args()
    record = Record(arguments.out, "survival", {}, is_fresh=arguments.fresh)
    cells: dict[str, dict[str, Any]] = record.content.setdefault("cells", {})
    seeds = range(arguments.seed, arguments.seed + arguments.passes)
    wanted: list[str] = []
    ends_s = time.monotonic() + arguments.seconds
    for engine in arguments.engines.split(","):
        due = [(cell, seed) for seed in seeds for cell in _due(seed, arguments)]
        if todo := [(cell, seed) for cell, seed in due if _key(engine, cell, seed) not in cells]:
            run(engine, todo, record, ends_s)
        wanted += [_key(engine, cell, seed) for cell, seed in due]
    done = [cells[key] for key in wanted if key in cells]
    _report(done)
    return record.verdict(len(done), left=len(wanted) - len(done))


def _report(cells: Sequence[Mapping[str, Any]]) -> None:
    requests = sum(cell["requests"] for cell in cells)
    print(f"{len(cells):7} strikes, {requests} requests, every answer the undisturbed one")
    phases: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    for cell in cells:
        phases.update(cell["struck"])
        causes.update(cell["reattempts"])
    for phase, count in sorted(phases.items()):
        print(f"{count:7} requests of a struck worker in phase {phase}")
    for cause, count in sorted(causes.items()):
        print(f"{count:7} attempts after a failure: {cause}")


if __name__ == "__main__":
    sys.exit(main())
