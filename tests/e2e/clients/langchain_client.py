"""LangChain: structured outputs in all methods, bound tools, streams of calls; by OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.e2e.clients.program import CLUSTER, KEY, SCRIPTED, Forecast, Report, get_weather, run, was_asked
from tests.e2e.clients.scenes import JSON_AT_ONCE, SAID, TWO_TOWNS, WEATHER

scripted = ChatOpenAI(model="scripted", base_url=f"{SCRIPTED}/v1", api_key=KEY, max_retries=0, stream_usage=True)
real = ChatOpenAI(model="tools", base_url=f"{CLUSTER}/v1", api_key=KEY, max_retries=0)
claude = ChatAnthropic(model="scripted", base_url=SCRIPTED, api_key=KEY, max_retries=0, max_tokens=2000)


def structured_output_by_json_schema() -> None:
    for strict in (None, True):
        made = real.with_structured_output(Forecast, method="json_schema", strict=strict).invoke("Forecast.")
        assert isinstance(made, Forecast), made


def structured_output_by_function_calling() -> None:
    for strict in (None, True):
        made = real.with_structured_output(Forecast, method="function_calling", strict=strict).invoke("Forecast.")
        assert isinstance(made, Forecast), made


def structured_output_by_json_mode() -> None:
    made = scripted.with_structured_output(Report, method="json_mode").invoke(JSON_AT_ONCE.question)
    assert made == Report(city="Zürich", degrees=21)


def bound_tools() -> None:
    _loop(scripted)


def anthropic_tools() -> None:
    _loop(claude)


def forced_tools() -> None:
    for choice in ("any", "required", "Forecast", {"type": "function", "function": {"name": "Forecast"}}):
        bound = real.bind_tools([Forecast], tool_choice=choice, strict=True, parallel_tool_calls=False)
        (call,) = bound.invoke("Forecast.").tool_calls
        Forecast.model_validate(call["args"])


def stream_of_tool_call_chunks() -> None:
    _stream(scripted)


def anthropic_stream_of_tool_call_chunks() -> None:
    _stream(claude)


async def asynchronous_stream() -> None:
    pieces = [piece async for piece in scripted.astream([SystemMessage("Be brief."), HumanMessage(WEATHER.question)])]
    assert "Let me see." in "".join(piece.text for piece in pieces)


def _loop(model: BaseChatModel) -> None:
    bound = model.bind_tools([get_weather])
    messages: list[Any] = [SystemMessage("Be brief."), HumanMessage(TWO_TOWNS.question)]
    asked = bound.invoke(messages)
    assert isinstance(asked, AIMessage)
    messages.append(asked)
    for call in asked.tool_calls:
        messages.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
    was_asked(("Zürich", 1), ("Oslo", 1))
    last = bound.invoke(messages)
    assert last.text == SAID, last
    assert last.usage_metadata["output_tokens"] > 0, last


def _stream(model: BaseChatModel) -> None:
    bound = model.bind_tools([get_weather])
    pieces: Iterator[Any] = bound.stream(WEATHER.question)
    whole = AIMessageChunk("")
    fragments = []
    for piece in pieces:
        fragments += [chunk["args"] for chunk in piece.tool_call_chunks if chunk["args"]]
        whole += piece
    assert json.loads("".join(fragments)) == {"city": "Zürich", "days": 2}, fragments
    assert len(fragments) > 2, "arguments come in pieces"
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Zürich", "days": 2})
    assert whole.text.strip() == "Let me see."
    assert whole.usage_metadata["output_tokens"] > 0, whole
    result = ToolMessage("21°, sunny", tool_call_id=call["id"])
    assert bound.invoke([HumanMessage(WEATHER.question), whole, result]).text == SAID


if __name__ == "__main__":
    run(
        structured_output_by_json_schema, structured_output_by_function_calling, structured_output_by_json_mode,
        bound_tools, forced_tools, stream_of_tool_call_chunks, asynchronous_stream, anthropic_tools,
        anthropic_stream_of_tool_call_chunks,
    )  # fmt: skip
