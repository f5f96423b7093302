"""Clients of a real cluster that all leave, each at a random moment; how long until nothing of them is left."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.router.leaving import WAYS, ask
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, is_free, running
from tools.waiting import wait_for

CLIENTS = 6
LONGEST_STAY_S = 0.6
GIVE_UP_S = 20.0
"""Time in which the cluster must forget a wave, else it counts as never forgotten."""
ANSWER_TOKENS = 2000
"""Take 40 s: what is free before that was forgotten, not finished."""
CONFIG = """
[pools]
prefill = 1
decode = 1

[worker]
engine = "sim"

[worker.sim]
prefill_tokens_per_s = 4000
decode_step_s = 0.02
"""


@dataclass(frozen=True, slots=True)
class Wave:
    """The phases of its clients' requests when they left, and the time from the last departure until all was free."""

    free_after_s: float
    phases: Counter[str] = field(default_factory=Counter)


@contextmanager
def simulated(folder: Path) -> Iterator[Cluster]:
    """A prefill and a decode worker: prompts take some hundred milliseconds, answers longer than any client waits."""
    flags = ("--model", str(MODEL), "--threads", "1", "--disaggregation", "always")
    with running(*flags, config=CONFIG) as cluster:
        yield cluster


def wave(cluster: Cluster, rng: random.Random) -> Wave:
    """Some clients ask, stay for a while and leave. AssertionError if something of them is never forgotten."""
    http = cluster.api.removeprefix("http://")
    began_s, phases = time.monotonic(), Counter[str]()
    stays: list[tuple[float, int, Callable[[], None]]] = []
    for number in range(CLIENTS):
        size = 300 + 200 * number + rng.randrange(100)  # by which the router's list of requests distinguishes them
        prompt = [300 + rng.randrange(3000) for _ in range(size)]
        leave = ask(
            http, cluster.context["grpc"], rng.choice(WAYS), prompt, max_tokens=ANSWER_TOKENS, model="tandem-tiny"
        )
        stays.append((time.monotonic() + rng.uniform(0.0, LONGEST_STAY_S), size, leave))
    for until_s, size, leave in sorted(stays):
        time.sleep(max(0.0, until_s - time.monotonic()))
        phases[_phase(cluster, size)] += 1
        leave()
    left_s = time.monotonic()
    wait_for(lambda: is_free(cluster), GIVE_UP_S, f"all is free ({left_s - began_s:.1f} s, {dict(phases)})")
    return Wave(time.monotonic() - left_s, phases)


def _phase(cluster: Cluster, size: int) -> str:
    rows: list[dict[str, Any]] = cluster.admin("/admin/v1/requests")["requests"]
    found = [str(row["phase"]) for row in rows if row["prompt_tokens"] == size]
    return found[0] if found else "not sent yet"
