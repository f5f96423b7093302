"""The `openai` package: parsing and streaming helpers, tools, errors, and optional fields."""

from __future__ import annotations

import json
from typing import Any

import openai
from pydantic import BaseModel

from tests.e2e.clients.program import CLUSTER, KEY, SCRIPTED, TIMEOUT_S, Forecast, get_weather, refusal, run, was_asked
from tests.e2e.clients.scenes import SAID, TWO_TOWNS, WEATHER

scripted = openai.OpenAI(base_url=f"{SCRIPTED}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
real = openai.OpenAI(base_url=f"{CLUSTER}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S)


class GetWeather(BaseModel):
    """Forecast the weather of a town."""

    city: str
    days: int


TOOL = openai.pydantic_function_tool(GetWeather, name="get_weather")


def parse() -> None:
    done = real.chat.completions.parse(
        model="tools", messages=[{"role": "user", "content": "Forecast."}], response_format=Forecast
    )
    assert isinstance(done.choices[0].message.parsed, Forecast), done


def parse_of_strict_tools() -> None:
    done = real.chat.completions.parse(
        model="tools", messages=[{"role": "user", "content": "Forecast."}], tool_choice="required",
        tools=[openai.pydantic_function_tool(Forecast, name="tell")], parallel_tool_calls=False,
    )  # fmt: skip
    calls = done.choices[0].message.tool_calls
    assert calls, done
    (call,) = calls
    assert isinstance(call.function.parsed_arguments, Forecast), done


def stream_of_parsed_content() -> None:
    asked: Any = [{"role": "user", "content": "Forecast."}]
    with real.chat.completions.stream(model="tools", messages=asked, response_format=Forecast) as stream:
        kinds = [event.type for event in stream]
        done = stream.get_final_completion()
    assert isinstance(done.choices[0].message.parsed, Forecast), done
    assert {"content.delta", "content.done"} <= set(kinds), kinds


def tool_loop() -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief.", "name": "operator"},
        {"role": "user", "content": [{"type": "text", "text": TWO_TOWNS.question}], "name": "visitor"},
    ]
    first = scripted.chat.completions.parse(model="scripted", messages=messages, tools=[TOOL])
    message = first.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        asked = call.function.parsed_arguments
        assert isinstance(asked, GetWeather)
        found = get_weather(asked.city, asked.days)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": found}]})
    was_asked(("Zürich", 1), ("Oslo", 1))
    second = scripted.chat.completions.create(model="scripted", messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == SAID, second


def stream_of_tool_calls() -> None:
    asked: Any = [{"role": "user", "content": WEATHER.question}]
    options: Any = {"include_usage": True}
    with scripted.chat.completions.stream(
        model="scripted", messages=asked, tools=[TOOL], stream_options=options
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        whole = stream.get_final_completion()
    assert [(event.name, json.loads(event.arguments)) for event in done] == [
        ("get_weather", {"city": "Zürich", "days": 2})
    ]
    assert whole.usage is not None
    assert whole.choices[0].finish_reason == "tool_calls"


def optional_fields() -> None:
    """Fields that clients send with a value that asks for nothing, and null for everything that may be left out."""
    absent: Any = dict.fromkeys((
        "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens",
        "max_tokens", "metadata", "modalities", "moderation", "n", "parallel_tool_calls", "prediction",
        "presence_penalty", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "response_format",
        "safety_identifier", "seed", "service_tier", "stop", "store", "stream", "stream_options", "temperature",
        "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity", "web_search_options",
    ))  # fmt: skip
    given: Any = {
        "store": False,
        "service_tier": "auto",
        "n": 1,
        "user": "u",
        "metadata": {"run": "1"},
        "logprobs": False,
    }
    for more in (absent, given):
        done = scripted.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": WEATHER.question}], **more
        )
        assert done.choices[0].message.content


def errors() -> None:
    for expected, param, more in (
        (openai.NotFoundError, "model", {"model": "unknown"}),
        (openai.BadRequestError, "temperature", {"temperature": 9}),
        (openai.BadRequestError, "modalities", {"modalities": ["text", "audio"]}),
    ):
        body: Any = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}], **more}
        error = refusal(expected, scripted.chat.completions.create, **body)
        assert (error.param, error.type) == (param, "invalid_request_error"), error
        assert error.code


async def asynchronous_streams() -> None:
    asked: Any = [{"role": "user", "content": WEATHER.question}]
    async with openai.AsyncOpenAI(base_url=f"{SCRIPTED}/v1", api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model="scripted", messages=asked, tools=[TOOL], stream=True)
        finishes = [choice.finish_reason async for chunk in stream for choice in chunk.choices]
    assert finishes[-1] == "tool_calls", finishes


if __name__ == "__main__":
    run(
        parse, parse_of_strict_tools, stream_of_parsed_content, tool_loop, stream_of_tool_calls, optional_fields,
        errors, asynchronous_streams,
    )  # fmt: skip
