"""Answers follow their grammars: whole and streamed, on one worker and across a hand-over."""

import json
import re
from typing import Any

import grpc
import jsonschema_rs
import openai
import pytest

from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tools.running_cluster import Cluster

PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
STRICT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
ASKED: Any = {"model": "tandem-tiny", "messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 120}


def answer(cluster: Cluster, **more: Any) -> list[dict[str, Any]]:
    status, body = cluster.post("/v1/chat/completions", {**ASKED, "temperature": 0.8, "seed": 3, **more})
    assert status == 200, body
    choices: list[dict[str, Any]] = body["choices"]
    return choices


def text_of(choice: dict[str, Any]) -> str:
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def check_person(text: str) -> None:
    jsonschema_rs.validate(PERSON, json.loads(text))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_response_format(cluster: Cluster, seed: int) -> None:
    check_person(text_of(answer(cluster, response_format=STRICT, seed=seed)[0]))
    assert answer(cluster, response_format={"type": "text"}, seed=seed) == answer(cluster, seed=seed)


def test_any_object(cluster: Cluster) -> None:
    (choice,) = answer(cluster, response_format={"type": "json_object"}, logit_bias={"96": 1}, max_tokens=2)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


def test_every_choice_of_several(cluster: Cluster) -> None:
    texts = [text_of(choice) for choice in answer(cluster, response_format=STRICT, n=3)]
    assert len(set(texts)) > 1
    for text in texts:
        check_person(text)


def test_a_stream_says_the_same(cluster: Cluster) -> None:
    whole = text_of(answer(cluster, response_format=STRICT)[0])
    with openai.OpenAI(base_url=f"{cluster.api}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(**ASKED, temperature=0.8, seed=3, response_format=STRICT, stream=True)
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(parts) > 5
    assert "".join(parts) == whole


def test_text_format_of_a_response(cluster: Cluster) -> None:
    wanted: Any = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    with openai.OpenAI(base_url=f"{cluster.api}/v1", api_key="none", max_retries=0) as client:
        made = client.responses.create(
            model="tandem-tiny", input="Who is it?", max_output_tokens=120, text={"format": wanted}, temperature=0
        )
    assert made.status == "completed"
    check_person(made.output_text)
    assert made.text is not None
    assert made.text.to_dict() == {"format": wanted}
    unique = {**wanted, "strict": False, "schema": {"type": "array", "uniqueItems": True}}
    status, body = cluster.post("/v1/responses", {"model": "tandem-tiny", "input": "Hi", "text": {"format": unique}})
    assert (status, body["error"]["param"]) == (400, "text.format.schema.uniqueItems")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"json": PERSON, "whitespace_pattern": ""}}, r"\{\"name\":\"[^\n]*\}"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{4}"}}, "[0-9]{3}-[a-z]{4}"),
        ({"structured_outputs": {"choice": ["certainly", "never"]}}, "certainly|never"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/ "y"'}}, "x[0-9]y"),
        ({"guided_json": {"enum": [1, 2]}}, "1|2"),
        ({"guided_regex": "(ab){2,3}"}, "(ab){2,3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" [0-9]'}, "a[0-9]"),
    ],
)
def test_structured_outputs_and_their_older_names(cluster: Cluster, fields: Any, pattern: str) -> None:
    assert re.fullmatch(pattern, text_of(answer(cluster, **fields)[0]))
    status, body = cluster.post(
        "/v1/completions", {"model": "tandem-tiny", "prompt": "It is", "max_tokens": 120, "temperature": 0.8, **fields}
    )
    assert status == 200, body
    assert re.fullmatch(pattern, body["choices"][0]["text"])


def test_over_grpc(cluster: Cluster) -> None:
    outputs = [
        i.StructuredOutputs(json=json.dumps(PERSON)),
        i.StructuredOutputs(regex="[0-9]{4}x"),
        i.StructuredOutputs(choice=i.Choices(texts=["certainly", "never"])),
    ]
    with grpc.insecure_channel(cluster.context["grpc"]) as channel:
        for one in outputs:
            request = i.GenerateRequest(
                model="tandem-tiny", text="It is", structured_outputs=one,
                sampling=i.GenerateSampling(max_tokens=120, temperature=0.8, seed=3),
            )  # fmt: skip
            responses = list(i_grpc.InferenceStub(channel).Generate(request, timeout=30))
            text = "".join(delta.text for response in responses for delta in response.choices)
            if one.WhichOneof("kind") == "json":
                check_person(text)
            else:
                assert re.fullmatch("[0-9]{4}x|certainly|never", text)


def test_a_schema_is_refused_by_its_place(cluster: Cluster) -> None:
    schema = {"type": "object", "properties": {"ids": {"type": "array", "uniqueItems": True}}}
    status, body = cluster.post(
        "/v1/chat/completions",
        {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
    )
    assert status == 400
    assert body["error"]["code"] == "invalid_grammar"
    assert body["error"]["param"] == "response_format.json_schema.schema.properties.ids.uniqueItems"


def test_a_grammar_that_only_workers_can_judge_is_refused_by_them(cluster: Cluster) -> None:
    status, body = cluster.post(
        "/v1/chat/completions", {**ASKED, "structured_outputs": {"grammar": 'start: <|no_such_token|> "a"'}}
    )
    assert status == 400
    assert body["error"]["code"] == "invalid_grammar"
    assert "no_such_token" in body["error"]["message"]
    check_person(text_of(answer(cluster, response_format=STRICT)[0]))
