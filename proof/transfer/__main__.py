"""KV transfers under every fault, workers killed and stopped in every state, every TP pairing: nothing is lost.

Parts: "matrix", all TP pairings × transports × layouts, chunked and not, at three hit ratios; "wire", random transfers
with random faults between two processes; "kills" and "stops", SIGKILL and SIGSTOP of a random process of real workers
in random states. Finished cases are kept in --out; a failure shows how to run it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proof.record import CUT, add_every, arguments_of, share
from proof.transfer.plan import TRANSFERS, matrix
from proof.transfer.record import PARTS, Record
from proof.transfer.strike_run import run_strikes
from proof.transfer.wire_pool import run_cases

COUNTS = {"wire": 24_000, "kills": 300, "stops": 300}
SAVE_EVERY_S = 5.0


def main() -> int:
    arguments = _arguments()
    logging.disable(logging.ERROR)  # every case has failures on purpose
    os.environ["OMP_NUM_THREADS"] = "1"
    record = Record(arguments.out, arguments.seed, is_fresh=arguments.fresh)
    print(f"seed {arguments.seed}, results in {arguments.out}", flush=True)
    record.about |= {"cores": os.cpu_count(), "jobs": arguments.jobs, "pairs": arguments.pairs, "not_run": _not_run()}
    run = Run(record, arguments)
    if arguments.only:
        part, index = arguments.only.split("/", 1)
        wanted: dict[str, Sequence[int]] = {part: _indices(part, index)}
    else:
        every = {part: range(_cases(part, arguments.count)) for part in arguments.part or PARTS}
        wanted = {part: share(indices, arguments.seed, arguments.every) for part, indices in every.items()}
    for part, indices in wanted.items():
        run.part(part, indices)
    _show(record.summary())
    return record.verdict(wanted)


def _arguments() -> argparse.Namespace:
    parser = arguments_of("transfer", __doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be given several times")
    parser.add_argument("--count", type=int, default=0, help="transfers, or strikes, of each part")
    add_every(parser)
    parser.add_argument("--only", default="", help="one case, such as wire/12 or stops/40")
    parser.add_argument(
        "--budget-s", type=float, default=0.0,
        help=f"stop after so many seconds, with exit status {CUT}; run again to go on",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes for wire and matrix")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of workers that are struck at once")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    return arguments


def _cases(part: str, count: int) -> int:
    if part == "matrix":
        return len(matrix())
    wanted = count or COUNTS[part]
    return -(-wanted // TRANSFERS) if part == "wire" else wanted


def _indices(part: str, name: str) -> range:
    """The one index that `--only` names; a cell of the matrix may be named, too."""
    if part == "matrix" and not name.isdecimal():
        index = [case.name for case in matrix()].index(f"matrix/{name}")
        return range(index, index + 1)
    return range(int(name), int(name) + 1)


def _not_run() -> dict[str, str]:
    why = "only pools in host memory are moved here" if Path("/dev/nvidia0").exists() else "no GPU on this machine"
    return {"cuda_ipc": why, "nccl": why}


class Run:
    """Runs parts one after the other within the budget."""

    def __init__(self, record: Record, arguments: argparse.Namespace) -> None:
        self._record, self._arguments = record, arguments
        self._began_s = self._saved_s = time.monotonic()
        self.is_cut = False

    def part(self, part: str, indices: Sequence[int]) -> None:
        missing = self._record.missing(part, indices) if not self._arguments.only else list(indices)
        began_s, self._done, self._wanted = time.monotonic(), 0, len(missing)
        if not missing:
            return
        if part in ("matrix", "wire"):
            for result in run_cases(part, self._arguments.seed, missing, self._arguments.jobs, self._is_over):
                index = result.pop("index")
                result.pop("held")
                if part == "wire":
                    result.pop("figures")
                self._note(part, index, result)
        else:
            with tempfile.TemporaryDirectory(prefix="td-") as folder:
                strikes = run_strikes(
                    part, self._arguments.seed, missing, self._arguments.pairs, Path(folder),
                    lambda index, result: self._note(part, index, result), self._is_over,
                )  # fmt: skip
                asyncio.run(strikes)
        took_s = time.monotonic() - began_s
        seconds = self._record.about.setdefault("seconds", {})
        seconds[part] = round(seconds.get(part, 0.0) + took_s, 1)
        self._record.save()
        print(f"{part}: {self._done} of {self._wanted} cases in {took_s:.0f} s", flush=True)

    def _is_over(self) -> bool:
        budget_s = self._arguments.budget_s
        self.is_cut = self.is_cut or bool(budget_s and time.monotonic() - self._began_s > budget_s)
        return self.is_cut

    def _note(self, part: str, index: int, result: dict[str, Any]) -> None:
        self._done += 1
        self._record.add(part, index, result)
        for words in [*result["violations"], *result.get("late", ())]:
            print(f"{words}\n  again: make proof NAME=transfer ARGS='--seed {self._record.seed} --only {part}/{index}'")
        if time.monotonic() - self._saved_s > SAVE_EVERY_S or self._done == self._wanted:
            self._saved_s = time.monotonic()
            self._record.save()
            elapsed_s = self._saved_s - self._began_s
            print(f"{elapsed_s:6.0f} s  {part:6} {self._done}/{self._wanted}", flush=True)


def _show(summary: dict[str, Any]) -> None:
    print(f"matrix  {summary['matrix']}")
    print(f"wire    {summary['wire']}")
    for part in ("kills", "stops"):
        print(f"{part:7} {summary[part]}")
    for name, why in summary["not_run"].items():
        print(f"not run: {name}: {why}")


if __name__ == "__main__":
    sys.exit(main())
