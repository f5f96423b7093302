"""The `anthropic` package: its loop of tools, parsed messages, streams with tools."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import beta_tool

from tests.e2e.clients.program import CLUSTER, KEY, SCRIPTED, TIMEOUT_S, Forecast, get_weather, run, was_asked
from tests.e2e.clients.scenes import SAID, TWO_TOWNS, WEATHER

scripted = anthropic.Anthropic(base_url=SCRIPTED, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
real = anthropic.Anthropic(base_url=CLUSTER, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
TOOL: Any = {
    "name": "get_weather",
    "description": "Forecast the weather of a town.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "cache_control": {"type": "ephemeral"},
}


def messages_of(question: str) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": question}]}]


def tool_runner() -> None:
    runner = scripted.beta.messages.tool_runner(
        model="scripted", max_tokens=400, messages=messages_of(TWO_TOWNS.question), tools=[beta_tool(get_weather)]
    )
    last = runner.until_done()
    assert [block.text for block in last.content if block.type == "text"] == [SAID], last
    was_asked(("Zürich", 1), ("Oslo", 1))


def stream_of_tool_use() -> None:
    with scripted.messages.stream(
        model="scripted", max_tokens=400, messages=messages_of(WEATHER.question), tools=[TOOL],
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "visitor"}, tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    ) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        whole = stream.get_final_message()
    assert {"text", "input_json", "content_block_stop", "message_stop"} <= kinds, kinds
    (used,) = [block for block in whole.content if block.type == "tool_use"]
    assert (used.input, whole.stop_reason) == ({"city": "Zürich", "days": 2}, "tool_use")


def parse() -> None:
    done = real.messages.parse(model="tools", max_tokens=200, messages=messages_of("Forecast."), output_format=Forecast)
    assert isinstance(done.parsed_output, Forecast), done


def forced_tool() -> None:
    tool: Any = {"name": "tell", "input_schema": Forecast.model_json_schema(), "strict": True}
    done = real.messages.create(
        model="tools", max_tokens=200, messages=messages_of("Forecast."), tools=[tool],
        tool_choice={"type": "tool", "name": "tell"},
    )  # fmt: skip
    (used,) = [block for block in done.content if block.type == "tool_use"]
    Forecast.model_validate(used.input)


if __name__ == "__main__":
    run(tool_runner, stream_of_tool_use, parse, forced_tool)
