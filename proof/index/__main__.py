"""Runs seeds one after the other; finished ones are kept in --out, so a run that was stopped goes on where it was.

Each seed is a cluster of its own with eight rounds of trouble under load, while one event in a hundred is lost and the
last ones always are.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.prefixindex.lease import LEASE_S
from tests.chaos.index_scene import TROUBLES, index_scene

ROOT = Path(__file__).parents[2]
TROUBLES_A_SEED = 8


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    """What happened; AssertionError if a promise was broken."""
    rng = random.Random(seed)
    rounds: list[dict[str, Any]] = []
    with index_scene(folder, seed) as scene:
        for _ in range(TROUBLES_A_SEED):
            kinds = rng.sample(TROUBLES, rng.choice((1, 1, 2)))
            with scene.load():
                done = [scene.trouble(kind) for kind in kinds]
            calm = scene.calm()
            rounds.append({"trouble": done, **asdict(calm)})
            print(f"seed {seed}: {'; '.join(done)}: {calm}", flush=True)
            assert calm.converged_s <= LEASE_S, "the index was wrong for longer than a lease"
            assert calm.stale == 0, "a stale hit"
        assert not scene.prompts.wrong, scene.prompts.wrong
        return {"answered": scene.answered, "failed": scene.failed, "rounds": rounds}


def main() -> int:
    parser = argparse.ArgumentParser(prog="proof.index", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "proof" / "results" / "index.json")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    arguments = parser.parse_args()
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if record.get("first_seed") != arguments.seed:
        record = {"name": "index", "first_seed": arguments.seed, "seeds": {}}
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        if str(seed) in record["seeds"]:
            continue
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="td-") as folder:
            record["seeds"][str(seed)] = run_seed(seed, Path(folder))
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"seed {seed} done in {time.monotonic() - began_s:.0f} s", flush=True)
    _summarise(list(record["seeds"].values()))
    return 0


def _summarise(seeds: list[dict[str, Any]]) -> None:
    rounds = [entry for seed in seeds for entry in seed["rounds"]]
    print(f"{len(seeds):7} seeds, {len(rounds)} rounds of trouble, no broken promise")
    print(f"{sum(seed['answered'] for seed in seeds):7} answers, every one as undisturbed")
    print(f"{sum(seed['failed'] for seed in seeds):7} requests failed")
    print(f"{sum(entry['probes'] for entry in rounds):7} prompts afterwards, of which")
    print(f"{sum(entry['hits'] for entry in rounds):7} found a prefix and")
    print(f"{sum(entry['stale'] for entry in rounds):7} less of it than predicted")
    slowest = max(entry["converged_s"] for entry in rounds)
    print(f"{slowest:7.2f} s at most until the index equalled what workers hold, once they were connected")


if __name__ == "__main__":
    sys.exit(main())
