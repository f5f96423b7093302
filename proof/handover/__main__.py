"""Random trouble between two ranks: every answer that ends is the undisturbed one, and nothing is held after.

Runs seeds one after the other, over both transports in turn; finished seeds are kept in --out, so a run that was
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from proof.handover.disturbed import run_seed, undisturbed

ROOT = Path(__file__).parents[2]
TRANSPORTS = ("shm", "grpc")


def main() -> int:
    parser = argparse.ArgumentParser(prog="proof.handover", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "proof" / "results" / "handover.json")
    parser.add_argument("--seed", type=int, default=1000, help="the first seed")
    parser.add_argument("--seeds", type=int, default=150, help="how many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # every seed has failures on purpose
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if record.get("first_seed") != arguments.seed:
        record = {"name": "handover", "first_seed": arguments.seed, "seeds": {}}
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        answers = undisturbed(Path(folder))
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        if str(seed) in record["seeds"]:
            continue
        transport, began_s = TRANSPORTS[seed % len(TRANSPORTS)], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="td-") as folder:
            outcome = run_seed(seed, Path(folder), answers, transport)
        record["seeds"][str(seed)] = {"transport": transport, **asdict(outcome)}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"seed {seed} {transport:5} {outcome} in {time.monotonic() - began_s:.1f} s", flush=True)
    done = record["seeds"].values()
    for name in ("requests", "attempts", "completed", "breakages"):
        print(f"{sum(entry[name] for entry in done):7} {name}")
    print(f"{len(done):7} seeds, no broken promise")
    return 0


if __name__ == "__main__":
    sys.exit(main())
