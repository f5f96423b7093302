"""Shared by proofs that read mutated files: slices under seeds, in processes with bounded memory.

Broken: a process that dies, an error that is none of ours or has more lines than one, more than 10 s for a file, and
memory that grows by more than 64 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.report import ROOT
from proof.record import Record, arguments_of, say_how_to_repeat
from tandem.core.errors import StartupError

MOST_SECONDS, MOST_MIB = 10.0, 64.0
_PROCESS_BYTES = 8 << 30
"""Bound on address space: torch alone takes some GiB of it."""
_KIB = 1 << 10
Entry = dict[str, Any]


def run_slices(name: str, doc: str | None, run_slice: Callable[[int, int], Entry], *, slices: int, files: int) -> int:
    """The main function of a proof. `run_slice` gets a seed and how many files, and returns an entry with `broken`;
    finished ones are kept in --out."""
    parser = arguments_of(name, doc)
    parser.add_argument("--seed", type=int, default=1, help="the first seed, one a slice")
    parser.add_argument("--slices", type=int, default=slices)
    parser.add_argument("--files", type=int, default=files, help="of a slice")
    parser.add_argument("--seconds", type=float, default=1800.0, help="after which no slice is begun")
    arguments = parser.parse_args()
    record = Record(arguments.out, name, {"files": arguments.files}, is_fresh=arguments.fresh)
    known: dict[str, Entry] = record.content.setdefault("slices", {})
    wanted = [str(seed) for seed in range(arguments.seed, arguments.seed + arguments.slices)]
    ends_s = time.monotonic() + arguments.seconds
    for seed in wanted:
        if seed in known and not known[seed]["broken"]:
            continue
        if time.monotonic() > ends_s:
            break
        known[seed] = run_slice(int(seed), arguments.files)
        record.save()
        print(f"seed {seed}: {known[seed]}", flush=True)
        if known[seed]["broken"]:
            say_how_to_repeat(name, f"--seed {seed} --slices 1 --files {arguments.files}")
            break
    done = [known[seed] for seed in wanted if seed in known]
    broken = sum(bool(one["broken"]) for one in done)
    return record.verdict(len(done), left=len(wanted) - len(done), broken=broken)


def outcomes(module: str, given: list[str], seed: int, files: int) -> Entry:
    """Run `module` over so many mutated files; return counts, maxima and broken promises. Its main calls `report`."""
    command = [sys.executable, "-m", module, *given, "--seed", str(seed), "--count", str(files)]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=120 + files * 2.0, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=_bound,
    )  # fmt: skip
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    read = sum(line["outcome"] == "read" for line in lines)
    return {
        "files": len(lines), "read": read, "refused": len(lines) - read,
        "longest_s": max((line["seconds"] for line in lines), default=0.0),
        "grown_mib": max((line["grown_mib"] for line in lines), default=0.0),
        "broken": _broken(lines, process, files),
    }  # fmt: skip


def reading_arguments(prog: str, doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=doc)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    return parser


def report(arguments: argparse.Namespace, write: Callable[[random.Random], str], read: Callable[[], None]) -> int:
    """Print a line of JSON for each file: the mutation that `write` names, the outcome ("read", or the error's line),
    seconds, growth of memory. Read a right file once before, so that imports do not count."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(arguments.count):
        names = write(random.Random(f"{arguments.seed}:{number}"))
        begun = time.monotonic()
        outcome = _outcome(read)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        line = {
            "number": number, "mutation": names, "outcome": outcome, "seconds": round(time.monotonic() - begun, 3),
            "grown_mib": round(grown / _KIB, 1),
        }  # fmt: skip
        print(json.dumps(line), flush=True)
    return 0


def _outcome(read: Callable[[], None]) -> str:
    try:
        read()
    except StartupError as error:
        return error.message
    return "read"


def _broken(lines: list[Entry], process: subprocess.CompletedProcess[str], files: int) -> list[str]:
    broken: list[str] = []
    for line in lines:
        where = f"file {line['number']} ({line['mutation']})"
        if "\n" in line["outcome"] or len(line["outcome"]) > 2000:
            broken.append(f"{where} ends in more than a line: {line['outcome'][:200]!r}")
        if line["seconds"] > MOST_SECONDS:
            broken.append(f"{where} took {line['seconds']} s")
        if line["grown_mib"] > MOST_MIB:
            broken.append(f"{where}: memory grew by {line['grown_mib']} MiB")
    if process.returncode or len(lines) < files:
        why = (process.stderr.strip().splitlines() or ["nothing was said"])[-1]
        broken.append(f"file {len(lines)} ended the process with {process.returncode}: {why}")
    return broken[:5]


def _bound() -> None:
    """Limit the address space, in the child."""
    resource.setrlimit(resource.RLIMIT_AS, (_PROCESS_BYTES, _PROCESS_BYTES))
