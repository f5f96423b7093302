"""Tools and reasoning on a real cluster: models with a chat template that has both."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, Field

from bench.quality.texts import QUESTIONS
from tests.integration.engine.real_model import smollm2
from tests.integration.router.tool_models import TEMPLATES
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, running

USER: Any = [{"role": "user", "content": "Tell me a story."}]
TOOLS: Any = [{"type": "function", "function": {"name": "tell", "parameters": {"type": "object", "properties": {}}}}]
OPENS = "{%- if add_generation_prompt and enable_thinking is not defined %}{{ '<think>\\n' }}{% endif %}"
"""The prompt begins the reasoning, as those of DeepSeek R1 do."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template: Path = tmp_path_factory.mktemp("tools") / "template.jinja"
    template.write_text((TEMPLATES / "hermes.jinja").read_text().rstrip() + OPENS)
    config = f'[model]\npath = "{MODEL}"\nchat_template = "{template}"\nserved_names = ["tools"]\ndtype = "float32"\n'
    with running("--prefill", "1", "--decode", "1", config=config) as cluster:
        yield from _client(cluster)


def _client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.api}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_what_the_prompt_began_is_reasoning_and_else_content(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tools", "messages": USER, "tools": TOOLS, "max_tokens": 24, "temperature": 0}
    thought = client.chat.completions.create(**ask)
    message, usage = thought.choices[0].message, thought.usage
    fields: Any = message.model_extra
    assert (message.content, message.tool_calls) == ("", None)
    assert fields["reasoning_content"].strip()
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 24

    said = client.chat.completions.create(**ask, reasoning_effort="none")
    assert said.choices[0].message.content
    assert "reasoning_content" not in (said.choices[0].message.model_extra or {})


def test_a_stream_has_the_same_reasoning(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tools", "messages": USER, "tools": TOOLS, "max_tokens": 24, "temperature": 0}
    whole: Any = client.chat.completions.create(**ask).choices[0].message.model_extra
    pieces = [
        (choice.delta.model_extra or {}).get("reasoning_content", "")
        for chunk in client.chat.completions.create(**ask, stream=True)
        for choice in chunk.choices
    ]
    assert "".join(pieces) == whole["reasoning_content"]
    assert len([piece for piece in pieces if piece]) > 4


def test_tools_are_in_the_prompt_unless_none_may_be_called(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tools", "messages": USER, "max_tokens": 4, "temperature": 0}
    counts = []
    for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        usage = client.chat.completions.create(**ask, **more).usage
        assert usage is not None
        counts.append(usage.prompt_tokens)
    assert counts[1] > counts[0] == counts[2]


WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORCED: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Forecast.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in FORCED}


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    config = (
        f'[model]\npath = "{smollm2()}"\nchat_template = "{TEMPLATES / "hermes.jinja"}"\nserved_names = ["smollm2"]\n'
    )
    with running(
        "--prefill", "1", "--decode", "1", "--max-model-len", "2048", "--kv-memory", "64MiB", config=config
    ) as cluster:
        yield from _client(cluster)


def test_a_real_model_calls_what_it_has_to(smollm: openai.OpenAI) -> None:
    """Whatever it would have said: a call, with arguments that its schema allows, whole and streamed."""
    for seed, question in enumerate(QUESTIONS):
        ask: dict[str, Any] = {
            "model": "smollm2", "messages": [{"role": "user", "content": question}], "tools": FORCED, "seed": seed,
            "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200, "temperature": 0.8,
        }  # fmt: skip
        choice = smollm.chat.completions.create(**ask).choices[0]
        assert choice.finish_reason == "tool_calls", choice
        assert choice.message.tool_calls, choice
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))
        if seed < 3:
            pieces = [
                piece.function.arguments or ""
                for chunk in smollm.chat.completions.create(**ask, stream=True)
                for delta in chunk.choices
                for piece in delta.delta.tool_calls or ()
                if piece.function
            ]
            assert "".join(pieces) == call.function.arguments


def test_a_named_function_is_called_and_a_schema_beside_tools_is_refused(smollm: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "smollm2", "messages": USER, "tools": FORCED, "max_tokens": 160, "temperature": 0}
    named: Any = {"type": "function", "function": {"name": "get_time"}}
    choice = smollm.chat.completions.create(**ask, tool_choice=named).choices[0]
    assert choice.message.tool_calls
    functions = [call.function for call in choice.message.tool_calls if call.type == "function"]
    assert {function.name for function in functions} == {"get_time"}
    assert all(json.loads(function.arguments) == {} for function in functions)
    assert choice.finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="response_format cannot be combined with these tools"):
        smollm.chat.completions.create(**ask, tool_choice="required", response_format={"type": "json_object"})


FLAT: Any = [{"type": "function", **one["function"]} for one in FORCED]


def _joined(events: list[Any], kind: str) -> str:
    return "".join(event.delta for event in events if event.type == f"response.{kind}.delta")


def test_an_agent_of_two_turns_over_responses(smollm: openai.OpenAI) -> None:
    """Call, result, answer: whole and streamed, continued by id and by hand."""
    ask: dict[str, Any] = {
        "model": "smollm2", "tools": FLAT, "parallel_tool_calls": False, "max_output_tokens": 200, "temperature": 0
    }  # fmt: skip
    forced = {**ask, "input": "How is the weather in Oslo?", "tool_choice": "required"}
    first = smollm.responses.create(**forced)
    assert (first.status, [item.type for item in first.output]) == ("completed", ["function_call"])
    call: Any = first.output[0]
    jsonschema_rs.validate(SCHEMAS[call.name], json.loads(call.arguments))
    with smollm.responses.stream(**forced) as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == ""
    assert _joined(events, "function_call_arguments") == call.arguments

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Snow, -3 degrees"}
    then: dict[str, Any] = {**ask, "tool_choice": "none", "max_output_tokens": 24}
    second = smollm.responses.create(**then, input=[result], previous_response_id=first.id)  # type: ignore[list-item]
    assert [item.type for item in second.output] == ["message"]
    assert second.output_text
    by_hand: Any = [{"role": "user", "content": forced["input"]}, *first.output, result]
    streamed = list(smollm.responses.create(**then, input=by_hand, stream=True))
    assert _joined(streamed, "output_text") == second.output_text
    last: Any = streamed[-1]
    assert second.usage is not None
    assert last.response.usage.input_tokens == second.usage.input_tokens


def test_a_regex_of_a_custom_tool_holds(smollm: openai.OpenAI) -> None:
    pattern = r"[0-9]{1,3} [+*] [0-9]{1,3}\n"
    tool: Any = {
        "type": "custom", "name": "calculate", "description": "Calculates a term.",
        "format": {"type": "grammar", "syntax": "regex", "definition": pattern},
    }  # fmt: skip
    ask: dict[str, Any] = {
        "model": "smollm2", "input": "How much is 6 times 7?", "tools": [tool], "tool_choice": "required",
        "parallel_tool_calls": False, "max_output_tokens": 100, "temperature": 0,
    }  # fmt: skip
    call: Any = smollm.responses.create(**ask).output[0]
    assert re.fullmatch(pattern, call.input)
    assert _joined(list(smollm.responses.create(**ask, stream=True)), "custom_tool_call_input") == call.input

    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": pattern}}
    tools: Any = [{"type": "custom", "custom": {"name": "calculate", "format": form}}]
    chat: Any = smollm.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": ask["input"]}],
        tools=tools,
        tool_choice={"type": "custom", "custom": {"name": "calculate"}},
        max_tokens=100,
        temperature=0,
    )
    (called,) = chat.choices[0].message.tool_calls
    assert re.fullmatch(pattern, called.custom.input)


class GetWeather(BaseModel):
    """Forecast."""

    city: Literal["Oslo", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]


def test_arguments_are_parsed_by_the_client(smollm: openai.OpenAI) -> None:
    parsed = smollm.responses.parse(
        model="smollm2",
        input="How is the weather in Oslo for 3 days?",
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
        temperature=0,
    )
    calls: list[Any] = [item for item in parsed.output if item.type == "function_call"]
    assert [type(call.parsed_arguments) for call in calls] == [GetWeather]


def test_reasoning_over_responses(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tools", "input": "Tell me a story.", "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**ask)
    thought: Any = whole.output[0]
    assert (thought.type, thought.status, whole.output_text) == ("reasoning", "incomplete", "")
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 24
    events = list(client.responses.create(**ask, stream=True))
    assert _joined(events, "reasoning_text") == thought.content[0].text
    said = client.responses.create(**ask, reasoning={"effort": "none"})
    assert [item.type for item in said.output] == ["message"]


def test_a_schema_holds_for_what_stands_behind_the_thoughts(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
    ask: dict[str, Any] = {"model": "tools", "messages": USER, "max_tokens": 60, "temperature": 0}
    message = client.chat.completions.create(**ask, response_format=wanted, reasoning_effort="none").choices[0].message
    assert json.loads(message.content or "") in ("yes", "no")
    thinking = client.chat.completions.create(**ask, response_format=wanted).choices[0].message
    assert (thinking.model_extra or {})["reasoning_content"].strip()
    assert not thinking.content or json.loads(thinking.content) in ("yes", "no")
