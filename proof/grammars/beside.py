"""The other part of the proof: an honest client streams from a cluster, alone and beside plain and hostile requests.

The cluster is a mixed worker on the bundled model. Some clients send the inputs over HTTP, each of which has to end in
an answer or a refusal. The gaps between the honest client's tokens are compared with those beside as many requests of
the same prompts without a grammar: a row more in a step is no fault of a grammar.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from bench.report import quantile
from proof.grammars.honest import TIMEOUT_S, HonestClient
from proof.grammars.inputs import Inputs
from tools.running_cluster import Cluster, is_free, running
from tools.waiting import wait_for

CLUSTER = ("--mixed", "1", "--threads", "1")
CLIENTS = 3
ANSWER_TOKENS = 12
MEMORY_MIB = 768.0
"""Allowed growth of a process."""
REFUSED, ANSWERED = 400, 200


def run(inputs: Inputs, numbers: Sequence[int]) -> dict[str, Any]:
    """Measurements of all phases, and every promise that they break (`broken`)."""
    bodies = {number: {"structured_outputs": inputs.of(number).body} for number in numbers}
    with running(*CLUSTER) as cluster, closing(HonestClient(cluster.api)) as honest:
        _phase(cluster, honest, {number: {} for number in numbers[:CLIENTS]})  # what is imported at the first request
        plain, _ = _phase(cluster, honest, {number: {} for number in numbers})
        pids = _pids(cluster)
        for pid in pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        before = {name: memory_mib(pid, "VmRSS") for name, pid in pids.items()}
        begun_s = time.monotonic()
        hostile, statuses = _phase(cluster, honest, bodies)
        seconds = time.monotonic() - begun_s
        peak = {name: memory_mib(pid, "VmHWM") for name, pid in pids.items()}
        wait_for(lambda: is_free(cluster, 1), TIMEOUT_S, "nothing is left of any request")
        alone = honest.during(lambda: time.sleep(seconds))
    found = {
        "inputs": len(numbers), "seconds": round(seconds, 1),
        "kinds": len({inputs.of(number).kind for number in numbers}),
        "ends": {str(status): count for status, count in sorted(Counter(statuses.values()).items())},
        **{name: _gaps(gaps) for name, gaps in (("alone", alone), ("plain", plain), ("hostile", hostile))},
        "mib": {name: [round(before[name]), round(peak[name])] for name in pids},
    }  # fmt: skip
    return {**found, "broken": wrongs(found, statuses)}


def wrongs(found: dict[str, Any], statuses: dict[int, int]) -> list[str]:
    """Promises that were broken."""
    wrong = [f"input {number} ended with status {status}" for number, status in statuses.items()
             if status not in (ANSWERED, REFUSED)]  # fmt: skip
    plain, hostile = found["plain"], found["hostile"]
    if hostile["p99_ms"] > plain["p99_ms"] + plain["median_ms"]:
        wrong.append(f"p99 between tokens is {hostile['p99_ms']} ms, {plain['p99_ms']} ms beside plain requests")
    wrong += [f"{name} grew from {before} to {peak} MiB" for name, (before, peak) in found["mib"].items()
              if peak > before + MEMORY_MIB]  # fmt: skip
    return wrong


def _phase(
    cluster: Cluster, honest: HonestClient, bodies: dict[int, dict[str, Any]]
) -> tuple[list[float], dict[int, int]]:  # fmt: skip
    """Gaps of the honest client, and the status of each request, while clients send these."""
    statuses: dict[int, int] = {}
    left, lock = iter(bodies.items()), threading.Lock()

    def client() -> None:
        with httpx.Client(base_url=cluster.api, timeout=TIMEOUT_S) as http:
            while True:
                with lock:
                    number, body = next(left, (None, {}))
                if number is None:
                    return
                asked = {"model": "tandem-tiny", "prompt": f"Answer {number}:", "max_tokens": ANSWER_TOKENS,
                         "temperature": 1.0, "seed": number, **body}  # fmt: skip
                statuses[number] = _status(http, asked)

    def clients() -> None:
        with ThreadPoolExecutor(CLIENTS) as threads:
            for done in [threads.submit(client) for _ in range(CLIENTS)]:
                done.result()

    return honest.during(clients), statuses


def _status(http: httpx.Client, body: dict[str, Any]) -> int:
    """HTTP status of an answer; 0 = none came."""
    try:
        return http.post("/v1/completions", content=json.dumps(body)).status_code
    except httpx.HTTPError:
        return 0


def _gaps(gaps_s: Sequence[float]) -> dict[str, float]:
    """Gaps in milliseconds, the longest also in steps: medians of its own phase."""
    median_s, p99_s, longest_s = quantile(gaps_s, 50), quantile(gaps_s, 99), max(gaps_s)
    return {
        "tokens": len(gaps_s), "median_ms": round(1e3 * median_s, 2), "p99_ms": round(1e3 * p99_s, 2),
        "longest_ms": round(1e3 * longest_s, 1), "p99_steps": round(p99_s / median_s, 1),
        "longest_steps": round(longest_s / median_s, 1),
    }  # fmt: skip


def _pids(cluster: Cluster) -> dict[str, int]:
    """The router, and each process of the worker."""
    worker = [pid for pids in cluster.pids().values() for pid in pids]
    return {"router": cluster.status()["router"]["pid"], **{f"worker {n}": pid for n, pid in enumerate(worker)}}


def memory_mib(pid: int, name: str) -> float:
    """A line of a process's status."""
    status = Path(f"/proc/{pid}/status").read_text()
    return float(status.partition(f"{name}:")[2].split()[0]) / 1024
