"""SmolLM2-135M-Instruct out of its GGUF file answers a question, over every API and in every layout of workers."""

import json

import pytest

from tandem.rpc.v1 import inference_pb2 as i
from tests.integration.engine.real_model import smollm2
from tests.integration.router.transcript import Whole, responses
from tools.running_cluster import Cluster, running

MODEL = "smollm2"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
PAIR = ("--prefill", "1", "--decode", "1", "--disaggregation", "always")
LAYOUTS = {
    "1 prefill, 1 decode": PAIR,
    "2 mixed": ("--mixed", "2"),
    "tensor parallelism of 3": (*PAIR, "--tp", "3"),
}
"""The model has 9 heads and 3 of keys and values."""


@pytest.mark.drawn(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_answers_over_every_door(layout: str) -> None:
    flags = ("--model", str(smollm2()), "--max-model-len", "2048", "--kv-memory", "64MiB")
    with running(*LAYOUTS[layout], *flags) as cluster:
        _ask_chat(cluster)
        _ask_http(cluster)
        _ask_grpc(cluster)
        _ask_for_json(cluster)


def _ask_chat(cluster: Cluster) -> None:
    code, out, error = cluster.clusterctl("chat", QUESTION, "--temperature", "0")
    assert (code, out) == (0, f"{ANSWER}\n"), error
    is_pair = {worker["role"] for worker in cluster.status()["workers"]} == {"prefill", "decode"}
    assert ("prefill-0 → decode-0 · hand-off " in error) is is_pair, error
    assert " · on mixed-" in error or is_pair


def _ask_http(cluster: Cluster) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    code, found = cluster.post("/v1/chat/completions", body)
    assert code == 200, found
    assert found["choices"][0]["message"]["content"] == ANSWER
    assert found["choices"][0]["finish_reason"] == "stop"


def _ask_grpc(cluster: Cluster) -> None:
    chat = i.ChatMessages(messages=[i.ChatMessage(role="user", content=QUESTION)])
    request = i.GenerateRequest(model=MODEL, chat=chat, sampling=i.GenerateSampling(temperature=0))
    whole = Whole(responses(cluster.context["grpc"], request))
    assert (whole.texts, whole.finishes) == ([ANSWER], ["stop"])


def _ask_for_json(cluster: Cluster) -> None:
    """It knows what goes into the fields, where nothing but the grammar makes it write them."""
    city = {"type": "object", "properties": {"capital": {"type": "string"}, "country": {"type": "string"}},
            "required": ["capital", "country"], "additionalProperties": False}  # fmt: skip
    question = f"{QUESTION} Answer with a JSON object that has the fields capital and country."
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": city, "strict": True}},
    }  # fmt: skip
    code, found = cluster.post("/v1/chat/completions", body)
    assert code == 200, found
    assert found["choices"][0]["finish_reason"] == "stop"
    fields = json.loads(found["choices"][0]["message"]["content"])
    assert {name: value.title() for name, value in fields.items()} == {"capital": "Paris", "country": "France"}
