"""Start a simulated cluster with two models, and have schemathesis send it everything for ten minutes.

In slices with seeds of their own; finished slices are kept in --out, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from proof.api.schemathesis_run import CHECKS, run
from tests.e2e.cluster import Cluster, running

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tandem-tiny"
OUR_FAULT = ("internal", "unavailable", "worker_lost", "transfer_failed")
"""Outcomes that nothing excuses here: every worker lives."""
CUT = os.EX_TEMPFAIL
"""Exit status of a run that broke no promise and was cut by its budget: run it again to go on."""
CONTEXT = 256
"""Tokens; short, so that answers without a limit leave time for more requests."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="proof.api", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "proof" / "results" / "api.json")
    parser.add_argument("--seed", type=int, default=1, help="of the first slice")
    parser.add_argument("--seconds", type=int, default=600, help="of all slices together")
    parser.add_argument("--slice", type=int, default=120, help="seconds of one")
    parser.add_argument(
        "--budget-s", type=float, default=math.inf,
        help=f"begin no further slice after so many seconds; exit status {CUT} if some are left",
    )  # fmt: skip
    arguments = parser.parse_args()
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    about = {
        "name": "api",
        "first_seed": arguments.seed,
        "checks": list(CHECKS),
        "schemathesis": version("schemathesis"),
    }
    if {key: record.get(key) for key in about} != about:
        record = {**about, "slices": []}
    with (
        tempfile.TemporaryDirectory(prefix="td-") as folder,
        running("--config", str(_config(Path(folder)))) as cluster,
    ):
        ends_s = time.monotonic() + arguments.budget_s
        while (rest := arguments.seconds - _seconds(record)) > 0 and time.monotonic() < ends_s:
            seed = arguments.seed + len(record["slices"])
            if not _slice(cluster, record, seed, min(rest, arguments.slice)):
                return 1
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    cases, seconds = sum(one["cases"] for one in record["slices"]), _seconds(record)
    is_cut = seconds < arguments.seconds
    left = "; cut by the budget: run it again to go on" if is_cut else ""
    print(f"{cases} cases in {seconds} of {arguments.seconds} s, no broken promise{left}")
    return CUT if is_cut else 0


def _slice(cluster: Cluster, record: dict[str, Any], seed: int, seconds: int) -> bool:
    """Whether all went well; then it is in the record."""
    before, began_s = _outcomes(cluster), time.monotonic()
    outcome = run(cluster.api, "--max-time", str(seconds), seed=seed, timeout_s=seconds + 120)
    after, took_s = _outcomes(cluster), time.monotonic() - began_s
    counts = {name: round(after[name] - before.get(name, 0)) for name in sorted(after)}
    print(f"seed {seed}: {outcome.cases} cases in {took_s:.0f} s, generations by outcome: {counts}", flush=True)
    if not outcome.passed or any(counts.get(name, 0) for name in OUR_FAULT):
        print(outcome.report)
        return False
    record["slices"].append({"seed": seed, "seconds": seconds, "cases": outcome.cases, "outcomes": counts})
    return True


def _seconds(record: dict[str, Any]) -> int:
    return sum(one["seconds"] for one in record["slices"])


def _outcomes(cluster: Cluster) -> dict[str, float]:
    """How many requests ended how: "ok", or the code of an error."""
    lines = cluster.get("/metrics")[1].splitlines()
    names = {line.partition('outcome="')[2].partition('"')[0] for line in lines if "tandem_requests_total{" in line}
    return {name: cluster.metric("tandem_requests_total", outcome=name) for name in names}


def _config(folder: Path) -> Path:
    """A cluster of two models: the bundled one, and the same under another name."""
    other = folder / "other-tiny"
    other.mkdir()
    for file in MODEL.iterdir():
        (other / file.name).symlink_to(file)
    path = folder / "cluster.toml"
    path.write_text(
        f'[model]\npath = "{MODEL}"\nmax_model_len = {CONTEXT}\n[pools]\nprefill = 1\ndecode = 1\n'
        f'[worker]\nengine = "sim"\n[[models]]\npath = "{other}"\nmax_model_len = {CONTEXT}\nmixed = 1\n'
    )
    return path


if __name__ == "__main__":
    sys.exit(main())
