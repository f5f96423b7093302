"""Mutated GGUF files end in a model or in one line: never in a crash, a traceback, seconds or gigabytes.

Slices of random models of each family that GGUF files have, with other types of blocks, each under a seed of its own:
every file is read as a cluster reads it, config, weights and tokenizer, in a process with bounded memory. Broken: a
process that dies, an error that is none of ours or has more lines than one, more than 10 s for a file, and memory that
grows by more than 64 MiB. Finished slices are kept in --out.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import ROOT
from proof.record import Record, arguments_of, say_how_to_repeat
from tools.gguf_model import GgufModel, write_gguf
from tools.random_model import RandomModel, make_random_model

BASES = (
    ("llama", "Q4_0"), ("llama", "F16"), ("qwen2", "Q8_0"), ("qwen3_moe", "Q5_0"), ("gemma3", "Q4_1"),
    ("mixtral", "MXFP4"), ("gemma2", "F32"), ("qwen3", "Q5_1"),
    ("gpt_oss", "MXFP4"), ("deepseek_v3", "Q8_0"), ("deepseek_v2", "F16"),
)  # fmt: skip
MOST_SECONDS, MOST_MIB = 10.0, 64.0
_PROCESS_BYTES = 8 << 30
"""Bound on address space: torch alone takes some GiB of it."""


def main() -> int:
    parser = arguments_of("gguf", __doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed, one a slice")
    parser.add_argument("--slices", type=int, default=24)
    parser.add_argument("--files", type=int, default=500, help="of a slice")
    parser.add_argument("--seconds", type=float, default=1800.0, help="after which no slice is begun")
    arguments = parser.parse_args()
    record = Record(arguments.out, "gguf", {"files": arguments.files}, is_fresh=arguments.fresh)
    slices: dict[str, dict[str, Any]] = record.content.setdefault("slices", {})
    wanted = [str(seed) for seed in range(arguments.seed, arguments.seed + arguments.slices)]
    ends_s = time.monotonic() + arguments.seconds
    for seed in wanted:
        if seed in slices and not slices[seed]["broken"]:
            continue
        if time.monotonic() > ends_s:
            break
        slices[seed] = run_slice(int(seed), arguments.files)
        record.save()
        print(f"seed {seed}: {slices[seed]}", flush=True)
        if slices[seed]["broken"]:
            say_how_to_repeat("gguf", f"--seed {seed} --slices 1 --files {arguments.files}")
            break
    done = [slices[seed] for seed in wanted if seed in slices]
    broken = sum(bool(one["broken"]) for one in done)
    return record.verdict(len(done), left=len(wanted) - len(done), broken=broken)


def run_slice(seed: int, files: int) -> dict[str, Any]:
    """Outcomes of so many mutations of one model, and those that are broken."""
    family, kind = BASES[seed % len(BASES)]
    with tempfile.TemporaryDirectory(prefix="td-") as name:
        folder = Path(name)
        make_random_model(RandomModel(family=family, heads=4, kv_heads=2, seed=seed), folder / "model")
        write_gguf(folder / "model", folder / "base.gguf", GgufModel(kind=kind))
        command = [sys.executable, "-m", "proof.gguf.reading", str(folder / "base.gguf"), name]
        limit_s = 120 + files * 2.0
        process = subprocess.run(
            [*command, "--seed", str(seed), "--count", str(files)], capture_output=True, text=True, timeout=limit_s,
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=_bound,
        )  # fmt: skip
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    read = sum(line["outcome"] == "read" for line in lines)
    found: dict[str, Any] = {
        "family": family, "type": kind, "files": len(lines), "read": read, "refused": len(lines) - read,
        "longest_s": max((line["seconds"] for line in lines), default=0.0),
        "grown_mib": max((line["grown_mib"] for line in lines), default=0.0),
    }  # fmt: skip
    return {**found, "broken": _broken(lines, process, files)}


def _broken(lines: list[dict[str, Any]], process: subprocess.CompletedProcess[str], files: int) -> list[str]:
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


if __name__ == "__main__":
    sys.exit(main())
