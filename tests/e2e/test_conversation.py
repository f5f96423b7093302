"""The second turn of a conversation through a real cluster: the prefill worker fetches the answer of the first one from
the decode worker that made it, and computes the new tokens alone."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.core import metricnames as names
from tandem.engine.sim.arithmetic import expected_tokens
from tests.e2e.cluster import Cluster, running, wait_for
from tests.integration.worker.pair import MODEL

ANSWER, BLOCK = 300, 16


def oracle(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, 4096, eos_token_ids=(1,))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Prompts are computed slowly enough for 300 tokens to be worth 10 ms."""
    file = tmp_path_factory.mktemp("config") / "cluster.toml"
    file.write_text("[worker.sim]\nprefill_tokens_per_s = 3000\n")
    flags = ("--config", str(file), "--engine", "sim", "--prefill", "1", "--decode", "1")
    with running(*flags, "--disaggregation", "always", "--model", str(MODEL)) as cluster:
        yield cluster


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


def test_the_second_turn_computes_only_what_is_new(cluster: Cluster) -> None:
    seeds = iter(range(100, 200))

    def second_turn() -> bool:
        """Whether the router knew of the answer's blocks by the time of the second turn; if not, another talk."""
        seed = next(seeds)
        first = [(seed * i * i + 31 * i) % 3000 + 600 for i in range(150)]
        before = computed(cluster)
        complete(cluster, first, ANSWER)
        wait_for(lambda: computed(cluster) >= before + len(first), 10, "P has told of the first turn")
        said = [*first, *oracle(first, ANSWER)]
        known = (len(said) - 1) // BLOCK * BLOCK
        prompt = [*said, *[(seed + 7 * i) % 3000 + 600 for i in range(20)]]
        before = computed(cluster)
        answer, timing = complete(cluster, prompt, 8)
        if not timing["sources"]:
            return False
        assert timing["sources"] == [timing["decode"]]
        text = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(oracle(prompt, 8))
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == known
        new = len(prompt) - known
        wait_for(lambda: computed(cluster) >= before + new, 10, "P has told of the second turn")
        wait_for(lambda: counters(cluster)["decode"].get(names.SUPPLIES), 10, "D has told that it supplied")
        now = counters(cluster)
        assert now["prefill"]["prefill_tokens"] == before + new, "P computes the new tokens alone"
        assert now["prefill"][names.FETCHED_TOKENS] == known - len(first) // BLOCK * BLOCK, "P had the first prompt"
        assert now["prefill"][names.FETCHES] == now["decode"][names.SUPPLIES] == 1
        return True

    wait_for(second_turn, 60, "the router knows that D holds the answer")
    assert cluster.metric(names.FETCHES, role="prefill") == 1
    assert cluster.metric(names.FETCHES_FAILED) == 0
