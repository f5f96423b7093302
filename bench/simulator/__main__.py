"""How fast the simulator is: a load on virtual time, in seconds of one core.

Plays a trace (`--trace FILE`, else conversations that are made up) to a cluster of a thousand workers, and to the first
tenth of them at a tenth of the rate, so that what a request costs is seen beside what a candidate costs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.report import Row, arguments_of, publish
from tandem.controlplane.simulator import traces
from tandem.controlplane.simulator.setup import Setup
from tandem.controlplane.simulator.simulator import Simulator
from tandem.controlplane.simulator.summary import figures
from tandem.controlplane.simulator.traces import RequestLog
from tandem.controlplane.simulator.workloads import ConversationWorkload, conversations
from tandem.core.config import AdmissionSection, Disaggregation, PolicyName
from tandem.core.errors import ConfigError
from tandem.core.prefill_queue import QueueRules
from tandem.router.routing.policies import create_policy

AIM_S = 300.0
"""Target for an hour of the Azure conversation trace on a thousand workers."""
REQUESTS = 20_000
TENTH = 10


def main() -> int:
    parser = arguments_of("simulator", __doc__)
    parser.add_argument("--trace", type=Path, help="Mooncake's JSON lines or Azure's CSV; without it, made up")
    parser.add_argument("--seconds", type=float, default=0.0, help="only the first so many of the trace")
    parser.add_argument("--prefill", type=int, default=400)
    parser.add_argument("--decode", type=int, default=600)
    arguments = parser.parse_args()
    try:
        trace = (
            traces.read(arguments.trace)
            if arguments.trace
            else conversations(ConversationWorkload(requests=REQUESTS), 1)
        )
        if arguments.seconds:
            trace = trace.first(arguments.seconds)
        whole = _setup(arguments.prefill, arguments.decode)
        tenth = _setup(max(1, arguments.prefill // TENTH), max(1, arguments.decode // TENTH))
    except ConfigError as error:
        print(f"bench.simulator: {error}", file=sys.stderr)
        return 2
    rows = [*_rows(tenth, trace.scaled(1 / TENTH).first(trace.span_s), None), *_rows(whole, trace, AIM_S)]
    publish("simulator", rows, arguments.out, load={"trace": trace.name, "requests": len(trace.requests)})
    return 0


def _setup(prefill: int, decode: int) -> Setup:
    """A cluster with default settings."""
    policy = create_policy(PolicyName.COST, Disaggregation.AUTO)
    return Setup(policy=policy, queue=QueueRules(), admission=AdmissionSection(), prefill=prefill, decode=decode)


def _rows(setup: Setup, trace: RequestLog, aim_s: float | None) -> Iterator[Row]:
    began_s, spent_s = time.monotonic(), time.process_time()
    found = figures(Simulator(setup, trace).run())
    wall_s, spent_s = time.monotonic() - began_s, time.process_time() - spent_s
    count = len(trace.requests)
    case = f"{setup.prefill}P:{setup.decode}D, {trace.span_s:.0f} s of {trace.name}, {count} requests"
    yield Row(case, "wall time", wall_s, "s", aim_s)
    yield Row(case, "processor time a request", 1e3 * spent_s / count, "ms")
    yield Row(case, "virtual seconds a second", trace.span_s / wall_s, "x")
    yield Row(case, "TTFT p90", found.ttft_p90_s, "s")


if __name__ == "__main__":
    sys.exit(main())
