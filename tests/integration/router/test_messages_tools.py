"""Tools and thoughts in /v1/messages: the prompt that they make, and answers taken apart for Anthropic's client."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest

from tandem.core.output_format_names import ToolFormatName
from tandem.router.tokenization.tokenizer import Tokenizer
from tests.integration.router.house import MODEL, TINY, RouterHarness, builder
from tests.integration.router.messages import assert_error
from tests.integration.router.scripted_worker import Script
from tools.made_up_worker import EOS

TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool.function.name }} {{ tool.function.parameters | tojson }}]{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content or '' }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
HELLO: Any = {"role": "user", "content": "What is the weather?"}
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Looks outside.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}},
}
WAIT: dict[str, Any] = {"name": "wait", "input_schema": {"type": "object", "properties": {}}}
ASK: dict[str, Any] = {"model": "tiny", "messages": [HELLO], "max_tokens": 200, "tools": [LOOK, WAIT]}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
ARGUMENTS = '{"at": "the sky ✓", "n": 2}'
CALLS = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>' + (
    '\n<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)
ANSWER = f"<think>\nLet me see.\n</think>\n\nI look.\n{CALLS}"


def written(text: str) -> list[int]:
    return [*Tokenizer.load(MODEL).encode_now(text, add_special_tokens=False), EOS]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterHarness]:
    """A router whose model writes ANSWER to everything."""
    folder = tmp_path_factory.mktemp("router")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    tokens = written(ANSWER)
    model = replace(TINY, chat_template=str(template), tool_format=ToolFormatName.HERMES)
    with builder(folder) as make:
        house = make(models=(model,), script=Script(answer=lambda submit, choice: tokens[: submit.sampling.max_tokens]))
        house.wait_ready()
        yield house


@pytest.fixture
def client(house: RouterHarness) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=house.url, api_key="none", max_retries=0) as client:
        yield client


def prompt_of(house: RouterHarness) -> str:
    return Tokenizer.load(MODEL).decode_all(list(house.workers["prefill-0"].submitted[-1].prompt))


def blocks(message: anthropic.types.Message) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.to_dict().items() if name != "id"} for block in message.content]


def test_an_answer_is_taken_apart(client: anthropic.Anthropic, house: RouterHarness) -> None:
    whole = client.messages.create(**ASK, thinking=THINKING)
    assert whole.stop_reason == "tool_use"
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    raw: Any = whole.to_dict()["content"]
    thought, text, *uses = raw
    assert (thought["thinking"], text["text"]) == ("Let me see.", "I look.")
    assert thought["signature"]
    assert [(use["name"], use["input"]) for use in uses] == [("look", json.loads(ARGUMENTS)), ("wait", {})]
    assert len({use["id"] for use in uses}) == 2
    assert "[tool look {" in prompt_of(house)


def test_the_stream_says_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK, thinking=THINKING)
    with client.messages.stream(**ASK, thinking=THINKING) as stream:
        events = list(stream)
        last = stream.get_final_message()
    assert blocks(last) == blocks(whole)
    assert (last.stop_reason, last.usage) == (whole.stop_reason, whole.usage)
    starts = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    raw = "".join(event.partial_json for event in events if event.type == "input_json")
    assert raw == ARGUMENTS + "{}"


@pytest.mark.parametrize("is_stream", [True, False])
def test_thoughts_that_are_omitted_come_back_in_their_signature(
    client: anthropic.Anthropic, house: RouterHarness, is_stream: bool
) -> None:
    hidden: Any = {"type": "adaptive", "display": "omitted"}
    if is_stream:
        with client.messages.stream(**ASK, thinking=hidden) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**ASK, thinking=hidden)
    first = answer.content[0]
    assert first.type == "thinking"
    assert first.thinking == ""
    said: Any = {"role": "assistant", "content": [block.to_dict() for block in answer.content]}
    client.messages.create(**{**ASK, "messages": [HELLO, said, HELLO]})
    assert "<think>Let me see.</think>" in prompt_of(house)


def test_calls_and_results_are_in_the_next_prompt(client: anthropic.Anthropic, house: RouterHarness) -> None:
    answer = client.messages.create(**ASK)
    said: Any = {"role": "assistant", "content": [block.to_dict() for block in answer.content]}
    uses = [block for block in answer.content if block.type == "tool_use"]
    results: Any = [
        {"type": "tool_result", "tool_use_id": uses[0].id, "content": [{"type": "text", "text": "blue"}]},
        {"type": "tool_result", "tool_use_id": uses[1].id, "content": "too late", "is_error": True},
        {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
    ]
    asked: Any = {**ASK, "messages": [HELLO, said, {"role": "user", "content": results}]}
    usage = client.messages.create(**asked).usage
    prompt = prompt_of(house)
    assert '<tool_call>{"name": "look", "arguments": {"at": "the sky ✓", "n": 2}}</tool_call>' in prompt
    assert "[tool]blue[tool]Error: too late[user]So?[assistant]" in prompt
    counted = client.messages.count_tokens(**{name: asked[name] for name in ("model", "messages", "tools")})
    assert counted.input_tokens == usage.input_tokens


@pytest.mark.parametrize(
    ("more", "thinks"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": THINKING}, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, True),
    ],
)
def test_thinking_is_a_variable_of_the_template(
    client: anthropic.Anthropic, house: RouterHarness, more: dict[str, Any], thinks: bool
) -> None:
    usage = client.messages.create(**ASK, **more).usage
    assert prompt_of(house).endswith("[assistant]" if thinks else "[assistant]<think></think>")
    counted = client.messages.count_tokens(model="tiny", messages=[HELLO], tools=ASK["tools"], **more)
    assert counted.input_tokens == usage.input_tokens


def test_a_choice_of_tools(client: anthropic.Anthropic, house: RouterHarness) -> None:
    none = client.messages.create(**ASK, tool_choice={"type": "none"})
    assert "[tool look" not in prompt_of(house)
    assert all(block.type != "tool_use" for block in none.content)
    assert none.stop_reason == "end_turn"
    one = client.messages.create(**ASK, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content].count("tool_use") == 1


def test_a_call_that_is_cut_keeps_what_is_complete(client: anthropic.Anthropic) -> None:
    begun = len(written(ANSWER[: ANSWER.index('"n": 2')])) - 1
    cut = client.messages.create(**{**ASK, "max_tokens": begun})
    assert cut.stop_reason == "max_tokens"
    uses = [block for block in cut.content if block.type == "tool_use"]
    assert [use.input for use in uses] == [{"at": "the sky ✓"}]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tools": [LOOK, LOOK]}, "two tools are called look"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "tool", "name": "hear"}}, "tool_choice.name is 'hear'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is wrong"),
        ({"tools": [{**WAIT, "input_schema": {"a": "x" * 70_000}}]}, "bytes"),
        ({"tools": [{**WAIT, "defer_loading": True}]}, "tools[0].defer_loading"),
    ],
)
def test_wrong_tools_are_named(house: RouterHarness, more: dict[str, Any], named: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {
            name: value for name, value in {**ASK, **more}.items() if path == "/v1/messages" or name != "max_tokens"
        }
        refused = httpx.post(house.url + path, json=body)
        assert_error(refused, 400, "invalid_request_error")
        assert named in refused.json()["error"]["message"]


def test_a_model_that_calls_no_tools_refuses_them(shared: RouterHarness) -> None:
    refused = httpx.post(f"{shared.url}/v1/messages", json=ASK)
    assert_error(refused, 400, "invalid_request_error")
    assert "this model cannot call tools" in refused.json()["error"]["message"]
    asked = {**ASK, "tools": [], "thinking": {"type": "adaptive"}}
    assert httpx.post(f"{shared.url}/v1/messages", json=asked).status_code == 200
