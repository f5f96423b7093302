"""Tools of a model with a chat template that knows none: they are written into the texts of its messages."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.core.output_format_names import ToolFormatName
from tests.integration.router.house import RouterHarness, builder
from tests.integration.router.scripted_worker import Script
from tests.integration.router.tool_models import Said, tool_model

PLAIN = "{% for one in messages %}<|{{ one.role }}|>{{ one.content }}\n{% endfor %}<|assistant|>"
SMOLLM2 = f"{{# named SmolLM, trained by Hugging Face #}}{PLAIN}"
USER: Any = [{"role": "user", "content": "How is the weather?"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
AGAIN: Any = [
    {"role": "system", "content": "Be brief."}, *USER,
    {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "It rains."},
    {"role": "tool", "tool_call_id": "call_2", "content": "It pours."},
    {"role": "user", "content": "So?"},
]  # fmt: skip


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RouterHarness, Said]]:
    model = tool_model(tmp_path_factory.mktemp("model"))
    (Path(model.model_dir) / "chat_template.jinja").write_text(SMOLLM2)
    said = Said(model)
    with builder(tmp_path_factory.mktemp("router")) as make:
        house = make(models=(model,), script=Script(answer=said.answer))
        house.wait_ready()
        yield house, said


def asked(serving: tuple[RouterHarness, Said], **more: Any) -> tuple[dict[str, Any], str]:
    """The answer's first choice, and the prompt that the worker got."""
    house, said = serving
    body = {"model": "tools", "messages": USER, "max_tokens": 100, **more}
    answer = httpx.post(f"{house.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0], said.prompt(house.workers["prefill-0"].submitted[-1])


def test_tools_are_described_and_calls_of_the_format_read(serving: tuple[RouterHarness, Said]) -> None:
    serving[1].texts = ['<tool_call>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_call>']
    choice, prompt = asked(serving, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == CALL["function"]
    system, user = prompt.removeprefix("<|system|>").split("\n<|user|>")
    assert user == "How is the weather?\n<|assistant|>"
    described = system.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in described] == [tool["function"] for tool in TOOLS]
    assert '<tool_call>[{"name": "function_name", "arguments": {"parameter": "value"}}]</tool_call>' in system


def test_earlier_calls_and_results_are_written(serving: tuple[RouterHarness, Said]) -> None:
    serving[1].texts = ["It rains."]
    choice, prompt = asked(serving, tools=TOOLS, messages=AGAIN)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "It rains.")
    assert prompt.startswith("<|system|>Be brief.\n\nYou may call functions.")
    call = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    results = "".join(f"<tool_response>\n{text}\n</tool_response>\n" for text in ("It rains.", "It pours."))
    assert prompt.endswith(
        f"<|assistant|>Wait.<tool_call>[{call}, {call}]</tool_call>\n<|user|>{results}So?\n<|assistant|>"
    )


def test_without_tools_only_what_happened_is_written(serving: tuple[RouterHarness, Said]) -> None:
    """`tool_choice` "none" leaves tools out of the prompt, as with other templates."""
    serving[1].texts = ["It rains."]
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert asked(serving, messages=AGAIN, **more)[1].startswith("<|system|>Be brief.\n<|user|>How")
    assert asked(serving)[1] == "<|user|>How is the weather?\n<|assistant|>"


def test_the_token_count_is_that_of_the_prompt(serving: tuple[RouterHarness, Said]) -> None:
    house, said = serving
    said.texts = ["It rains."]
    tool = TOOLS[0]["function"]
    body = {
        "model": "tools", "max_tokens": 9, "messages": [{"role": "user", "content": "How is the weather?"}],
        "tools": [{"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}],
    }  # fmt: skip
    short = {key: value for key, value in body.items() if key != "max_tokens"}
    counted = httpx.post(f"{house.url}/v1/messages/count_tokens", json=short, timeout=30)
    answered = httpx.post(f"{house.url}/v1/messages", json=body, timeout=30)
    assert counted.json()["input_tokens"] == answered.json()["usage"]["input_tokens"] > 50


def test_a_format_that_is_no_json_needs_a_template(tmp_path: Path) -> None:
    model = tool_model(tmp_path)
    (Path(model.model_dir) / "chat_template.jinja").write_text(PLAIN)
    with builder(tmp_path) as make:
        house = make(models=(dataclasses.replace(model, tool_format=ToolFormatName.PYTHONIC),))
        house.wait_ready()
        body = {"model": "tools", "messages": USER, "tools": TOOLS}
        refused = httpx.post(f"{house.url}/v1/chat/completions", json=body, timeout=30)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert "its chat template writes none, and its format is not JSON" in error["message"]
    assert error["param"] == "tools"
