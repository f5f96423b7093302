"""Routing policies on virtual time: hit rate, TTFT, waits and imbalance of each, on one trace.

Plays a trace (Mooncake's JSON lines, Azure's CSV, or one made up) to a simulated cluster, once a policy and queue.
Everything that decides is the product's own code; computing and wires are arithmetic (docs/simulator.md). `--scale`
makes the trace arrive so many times as fast; `--share 0.85` looks for the highest rate that `--base` sustains, and
takes that share of it. Finished cases are in `--out` at once: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.policy.capacity import MAX_WAITING, highest_factor
from bench.report import Row, arguments_of, kept, show, write
from tandem.controlplane.simulator import calibration as calibrations
from tandem.controlplane.simulator import traces
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.setup import Setup
from tandem.controlplane.simulator.simulator import Simulator
from tandem.controlplane.simulator.summary import Summary, figures
from tandem.controlplane.simulator.traces import RequestLog
from tandem.controlplane.simulator.workloads import ConversationWorkload, conversations, shared_prompt
from tandem.core.config import AdmissionSection, Disaggregation, PolicyName
from tandem.core.errors import ConfigError
from tandem.core.prefill_queue import FIRST_COME, QueueRules
from tandem.router.routing.plan import Policy
from tandem.router.routing.policies import create_policy

POLICIES: Mapping[str, Policy] = {name.value: create_policy(name, Disaggregation.AUTO) for name in PolicyName}
QUEUES: Mapping[str, QueueRules] = {"srf": QueueRules(), "fifo": FIRST_COME}
_OTHERS = [name.value for name in PolicyName if name is not PolicyName.COST]
DEFAULT_CASES = ("cost+srf", "cost+fifo", *(f"{name}+fifo+nofetch" for name in _OTHERS))
BASE = "least_loaded+fifo+nofetch"
SHOWN = (
    ("hit_rate", "share"), ("predicted_rate", "share"), ("saved_rate", "share"), ("fetched_rate", "share"),
    ("ttft_p50_s", "s"), ("ttft_p90_s", "s"), ("ttft_p99_s", "s"), ("ttft_mean_s", "s"), ("max_wait_s", "s"),
    ("max_ttft_s", "s"), ("tpot_p50_s", "s"), ("tpot_p99_s", "s"), ("imbalance", "max/min"), ("spread", "max/mean"),
    ("prefill_busy", "share"), ("decode_busy", "share"), ("waiting_share", "share"),
)  # fmt: skip


def setup_of(case: str, arguments: argparse.Namespace, calibration: Calibration) -> Setup:
    """`policy+queue` or `policy+queue+nofetch` on the cluster of the arguments."""
    policy, queue, *rest = case.split("+") if case.count("+") else (case, "")
    if policy not in POLICIES or queue not in QUEUES or rest not in ([], ["nofetch"]):
        known = f"policies are {', '.join(POLICIES)}; queues are {', '.join(QUEUES)}; nofetch may follow"
        raise ConfigError(f"{case!r} is no policy+queue", why=known)
    return Setup(
        policy=POLICIES[policy], queue=QUEUES[queue], is_fetching=not rest, calibration=calibration,
        admission=AdmissionSection() if QUEUES[queue].stretch else None,
        prefill=arguments.prefill, decode=arguments.decode, mixed=arguments.mixed,
    )  # fmt: skip


def made_up(kind: str, seed: int) -> RequestLog:
    """A synthetic trace, for users without one, or to see the effect of one system prompt."""
    if kind == "shared":
        return shared_prompt(requests=6000, rate=8.0, shared_tokens=8192, own_tokens=2048, output_tokens=128, seed=seed)
    return conversations(ConversationWorkload(requests=4000), seed)


def play(setup: Setup, trace: RequestLog) -> Summary:
    """One run."""
    return figures(Simulator(setup, trace).run())


def rows_of(case: str, result: Summary) -> Iterator[Row]:
    for name, unit in SHOWN:
        yield Row(case, name, getattr(result, name), unit)


def main() -> int:
    arguments = _arguments()
    try:
        calibration = calibrations.read(arguments.calibration) if arguments.calibration else Calibration()
        trace = traces.read(arguments.trace) if arguments.trace else made_up(arguments.made_up, arguments.seed)
        if arguments.seconds:
            trace = trace.first(arguments.seconds)
        if arguments.share and len(trace.requests) * MAX_WAITING < 1:
            why = f"{MAX_WAITING:.0%} of its {len(trace.requests)} requests may wait, and the last one always does"
            raise ConfigError("the trace is too short to look for a rate", why=why, todo="take more --seconds of it")
        cases = {case: setup_of(case, arguments, calibration) for case in arguments.case}
        base = setup_of(arguments.base, arguments, calibration)
    except ConfigError as error:
        print(f"bench.policy: {error}", file=sys.stderr)
        return 2
    print(
        f"{trace.name}: {len(trace.requests)} requests, {trace.rate:.2f}/s, ideal hit rate {trace.ideal_hit_rate():.3f}"
    )
    print(
        f"{calibration.name}; {arguments.prefill} prefill, {arguments.decode} decode, {arguments.mixed} mixed workers"
    )
    load = _load(arguments, trace, calibration)
    rows = kept(arguments.out, load)
    if not rows:
        rows = list(_played(arguments, trace, base))
        _keep(rows, arguments.out, load)
    factor = next(row.value for row in rows if (row.case, row.metric) == ("played", "rate")) / trace.rate
    done = {row.case for row in rows}
    for case, setup in cases.items():
        if case in done:
            print(f"{case:24} is in {arguments.out} already")
            continue
        started_s = time.monotonic()
        result = play(setup, trace.scaled(factor))
        rows += rows_of(case, result)
        print(
            f"{case:24} TTFT p50 {result.ttft_p50_s:.2f} s, p90 {result.ttft_p90_s:.2f} s,"
            f" hit rate {result.hit_rate:.3f}, imbalance {result.imbalance:.2f}, longest wait {result.max_wait_s:.1f} s"
            f" (played in {time.monotonic() - started_s:.1f} s)",
            flush=True,
        )
        _keep(rows, arguments.out, load)
    show(rows)
    return 0


def _keep(rows: Sequence[Row], out: Path | None, load: Mapping[str, Any]) -> None:
    if out is not None:
        write("policy", rows, out, load=dict(load))


def _played(arguments: argparse.Namespace, trace: RequestLog, base: Setup) -> Iterator[Row]:
    """The trace's speed, and the rate that `base` sustains, if requested."""
    factor = arguments.scale
    if arguments.share:
        highest = highest_factor(lambda f: play(base, trace.scaled(f)).waiting_share, start=arguments.scale)
        factor = highest * arguments.share
        yield Row(f"{arguments.base} sustains", "rate", highest * trace.rate, "1/s")
        print(
            f"{arguments.base} sustains {highest:.3f} times the trace's rate; {arguments.share:g} of that is played",
            flush=True,
        )
    yield Row("played", "rate", factor * trace.rate, "1/s")
    yield Row("played", "ideal hit rate", trace.ideal_hit_rate(), "share")


def _load(arguments: argparse.Namespace, trace: RequestLog, calibration: Calibration) -> dict[str, Any]:
    """Fields that figures of one file have in common."""
    names = ("seconds", "scale", "share", "base", "prefill", "decode", "mixed")
    of_trace = {"trace": trace.name, "requests": len(trace.requests), "seed": arguments.seed}
    return {**of_trace, "calibration": asdict(calibration), **{name: getattr(arguments, name) for name in names}}


def _arguments() -> argparse.Namespace:
    parser = arguments_of("policy", __doc__)
    parser.add_argument("--trace", type=Path, help="without it, --made-up")
    parser.add_argument("--seconds", type=float, default=0.0, help="only the first so many of the trace")
    parser.add_argument("--made-up", choices=("conversations", "shared"), default="conversations")
    parser.add_argument("--seed", type=int, default=1, help="of the made-up trace")
    parser.add_argument("--calibration", type=Path, help="a bench file; without it, arithmetic for an H100")
    parser.add_argument("--scale", type=float, default=1.0, help="arrivals are so many times as fast")
    parser.add_argument("--share", type=float, default=0.0, help="of the highest rate that --base sustains")
    parser.add_argument("--base", default=BASE, help="policy+queue[+nofetch]")
    parser.add_argument("--case", nargs="+", default=DEFAULT_CASES, help="as --base, any number")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--mixed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
