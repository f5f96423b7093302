"""A user's view of a running cluster: OpenAI's client, gRPC, exact accounting of transferred blocks."""

import json
import time
import urllib.request
from typing import Any

import grpc
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc
from tandem.workercore.step_loop import REPORT_EVERY_S
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster
from tools.waiting import wait_for

BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.api}/v1", api_key="unused", max_retries=0)


def test_openai_client_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What does os.path.join do?"}]
    whole = client.chat.completions.create(
        model="tandem-tiny",
        messages=messages,
        max_tokens=24,
        temperature=0,
    )
    stream = client.chat.completions.create(
        model="tandem-tiny",
        messages=messages,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    roles = [c.choices[0].delta.role for c in chunks if c.choices and c.choices[0].delta.role]
    assert roles == ["assistant"]
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finishes == [whole.choices[0].finish_reason]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_equal_transformers(client: openai.OpenAI) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompt = "The function returns a new list of all the items in the sequence, or raises"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :]
    answer = client.completions.create(model="tandem-tiny", prompt=prompt, max_tokens=32, temperature=0)
    assert answer.choices[0].text == tokenizer.decode(out, skip_special_tokens=True)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == ids.shape[1]


def test_stream_equals_whole_for_n_and_seed(client: openai.OpenAI) -> None:
    settings = {"model": "tandem-tiny", "prompt": "Return the", "max_tokens": 12, "n": 3, "seed": 5, "temperature": 0.8}
    whole = client.completions.create(**settings)  # type: ignore[call-overload]
    texts = ["", "", ""]
    for chunk in client.completions.create(**settings, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in sorted(whole.choices, key=lambda c: c.index)]
    assert len(set(texts)) > 1


def test_grpc_gives_the_tokens_of_http(cluster: Cluster, client: openai.OpenAI) -> None:
    prompt = [40 + 3 * index for index in range(70)]
    http = client.completions.create(
        model="tandem-tiny", prompt=prompt, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
    )
    with grpc.insecure_channel(cluster.context["grpc"]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = i.GenerateRequest(
            model="tandem-tiny",
            token_ids=i.TokenIds(ids=prompt),
            sampling=i.GenerateSampling(max_tokens=20, temperature=0, ignore_eos=True),
        )
        responses = list(stub.Generate(request, timeout=60))
    text = "".join(delta.text for response in responses for delta in response.choices)
    tokens = [token for response in responses for delta in response.choices for token in delta.token_ids]
    assert text == http.choices[0].text
    assert len(tokens) == 20
    assert [response.finished for response in responses].count(True) == 1
    assert responses[-1].usage.prompt_tokens == 70


def test_transferred_bytes_are_blocks_minus_skipped(cluster: Cluster, client: openai.OpenAI) -> None:
    """The metrics arrive with the next load report, so the test waits for them; then every byte is accounted for."""
    shape = json.loads((MODEL / "config.json").read_text())
    layer_bytes = 2 * shape["num_key_value_heads"] * shape["head_dim"] * torch.float32.itemsize
    block_bytes = shape["num_hidden_layers"] * layer_bytes * BLOCK_TOKENS

    def counted() -> tuple[float, float, float]:
        return (
            cluster.metric("tandem_kv_transfer_bytes_total", direction="received"),
            cluster.metric("tandem_kv_transfer_blocks_total", direction="received"),
            cluster.metric("tandem_kv_transfer_skipped_blocks_total"),
        )

    def is_settled() -> bool:  # a short request can begin and end between two load reports
        seen = counted(), [w["in_flight"] for w in cluster.status()["workers"]]
        time.sleep(10 * REPORT_EVERY_S)
        return not any(seen[1]) and counted() == seen[0]

    wait_for(is_settled, what="all quiet")
    before, sent_before = counted(), cluster.metric("tandem_kv_transfer_bytes_total", direction="sent")
    lengths = (1, 16, 17, 100, 100, 333)
    expected_blocks = sum(-(-length // BLOCK_TOKENS) for length in lengths)
    for length in lengths:
        prompt = [(7 * k) % 900 + 600 for k in range(length)]
        client.completions.create(model="tandem-tiny", prompt=prompt, max_tokens=3, extra_body={"ignore_eos": True})

    def is_counted() -> bool:
        _, blocks, skipped = counted()
        return blocks + skipped - before[1] - before[2] == expected_blocks

    wait_for(is_counted, what="every block is counted, sent or skipped")
    received, blocks, skipped = (after - at_first for after, at_first in zip(counted(), before, strict=True))
    assert skipped >= 6 + 6 - 1
    assert received == (expected_blocks - skipped) * block_bytes == blocks * block_bytes

    def is_sent() -> bool:  # what was cancelled before, in mid-air, may have been counted at one end only
        return cluster.metric("tandem_kv_transfer_bytes_total", direction="sent") - sent_before == received

    wait_for(is_sent, what="every byte is counted as sent")


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = [(11 * k) % 900 + 1600 for k in range(64)]
    usages = [client.completions.create(model="tandem-tiny", prompt=prompt, max_tokens=2).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]  # type: ignore[union-attr]
    assert cached == [0, 48]


def test_probes(cluster: Cluster) -> None:
    for path in ("/livez", "/readyz", "/v1/models"):
        with urllib.request.urlopen(f"{cluster.api}{path}", timeout=60) as response:
            assert response.status == 200


def test_the_index_tells_the_router_what_workers_hold(cluster: Cluster) -> None:
    """Worker → Redis → the router's replica → the plan: the prediction becomes what the worker really finds."""
    prompt = [(17 * k) % 900 + 2600 for k in range(80)]
    body = {"model": "tandem-tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}

    def predicted_and_found() -> tuple[int, int, int]:
        request = urllib.request.Request(
            f"{cluster.api}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Tandem-Timing": "1"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            timing = json.loads(response.headers["x-tandem-timing"])
        hits = ("predicted_prefill_hit_tokens", "predicted_decode_hit_tokens", "cached_tokens")
        return tuple(timing[name] for name in hits)

    assert predicted_and_found() == (0, 0, 0)
    # All five blocks are held; the prefill worker computes the last one again, since it needs the last token's logits.
    wait_for(lambda: predicted_and_found() == (64, 80, 64), what="the index shows both workers' blocks")
