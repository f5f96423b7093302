"""The acting planner against every fixed split of eight workers, on Azure code followed by conversation, virtual time.

Promised: at least 95 % of the best split's goodput in each half (the second half is played alone as well: in a row it
begins with what the first has left waiting), more than every fixed split over the whole, at most six flips, never more
workers than the budget. Finished runs are kept in --out. With --live the same is played to real processes with the sim
engine: a planner and the splits that are best of a half. A run takes 2 × --seconds / --speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from bench.report import ROOT
from proof.planner.real import Scale, play_live
from proof.planner.runs import NAMES, PLANNER, Load, broken, play, workers
from proof.record import Record, arguments_of, trace_path
from tandem.controlplane.simulator import calibration as calibrations
from tandem.controlplane.simulator import traces
from tandem.core.config import Disaggregation, SloSection
from tandem.core.errors import ConfigError

LIVE_NAMES = (PLANNER, "7P:1D", "5P:3D")
"""With the splits that are best in the first half and in the whole on virtual time."""
OUT = ROOT / "proof" / "results" / "planner.json"
FIRST, SECOND = "TANDEM_TRACE_CODE", "TANDEM_TRACE_CONVERSATION"


def main() -> int:
    arguments = _arguments()
    try:
        first = traces.read(trace_path(arguments.first, FIRST, "--first"))
        second = traces.read(trace_path(arguments.second, SECOND, "--second"))
        load = _load(arguments)
    except ConfigError as error:
        print(f"proof.planner: {error}", file=sys.stderr)
        return 2
    about: dict[str, Any] = {"traces": [first.name, second.name], "load": dataclasses.asdict(load)}
    scale = Scale(speed=arguments.speed, shrink=arguments.shrink) if arguments.live else None
    if scale is not None:
        about["live"] = dataclasses.asdict(scale)
    names = LIVE_NAMES if scale is not None else NAMES
    record = Record(_out(arguments), "planner", about, is_fresh=arguments.fresh)
    done: dict[str, dict[str, Any]] = record.content.setdefault("runs", {})
    for name in arguments.only or names:
        if name not in done:
            played = play(load, name, first, second) if scale is None else play_live(load, name, first, second, scale)
            done[name] = played
            record.save()
        _show(name, done[name])
    for change in done.get(PLANNER, {}).get("changes", []):
        print(f"  {change['at_s']:7.1f} s  {change['from']} to {change['to']}: {change['why']}")
    left = [name for name in names if name not in done]
    found = [] if left else broken(done, names)
    for promise in found:
        print(f"broken: {promise}")
    return record.verdict(len(done), left=len(left), broken=len(found))


def _out(arguments: argparse.Namespace) -> Path:
    """Live results have a file of their own, where none is named."""
    named: Path = arguments.out
    return named.with_stem("planner-live") if arguments.live and named == OUT else named


def _show(name: str, entry: dict[str, Any]) -> None:
    first, second = entry["goodput_per_s"]
    alone = f" ({entry['second_alone_per_s']:6.3f}/s alone)" if "second_alone_per_s" in entry else ""
    print(
        f"{name:8} goodput {first:6.3f}/s and {second:6.3f}/s{alone}, {entry['attained_in_all']:6.1%} of all requests;"
        f" {entry['flips']} flips",
        flush=True,
    )


def _load(arguments: argparse.Namespace) -> Load:
    calibration = calibrations.read(arguments.calibration) if arguments.calibration else workers(arguments.slower)
    return Load(
        first_scale=arguments.scale[0], second_scale=arguments.scale[1], seconds=arguments.seconds,
        promise=SloSection(ttft_s=arguments.ttft, itl_s=arguments.itl), calibration=calibration,
        disaggregation=Disaggregation(arguments.disaggregation),
    )  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = arguments_of("planner", __doc__)
    parser.add_argument("--first", type=Path, help=f"the first half's trace; without it, what {FIRST} names")
    parser.add_argument("--second", type=Path, help=f"the second half's; without it, what {SECOND} names")
    parser.add_argument(
        "--calibration", type=Path, help="a bench file; without it, Qwen3-32B on two A100 by arithmetic"
    )
    parser.add_argument("--scale", type=float, nargs=2, default=(3.0, 2.1), help="arrivals so many times as fast")
    parser.add_argument(
        "--slower", type=float, default=1.0, help="workers so many times as slow, without --calibration: fewer requests"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="of each half, at most")
    parser.add_argument("--ttft", type=float, default=5.0, help="seconds to the first token that are promised")
    parser.add_argument("--itl", type=float, default=0.028, help="seconds for each token after it")
    parser.add_argument("--live", action="store_true", help="real processes in place of virtual time")
    parser.add_argument("--speed", type=float, default=2.0, help="with --live: so many times as fast")
    parser.add_argument(
        "--shrink", type=int, default=8, help="with --live: lengths so many times shorter, tokens longer"
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, help="run no others now")
    parser.add_argument("--disaggregation", choices=[mode.value for mode in Disaggregation], default="always")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
