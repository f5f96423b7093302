"""Budgets of thoughts on a real cluster: the model is made to end its thoughts, and answers."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema_rs
import openai
import pytest

from tandem.rpc.v1 import inference_pb2 as i
from tests.integration.router.transcript import Whole, responses
from tests.thinking_model import thinking_model
from tools.running_cluster import Cluster, running

USER: Any = [{"role": "user", "content": "Tell me a story."}]
ASK: Any = {"model": "thinking", "messages": USER, "temperature": 0, "max_tokens": 60, "seed": 3}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "kind": {"enum": ["red", "green"]}},
    "required": ["days", "kind"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = thinking_model(tmp_path_factory.mktemp("model"))
    config = f'[model]\npath = "{model}"\nserved_names = ["thinking"]\ndtype = "float32"\n'
    with running("--prefill", "1", "--decode", "1", "--disaggregation", "always", config=config) as found:
        yield found


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.api}/v1", api_key="none", max_retries=0) as found:
        yield found


def thought(answer: Any) -> tuple[str, str, int]:
    """The reasoning, the content, and how many tokens the former has."""
    message = answer.choices[0].message
    reasoning = (message.model_extra or {}).get("reasoning_content", "")
    return reasoning, message.content or "", answer.usage.completion_tokens_details.reasoning_tokens


def test_a_thought_ends_with_its_budget_and_the_answer_goes_on(client: openai.OpenAI) -> None:
    free = thought(client.chat.completions.create(**ASK))
    assert free[1:] == ("", 60)
    for fields in ({"thinking_token_budget": 12}, {"reasoning": {"max_tokens": 12}}):
        reasoning, content, tokens = thought(client.chat.completions.create(**ASK, extra_body=fields))
        assert tokens == 12
        assert content
        assert free[0].startswith(reasoning.rstrip())
    reasoning, content, tokens = thought(
        client.chat.completions.create(**ASK, extra_body={"thinking_token_budget": 0, "include_reasoning": True})
    )
    assert (reasoning, tokens) == ("", 0)
    assert content


def test_a_budget_that_is_not_spent_changes_nothing(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(**ASK).choices[0].message
    assert client.chat.completions.create(**ASK, extra_body={"thinking_token_budget": 500}).choices[0].message == free


def test_every_choice_has_its_own(client: openai.OpenAI) -> None:
    ask = {**ASK, "n": 3, "temperature": 1.0, "extra_body": {"thinking_token_budget": 10, "return_token_ids": True}}
    answer = client.chat.completions.create(**ask)
    assert all(choice.message.content for choice in answer.choices)
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 30
    alone = [client.chat.completions.create(**{**ask, "n": n}).choices[0].message for n in (1, 2)]
    assert alone == [answer.choices[0].message] * 2


@pytest.mark.parametrize("budget", [0, 1, 2, 9])
def test_a_schema_begins_where_the_thought_ends(client: openai.OpenAI, budget: int) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    for seed in range(4):
        ask = {**ASK, "temperature": 0.9, "seed": seed, "extra_body": {"thinking_token_budget": budget}}
        answer = client.chat.completions.create(**ask, response_format=wanted)
        _, content, tokens = thought(answer)
        assert tokens == budget
        jsonschema_rs.validate(SCHEMA, json.loads(content))


def test_a_call_begins_where_the_thought_ends(client: openai.OpenAI) -> None:
    ask = {**ASK, "temperature": 0.9, "extra_body": {"thinking_token_budget": 9}}
    answer = client.chat.completions.create(**ask, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert thought(answer)[2] == 9
    assert answer.choices[0].message.tool_calls
    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "function"
    jsonschema_rs.validate(SCHEMA, json.loads(call.function.arguments))


def test_the_budget_of_messages_is_kept(cluster: Cluster, client: openai.OpenAI) -> None:
    chat: Any = client.chat.completions.create(**ASK, extra_body={"thinking_token_budget": 12})
    thinking: Any = {"type": "enabled", "budget_tokens": 12}
    with anthropic.Anthropic(base_url=cluster.api, api_key="none", max_retries=0) as messages:
        answer: Any = messages.messages.create(
            model="thinking", messages=USER, max_tokens=60, thinking=thinking, extra_body={"temperature": 0}
        )
    first, second = answer.content
    assert (first.thinking, second.text) == thought(chat)[:2]


def test_over_grpc(cluster: Cluster, client: openai.OpenAI) -> None:
    chat = i.ChatMessages(messages=[i.ChatMessage(role="user", content=USER[0]["content"])])
    sampling = i.GenerateSampling(temperature=0, max_tokens=60, seed=3, thinking_token_budget=12)
    whole = Whole(responses(cluster.context["grpc"], i.GenerateRequest(model="thinking", chat=chat, sampling=sampling)))
    more = {"thinking_token_budget": 12, "return_token_ids": True}
    answer: Any = client.chat.completions.create(**ASK, extra_body=more)
    assert whole.tokens[0] == answer.choices[0].token_ids
    assert "</think>" in whole.texts[0]


def test_a_wrong_budget_is_named(client: openai.OpenAI) -> None:
    for fields, said in (
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning": {"max_tokens": "many"}}, "reasoning.max_tokens"),
        (
            {"reasoning": {"max_tokens": 3}, "thinking_token_budget": 4},
            "thinking_token_budget and reasoning.max_tokens",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            client.chat.completions.create(**ASK, extra_body=fields)
