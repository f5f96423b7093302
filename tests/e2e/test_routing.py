"""Routing as users meet it: short prompts overtake long ones, decode workers extend their prefixes, with reasons."""

import concurrent.futures
import json
from typing import Any

import httpx

from tests.cluster_fixture import cluster_fixture
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster
from tools.waiting import wait_for

SETTINGS = """
[pools]
prefill = 1
decode = 1
[worker]
engine = "sim"
kv_memory_bytes = 134217728
[worker.sim]
prefill_tokens_per_s = 2000.0
decode_step_s = 0.005
"""
LONG = [(7 * k) % 3000 + 600 for k in range(3000)]


cluster = cluster_fixture("--model", str(MODEL), config=SETTINGS)


def complete(cluster: Cluster, prompt: list[int], max_tokens: int = 2) -> dict[str, Any]:
    """The answer's routing decision."""
    body = {"model": "tandem-tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{cluster.api}/v1/completions", json=body, headers={"X-Tandem-Route": "1"}, timeout=60)
    assert answer.status_code == 200, answer.text
    decision: dict[str, Any] = json.loads(answer.headers["x-tandem-route"])
    return decision


def route(cluster: Cluster, *arguments: str) -> str:
    code, out, error = cluster.clusterctl("route", *arguments)
    assert code == 0, error
    return out


def test_a_short_prompt_overtakes_long_ones(cluster: Cluster) -> None:
    """Three long prompts of 1.5 s each are in P's queue; a short one that comes last is answered first."""
    assert (
        route(cluster, "policy", "least_loaded", "--yes").strip() == "least_loaded"
    )  # so that D computes none of them
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        long = [pool.submit(complete, cluster, [number, *LONG]) for number in range(10, 13)]
        wait_for(
            lambda: cluster.metric("tandem_router_in_flight_requests") == 3, 30, "the long prompts are on their way"
        )
        short = pool.submit(complete, cluster, [99] * 60)
        assert short.result(60)["prefill"] == "prefill-0"
        assert sum(answer.done() for answer in long) < 3
        assert {answer.result(60)["prefill"] for answer in long} == {"prefill-0"}
    assert route(cluster, "policy", "cost", "--yes").strip() == "cost"


def test_a_decode_worker_extends_its_own_prefix(cluster: Cluster) -> None:
    prompt = [5, *LONG[:1200]]
    first = complete(cluster, prompt)
    assert (first["prefill"], first["decode"]) == ("prefill-0", "decode-0")
    wait_for(lambda: _held(cluster, prompt) >= 1184, 30, "the index knows the blocks")
    found = json.loads(route(cluster, "explain", "--tokens", ",".join(map(str, prompt)), "--json"))
    assert (found["prefill"], found["decode"]) == (None, "decode-0")
    second = complete(cluster, prompt)
    assert (second["prefill"], second["decode"], second["decode_hit_tokens"]) == (None, "decode-0", 1200)


def test_explain_for_people(cluster: Cluster) -> None:
    lines = [" ".join(line.split()) for line in route(cluster, "explain", "What does os.path.join do?").splitlines()]
    assert "policy cost" in lines
    assert any(line.startswith("PREFILL DECODE QUEUE COMPUTE") for line in lines)
    assert any(line.startswith("prefill-0 decode-0") for line in lines)
    assert "others: least_loaded, round_robin" in route(cluster, "policy")


def _held(cluster: Cluster, prompt: list[int]) -> int:
    found = json.loads(route(cluster, "explain", "--tokens", ",".join(map(str, prompt)), "--json"))
    return next(int(one["held_tokens"]) for one in found["workers"] if one["worker"] == "decode-0")
