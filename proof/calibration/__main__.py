"""The simulator, calibrated on half of the runs of real clusters, predicts the others: TTFT p50, p90, and throughput.

Two workers, with the real engine (135M shape on the CPU, a thread a worker; 15 % are allowed) and with sim engines
(10 %). Finished runs are kept in --out. Nothing else should run meanwhile: the simulator knows of no other load.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from typing import Any

from proof.calibration import closing, real
from proof.calibration.engines import ENGINES, Engine, EngineKind
from proof.calibration.runs import JUDGED, RUNS, Run, errors, trace, worst
from proof.record import Record, arguments_of
from tandem.controlplane.simulator import calibration
from tandem.controlplane.simulator.calibration import Calibration


def main() -> int:
    arguments = _arguments()
    load = {"seconds": arguments.seconds, "seed": arguments.seed}
    record = Record(arguments.out, "calibration", {"load": load}, is_fresh=arguments.fresh)
    ends_s = time.monotonic() + arguments.budget_s
    done = left = broken = 0
    for kind in arguments.engine or EngineKind:
        proof = _Proof(ENGINES[kind], record, arguments.seconds, arguments.seed)
        waiting = proof.run(ends_s)
        done, left = done + len(RUNS) - waiting, left + waiting
        if not waiting:
            broken += proof.judge()
    return record.verdict(done, left=left, broken=broken)


class _Proof:
    """The proof of one engine; known results are in the record."""

    def __init__(self, engine: Engine, record: Record, seconds: float, seed: int) -> None:
        self._engine, self._record = engine, record
        self._seconds, self._seed = seconds, seed
        self._runs: dict[str, dict[str, Any]] = record.content.setdefault(f"{engine.kind} runs", {})

    def run(self, ends_s: float) -> int:
        """Run what is not on record yet; returns how many runs are left when the time is over."""
        name = f"{self._engine.kind} measured"
        if name not in self._record.content:
            self._record.content[name] = self._engine.measured()
            self._record.save()
        waiting = [run for run in RUNS if run.name not in self._runs]
        for number, run in enumerate(waiting):
            if time.monotonic() > ends_s:
                return len(waiting) - number
            found = real.play(self._engine, run, trace(run, self._base, seconds=self._seconds, seed=self._seed))
            self._runs[run.name] = found
            self._record.save()
            said = "  ".join(f"{metric} {value:.3f}" for metric, value in found["figures"].items())
            print(f"{self._engine.kind}: {run.name}: {found['requests']} requests, {said}", flush=True)
        return 0

    def judge(self) -> int:
        """Calibrate on one half, predict the other; returns how many predictions are off by too much."""
        base = self._base
        played = [
            (run, trace(run, base, seconds=self._seconds, seed=self._seed), self._runs[run.name]["figures"])
            for run in RUNS
        ]
        knobs, left_over = closing.closest(base, [one for one in played if one[0].is_calibrating])
        print(
            f"{self._engine.kind}: in a cluster, prompts take {knobs.prefill:.3f} times what they take alone, answers "
            f"{knobs.decode:.3f} times, one way {1e3 * knobs.rpc_s:.2f} ms; off by {left_over:.1%} where it calibrates"
        )
        fitted, said, broken = knobs.of(base), {}, 0
        for run, requests, found in played:
            said[run.name] = closing.play(run, requests, fitted)
            off = errors(found, said[run.name])
            is_broken = not run.is_calibrating and worst(off) > self._engine.limit
            broken += is_broken
            _show(run, off, is_broken=is_broken)
        self._keep("calibration", {**asdict(knobs), "fitted": asdict(fitted)})
        self._keep("said", said)
        return broken

    def _keep(self, what: str, found: dict[str, Any]) -> None:
        """Save a result that differs from the record: a repeat finds the same and leaves the file alone."""
        name, found = f"{self._engine.kind} {what}", json.loads(json.dumps(found))
        if self._record.content.get(name) != found:
            self._record.content[name] = found
            self._record.save()

    @property
    def _base(self) -> Calibration:
        return calibration.from_record(self._record.content[f"{self._engine.kind} measured"])


def _show(run: Run, off: dict[str, float], *, is_broken: bool) -> None:
    half = "calibrates" if run.is_calibrating else "predicted "
    judged = "  ".join(f"{metric} {off[metric]:+6.1%}" for metric in JUDGED)
    print(f"  {half} {run.name:28} {judged}{'  too much' if is_broken else ''}")


def _arguments() -> argparse.Namespace:
    parser = arguments_of("calibration", __doc__)
    parser.add_argument("--engine", type=EngineKind, action="append", help="one of model, sim; may be said again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=45.0, help="in which the requests of a run come")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="begin no run after so many seconds")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
