"""The second turn of a conversation through a real cluster: the prefill worker fetches the answer of the first one from
the decode worker that made it, and computes the new tokens alone."""

import json
import urllib.request
from typing import Any

from tokenizers import Tokenizer

from tandem.core import metric_names as names
from tandem.engine.sim.arithmetic import expected_tokens
from tests.cluster_fixture import cluster_fixture
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster
from tools.waiting import wait_for

ANSWER, BLOCK = 300, 16


def oracle(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, 4096, eos_token_ids=(1,))


cluster = cluster_fixture(
    "--engine",
    "sim",
    "--prefill",
    "1",
    "--decode",
    "1",
    "--disaggregation",
    "always",
    "--model",
    str(MODEL),
    config="[worker.sim]\nprefill_tokens_per_s = 1000\n",
)
"""Prompts are computed slowly enough for 300 tokens to be worth a fetch on any link."""


def complete(cluster: Cluster, prompt: list[int], count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(answer, timing)."""
    body = {"model": "tandem-tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{cluster.api}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Tandem-Timing": "1"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response), json.loads(response.headers["x-tandem-timing"])


def counters(cluster: Cluster) -> dict[str, dict[str, float]]:
    return {worker["role"]: worker["counters"] for worker in cluster.status()["workers"]}


def computed(cluster: Cluster) -> float:
    """Prompt tokens that P has computed, by its last report."""
    return counters(cluster)["prefill"].get("prefill_tokens", 0.0)


def failed(told: dict[str, dict[str, float]]) -> float:
    """Fetches that came to nothing."""
    return sum(count for key, count in told["prefill"].items() if key.partition("{")[0] == names.FETCHES_FAILED)


class Talks:
    """Conversations one after another. `total`: prompt tokens that P must have computed by now. `late`: fetches that
    this machine was too busy for."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._seeds = cluster, iter(range(100, 200))
        before = computed(cluster)
        complete(cluster, prompt_of(99), 1)  # reports of what was tried before the cluster was ready may come late
        wait_for(lambda: computed(cluster) >= before + len(prompt_of(99)), what="P has told of the first request")
        self.total, self.late = computed(cluster), 0.0

    def second_turn(self) -> bool:
        """Return whether the router knew of all the answer's blocks by the time of the second turn, and they came in
        the time that a fetch has; if not, another talk."""
        first = prompt_of(next(self._seeds))
        self._complete(first, ANSWER)
        said = [*first, *oracle(first, ANSWER)]
        known = (len(said) - 1) // BLOCK * BLOCK
        prompt = [*said, *[token + 1 for token in first[:20]]]
        before = counters(self._cluster)
        answer, timing = self._complete(prompt, 8)
        if timing["predicted_decode_hit_tokens"] < known:
            return False
        now = counters(self._cluster)
        if late := failed(now) - failed(before):
            self.late += late
            return False
        assert timing["sources"] == [timing["decode"]]
        text = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(oracle(prompt, 8))
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == known

        def grown(role: str, name: str) -> float:
            return now[role].get(name, 0.0) - before[role].get(name, 0.0)

        assert grown("prefill", "prefill_tokens") == len(prompt) - known, "P computes the new tokens alone"
        assert grown("prefill", names.FETCHED_TOKENS) == known - len(first) // BLOCK * BLOCK, "P had the first prompt"
        assert grown("prefill", names.FETCHES) == grown("decode", names.SUPPLIES) == 1
        return True

    def _complete(self, prompt: list[int], count: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """(answer, timing), once both workers have reported it."""
        answer, timing = complete(self._cluster, prompt, count)
        self.total += len(prompt) - answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        wait_for(lambda: computed(self._cluster) >= self.total, what="P has told what it computed")
        assert computed(self._cluster) == self.total
        wait_for(self._has_supplied, what="D has told that it supplied")
        return answer, timing

    def _has_supplied(self) -> bool:
        now = counters(self._cluster)
        return now["decode"].get(names.SUPPLIES, 0.0) == now["prefill"].get(names.FETCHES, 0.0)


def prompt_of(seed: int) -> list[int]:
    return [(seed * i * i + 31 * i) % 3000 + 600 for i in range(150)]


def test_the_second_turn_computes_only_what_is_new(cluster: Cluster) -> None:
    talks = Talks(cluster)
    wait_for(talks.second_turn, 60, "the router knows that D holds the answer")
    assert cluster.metric(names.FETCHES, role="prefill") == counters(cluster)["prefill"][names.FETCHES]
    assert cluster.metric(names.FETCHES_FAILED) == talks.late
