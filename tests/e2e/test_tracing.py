"""A traced cluster: one tree a call over real workers, with parts that add up to the client's waiting time."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tools.otlp_receiver import Receiver, receiving
from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

PROMPT = [(7 * k) % 3000 + 600 for k in range(200)]
WORDS = "What are the words of this language, and which of them are long? " * 9
SIM = """
[worker.sim]
prefill_tokens_per_s = 500.0
decode_step_s = 0.02
"""
CASES = {
    "sim, disaggregated": (
        ("--engine", "sim", "--prefill", "1", "--decode", "1", "--disaggregation", "always"),
        SIM,
        40,
    ),
    "sim, mixed": (("--engine", "sim", "--mixed", "1"), SIM, 40),
    "model, disaggregated": (("--prefill", "1", "--decode", "1", "--disaggregation", "always"), "", 400),
    "model, mixed": (("--mixed", "1"), "", 400),
}
LENGTHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 0, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 0, "ignore_eos": True},
    "/v1/responses": {"input": f"List: {WORDS}", "max_output_tokens": 0},
}
"""The request of each path, but for its number of tokens: 0 stands for that."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        yield receiver


@pytest.fixture(scope="module", params=CASES)
def traced(request: pytest.FixtureRequest, receiver: Receiver) -> Iterator[tuple[str, Cluster]]:
    flags, text, _ = CASES[request.param]
    with running(*flags, config=f'[tracing]\nendpoint = "{receiver.url}"\n{text}') as cluster:
        yield request.param, cluster


@pytest.mark.parametrize("path", LENGTHS)
def test_one_trace_of_a_real_request_adds_up(traced: tuple[str, Cluster], receiver: Receiver, path: str) -> None:
    case, cluster = traced
    tokens = CASES[case][2]
    body = {name: value or tokens for name, value in LENGTHS[path].items()}
    body |= {"model": "tandem-tiny", "temperature": 0}
    hello = {"model": "tandem-tiny", "prompt": "Hello", "max_tokens": tokens}
    parts = {"read", "queue", "prefill", "decode"} | ({"transfer"} if case.endswith("disaggregated") else set())
    salts, tried = itertools.count(), []

    def adds_up() -> bool:
        """The machine may be busy elsewhere while one request runs, and not while each of several does."""
        with httpx.Client(base_url=cluster.api, timeout=60) as client:
            client.post("/v1/completions", json=hello).raise_for_status()  # links are measured now
            salt = f"{path} {next(salts)}"  # nothing of it is cached
            fresh = {"input": f"{salt}. {body['input']}"} if "input" in body else {"cache_salt": salt}
            began_s = time.perf_counter()
            answer = client.post(path, json={**body, **fresh})
            latency_s = time.perf_counter() - began_s
        assert answer.status_code == 200, answer.text
        root = receiver.root(answer.headers["x-request-id"])
        assert (root.attributes["http.route"], root.attributes["gen_ai.usage.output_tokens"]) == (path, tokens)
        leaves = receiver.leaves(root)
        told = f"{latency_s:.3f} s: " + ", ".join(f"{leaf.name} {leaf.took_s:.4f}" for leaf in leaves)
        tried.append(told)
        assert parts <= {leaf.name for leaf in leaves} <= parts | {"wait", "deliver"}, told
        took_s = {leaf.name: leaf.took_s for leaf in leaves}
        assert sum(leaf.took_s for leaf in leaves) == pytest.approx(root.took_s, abs=1e-4), told
        is_as_long = [root.took_s == pytest.approx(latency_s, rel=0.05)]
        if case.startswith("sim"):
            asked = root.attributes["gen_ai.usage.input_tokens"]
            computed = asked - root.attributes["gen_ai.usage.cache_read.input_tokens"]
            assert computed > 100
            is_as_long += [
                took_s["prefill"] == pytest.approx(computed / 500.0, rel=0.1),
                took_s["decode"] == pytest.approx(39 * 0.02, rel=0.3),
            ]
        return all(is_as_long)

    try:
        wait_for(adds_up)
    except AssertionError as error:
        raise AssertionError(f"{error}: {tried}") from None
    assert receiver.resources[-1]["deployment.environment.name"] == "test"
    assert receiver.resources[-1]["service.namespace"] == "tandem"
