"""Waves of clients that leave one real cluster, streamed, whole and over gRPC; the workers are asked what they hold."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.chaos.departures import CLIENTS, simulated, wave

ROOT = Path(__file__).parents[2]
LONGEST_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="proof.departures", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "proof" / "results" / "departures.json")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--waves", type=int, default=60)
    arguments = parser.parse_args()
    rng, phases, free_s = random.Random(arguments.seed), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="td-") as folder, simulated(Path(folder)) as cluster:
        for _ in range(arguments.waves):
            one = wave(cluster, rng)
            phases += one.phases
            free_s.append(one.free_after_s)
    record = {
        "name": "departures",
        "seed": arguments.seed,
        "waves": len(free_s),
        "clients": CLIENTS * len(free_s),
        "left_in": dict(sorted(phases.items())),
        "free_after_s": {"median": round(statistics.median(free_s), 3), "longest": round(max(free_s), 3)},
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    if max(free_s) > LONGEST_S:
        print(f"broken: something was held for longer than {LONGEST_S:g} s", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
