"""The policy laboratory against real clusters of sim engines: the same requests, the same figures within 10 %.

Plays parts of a trace to both, one run after the other; finished ones are kept in --out, so that a proof that was
stopped goes on where it was. Nothing else should run meanwhile: the laboratory knows of no other load on the machine.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proof.laboratory import real, virtual
from proof.laboratory.runs import RUNS, SHIFT_S, Run, errors, figures, part, shifted
from proof.record import Record, arguments_of, trace_path
from tandem.controlplane.simulator import traces
from tandem.controlplane.simulator.traces import RequestLog
from tandem.core.errors import ConfigError

TRACE = "TANDEM_TRACE"
LIMIT = 0.1
MAX_MODEL_LEN = 4096


def main() -> int:
    arguments = _arguments()
    try:
        trace = traces.read(trace_path(arguments.trace, TRACE, "--trace"))
    except ConfigError as error:
        print(f"proof.laboratory: {error}", file=sys.stderr)
        return 2
    load = {"seconds": arguments.seconds, "scale": arguments.scale, "trace": trace.name}
    about = {"load": load, **({"seed": arguments.seed} if arguments.seed else {})}
    record = Record(arguments.out, "laboratory", about, is_fresh=arguments.fresh)
    done: dict[str, dict[str, Any]] = record.content.setdefault("runs", {})
    wanted = shifted(RUNS, arguments.seed)[: arguments.runs]
    for run in wanted:
        if run.name not in done:
            requests = part(trace, run, scale=arguments.scale, seconds=arguments.seconds, max_tokens=MAX_MODEL_LEN)
            done[run.name] = _both(run, requests)
            record.save()
        _show(run.name, done[run.name])
    worst = [max(abs(error) for error in done[run.name]["errors"].values()) for run in wanted]
    print(f"{len(wanted)} runs of {arguments.seconds:g} s; off by at most {max(worst):.1%}, {LIMIT:.0%} are allowed")
    return record.verdict(len(wanted), broken=sum(error > LIMIT for error in worst))


def _both(run: Run, trace: RequestLog) -> dict[str, Any]:
    measured = real.play(run, trace)
    served, busy_s = virtual.play(run, trace, measured.idle)
    found, said = figures(measured.served, measured.busy_s), figures(served, busy_s)
    return {
        "requests": len(trace.requests), "idle": asdict(measured.idle), "real": found, "laboratory": said,
        "errors": errors(found, said),
    }  # fmt: skip


def _show(name: str, entry: dict[str, Any]) -> None:
    print(f"{name}: {entry['requests']} requests")
    for metric, error in entry["errors"].items():
        is_real, is_said = entry["real"][metric], entry["laboratory"][metric]
        print(f"  {metric:15} real {is_real:8.3f}  laboratory {is_said:8.3f}  {error:+.1%}")


def _arguments() -> argparse.Namespace:
    parser = arguments_of("laboratory", __doc__)
    parser.add_argument("--trace", type=Path, help=f"without it, what {TRACE} names")
    parser.add_argument("--runs", type=int, default=len(RUNS), help=f"at most {len(RUNS)}")
    parser.add_argument("--seed", type=int, default=0, help=f"moves where runs begin, by up to {SHIFT_S:g} s")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each run")
    parser.add_argument("--scale", type=float, default=1.0, help="arrivals are so many times as fast as in the trace")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
