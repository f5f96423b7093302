"""Measure the functions a client's time goes to, with 1k-token prompts and with 32 streams, and the parts of a step.

`served`: both loads over 1+1 with the bundled model. `step`: a decode step of one request with SmolLM2, in the kernels'
C code and between its calls.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from bench.load import TimedAnswer, ask, body_of, check_served
from bench.profile.between_calls import every_format
from bench.profile.sampling import LIBRARIES, MODEL, watched
from bench.report import Row, arguments_of, publish
from tools.running_cluster import Cluster, running

FLAGS = ("--prefill", "1", "--decode", "1", "--disaggregation", "always")
LIMIT = 3.0
"""Limit in percent of all samples for one function of ours, outside the model's forward."""
SHOWN = 8
STREAMS = 32
TIMEOUT_S = 120.0

Load = Callable[[str, Random, float], list[TimedAnswer]]


def one_by_one(api: str, dice: Random, seconds: float) -> list[TimedAnswer]:
    """1,024 fresh token ids and four tokens of answer, the next request when the last one has ended."""

    async def work() -> list[TimedAnswer]:
        answers, ends_s = [], time.monotonic() + seconds
        while time.monotonic() < ends_s:
            body = body_of([dice.randrange(300, 4000) for _ in range(1024)], 4)
            answers.append(await ask(api, body, time.monotonic(), TIMEOUT_S))
        return answers

    return asyncio.run(work())


def streams(api: str, dice: Random, seconds: float) -> list[TimedAnswer]:
    """32 at once: prompts of 64 token ids, 128 tokens each; another one when one ends."""

    async def stream(ends_s: float) -> list[TimedAnswer]:
        answers = []
        while time.monotonic() < ends_s:
            body = body_of([dice.randrange(300, 4000) for _ in range(64)], 128)
            answers.append(await ask(api, body, time.monotonic(), TIMEOUT_S))
        return answers

    async def work() -> list[TimedAnswer]:
        ends_s = time.monotonic() + seconds
        return [answer for part in await asyncio.gather(*[stream(ends_s) for _ in range(STREAMS)]) for answer in part]

    return asyncio.run(work())


def rate_of(answers: Sequence[TimedAnswer]) -> float:
    """Tokens a second while all streams run: from a second after the last of them began until the last request of any.
    SystemExit if there is no such time."""
    times = sorted(at_s for answer in answers for at_s in answer.token_s)
    starts = sorted(answer.due_s for answer in answers)
    from_s, to_s = starts[STREAMS - 1] + 1.0, starts[-1]
    if to_s <= from_s:
        raise SystemExit("no stream got to a second request: give it more --seconds")
    inside = sum(from_s <= at_s < to_s for at_s in times)
    return inside / (to_s - from_s)


def processes_of(cluster: Cluster) -> dict[str, int]:
    """Processes by name: router, and of each worker its host and ranks."""
    children = Path(f"/proc/{cluster.process.pid}/task/{cluster.process.pid}/children").read_text().split()
    (router,) = [pid for pid in children if b"tandem.router" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    found = {"router": int(router)}
    for worker in cluster.status()["workers"]:
        found[f"{worker['role']} host"] = worker["pid"]
        found |= {f"{worker['role']} rank {rank}": pid for rank, pid in enumerate(worker["rank_pids"])}
    return found


def shares(case: str, seen: Mapping[str, Counter[str]]) -> list[Row]:
    """Percent of all samples at which a thread of any process was busy."""
    total = sum(sum(counts.values()) for counts in seen.values())
    rows = [Row(case, f"busy in {name}", 100 * sum(counts.values()) / total, "%") for name, counts in seen.items()]
    every: Counter[str] = sum((Counter(counts) for counts in seen.values()), Counter())
    for what in (MODEL, LIBRARIES):
        rows.append(Row(case, what, 100 * every.pop(what, 0) / total, "%"))
    return rows + [Row(case, name, 100 * count / total, "%", LIMIT) for name, count in every.most_common(SHOWN)]


def measure(cluster: Cluster, case: str, load: Load, seconds: float, seed: int) -> list[Row]:
    """First without an observer, then with."""
    dice = Random(seed)
    check_served(load(cluster.api, dice, min(3.0, seconds)))
    answers = load(cluster.api, dice, seconds)
    check_served(answers)
    rows = [Row(case, "time to first token, p50", 1e3 * statistics.median(a.ttft_s for a in answers), "ms")]
    if load is streams:
        rows.append(Row(case, "tokens a second", rate_of(answers), "tok/s"))
    with watched(processes_of(cluster)) as seen:
        check_served(load(cluster.api, dice, seconds))
    return rows + shares(case, seen)


def main() -> int:
    """Run the command line; 0 when everything was measured."""
    parser = arguments_of("profile", __doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load, once with and once without profiler")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=("step", "served"), default=["step", "served"])
    arguments = parser.parse_args()
    rows = every_format() if "step" in arguments.parts else []
    if "served" in arguments.parts:
        rows += served(arguments.seconds, arguments.seed)
    publish("profile", rows, arguments.out)
    return 0


def served(seconds: float, seed: int) -> list[Row]:
    """Both loads, each as it is and with the profiler."""
    rows = []
    with running(*FLAGS) as cluster:
        for case, load in (("1k tokens, one by one", one_by_one), (f"{STREAMS} streams", streams)):
            print(f"{case}: {seconds:g} s as it is, and again with the profiler", flush=True)
            rows += measure(cluster, case, load, seconds, seed)
    return rows


if __name__ == "__main__":
    sys.exit(main())
