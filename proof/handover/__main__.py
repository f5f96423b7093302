"""Random trouble between two ranks: every answer that ends is the undisturbed one, and nothing is held after.

Runs seeds one after the other, over both transports in turn; finished seeds are kept in --out, so a run that was
stopped goes on where it was.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from proof.handover.disturbed import run_seed, undisturbed
from proof.record import Record, arguments_of, said_how_to_repeat

TRANSPORTS = ("shm", "grpc")


def main() -> int:
    parser = arguments_of("handover", __doc__)
    parser.add_argument("--seed", type=int, default=1000, help="the first seed")
    parser.add_argument("--seeds", type=int, default=150, help="how many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # every seed has failures on purpose
    record = Record(arguments.out, "handover", {"first_seed": arguments.seed}, is_fresh=arguments.fresh)
    done: dict[str, dict[str, Any]] = record.content.setdefault("seeds", {})
    wanted = [str(seed) for seed in range(arguments.seed, arguments.seed + arguments.seeds)]
    if todo := [seed for seed in wanted if seed not in done]:
        with tempfile.TemporaryDirectory(prefix="td-") as folder:
            answers = undisturbed(Path(folder))
        for seed in todo:
            transport, began_s = TRANSPORTS[int(seed) % len(TRANSPORTS)], time.monotonic()
            again = said_how_to_repeat("handover", f"--seed {seed} --seeds 1")
            with again, tempfile.TemporaryDirectory(prefix="td-") as folder:
                outcome = run_seed(int(seed), Path(folder), answers, transport)
            done[seed] = {"transport": transport, **asdict(outcome)}
            record.save()
            print(f"seed {seed} {transport:5} {outcome} in {time.monotonic() - began_s:.1f} s", flush=True)
    for name in ("requests", "attempts", "completed", "breakages"):
        print(f"{sum(done[seed][name] for seed in wanted):7} {name}")
    return record.verdict(len(wanted))


if __name__ == "__main__":
    sys.exit(main())
