"""Ten minutes of schemathesis: no failure of the server's own, and no answer that /openapi.json does not describe.

Sent to a simulated cluster with two models, in slices with seeds of their own; finished slices are kept in --out, so a
run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.report import ROOT
from proof.api.schemathesis_run import CHECKS, run
from proof.record import CUT, Record, arguments_of, say_how_to_repeat
from tools.running_cluster import Cluster, running

MODEL = ROOT / "models" / "tandem-tiny"
OUR_FAULT = ("internal", "unavailable", "worker_lost", "transfer_failed")
"""Outcomes without an excuse here, as every worker lives."""
CONTEXT = 256
"""Tokens; short, so that answers without a limit leave time for more requests."""


def main() -> int:
    parser = arguments_of("api", __doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first slice")
    parser.add_argument("--seconds", type=int, default=600, help="of all slices together")
    parser.add_argument("--slice", type=int, default=120, help="seconds of one")
    parser.add_argument(
        "--budget-s", type=float, default=math.inf,
        help=f"begin no further slice after so many seconds; exit status {CUT} if some are left",
    )  # fmt: skip
    arguments = parser.parse_args()
    about = {"first_seed": arguments.seed, "checks": CHECKS, "schemathesis": version("schemathesis")}
    record = Record(arguments.out, "api", about, is_fresh=arguments.fresh)
    slices: list[dict[str, Any]] = record.content.setdefault("slices", [])
    if _seconds(slices) < arguments.seconds and not _run(record, slices, arguments):
        return 1
    left_s = max(0, arguments.seconds - _seconds(slices))
    print(f"{sum(one['cases'] for one in slices)} cases in {_seconds(slices)} of {arguments.seconds} s")
    return record.verdict(len(slices), left=-(-left_s // arguments.slice))


def _run(record: Record, slices: list[dict[str, Any]], arguments: argparse.Namespace) -> bool:
    """Slices from where the record ends; False at the first broken promise."""
    with (
        tempfile.TemporaryDirectory(prefix="td-") as folder,
        running(config=_config(Path(folder))) as cluster,
    ):
        ends_s = time.monotonic() + arguments.budget_s
        while (rest := arguments.seconds - _seconds(slices)) > 0 and time.monotonic() < ends_s:
            done = _slice(cluster, arguments.seed + len(slices), min(rest, arguments.slice))
            if done is None:
                return False
            slices.append(done)
            record.save()
    return True


def _slice(cluster: Cluster, seed: int, seconds: int) -> dict[str, Any] | None:
    """Return the requests sent and their outcomes; None if that breaks a promise."""
    before, began_s = _outcomes(cluster), time.monotonic()
    outcome = run(cluster.api, "--max-time", str(seconds), seed=seed, timeout_s=seconds + 120)
    after, took_s = _outcomes(cluster), time.monotonic() - began_s
    counts = {name: round(after[name] - before.get(name, 0)) for name in sorted(after)}
    print(f"seed {seed}: {outcome.cases} cases in {took_s:.0f} s, generations by outcome: {counts}", flush=True)
    if not outcome.passed or any(counts.get(name, 0) for name in OUR_FAULT):
        print(outcome.report)
        say_how_to_repeat("api", f"--seed {seed} --seconds {seconds} --slice {seconds}")
        return None
    return {"seed": seed, "seconds": seconds, "cases": outcome.cases, "outcomes": counts}


def _seconds(slices: Sequence[Mapping[str, Any]]) -> int:
    return sum(one["seconds"] for one in slices)


def _outcomes(cluster: Cluster) -> dict[str, float]:
    """Number of requests by outcome: "ok", or the code of an error."""
    lines = cluster.get("/metrics")[1].splitlines()
    names = {line.partition('outcome="')[2].partition('"')[0] for line in lines if "tandem_requests_total{" in line}
    return {name: cluster.metric("tandem_requests_total", outcome=name) for name in names}


def _config(folder: Path) -> str:
    """A cluster of two models: the bundled one, and the same under another name."""
    other = folder / "other-tiny"
    other.mkdir()
    for file in MODEL.iterdir():
        (other / file.name).symlink_to(file)
    return (
        f'[model]\npath = "{MODEL}"\nmax_model_len = {CONTEXT}\n[pools]\nprefill = 1\ndecode = 1\n'
        f'[worker]\nengine = "sim"\n[[models]]\npath = "{other}"\nmax_model_len = {CONTEXT}\nmixed = 1\n'
    )


if __name__ == "__main__":
    sys.exit(main())
