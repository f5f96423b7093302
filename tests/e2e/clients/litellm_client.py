"""LiteLLM: completions with tools and response formats, by its routes for OpenAI, vLLM and Anthropic."""

from __future__ import annotations

from typing import Any

import litellm

from tests.e2e.clients.program import CLUSTER, KEY, SCRIPTED, TIMEOUT_S, Forecast, get_weather, refusal, run, was_asked
from tests.e2e.clients.scenes import SAID, WEATHER

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Forecast.", "parameters": SCHEMA}}
]
HELLO: Any = [{"role": "user", "content": "Hello"}]
OPENAI = {"model": "openai/scripted", "api_base": f"{SCRIPTED}/v1"}
VLLM = {"model": "hosted_vllm/scripted", "api_base": f"{SCRIPTED}/v1"}
ANTHROPIC = {"model": "anthropic/scripted", "api_base": SCRIPTED}


def complete(**ask: Any) -> Any:
    return litellm.completion(api_key=KEY, num_retries=0, timeout=TIMEOUT_S, max_tokens=400, **ask)


def _loop(route: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": WEATHER.question}]
    message = complete(**route, messages=messages, tools=TOOLS, tool_choice="auto").choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        found = get_weather(**litellm.utils.json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": found})
    was_asked(("Zürich", 2))
    assert complete(**route, messages=messages, tools=TOOLS).choices[0].message.content == SAID


def tools() -> None:
    _loop(OPENAI)


def tools_by_the_route_of_vllm() -> None:
    _loop(VLLM)


def tools_by_the_route_of_anthropic() -> None:
    _loop(ANTHROPIC)


def stream_of_tools() -> None:
    for route in (OPENAI, VLLM, ANTHROPIC):
        pieces = list(
            complete(
                **route, messages=[{"role": "user", "content": WEATHER.question}], tools=TOOLS, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        whole = litellm.stream_chunk_builder(pieces)
        (call,) = whole.choices[0].message.tool_calls
        assert litellm.utils.json.loads(call.function.arguments) == {"city": "Zürich", "days": 2}, call
        assert whole.choices[0].finish_reason == "tool_calls"
        assert whole.usage.completion_tokens > 0


def response_format() -> None:
    ask: Any = {"messages": [{"role": "user", "content": "Forecast."}], "response_format": Forecast}
    for route in ("openai/tools", "hosted_vllm/tools"):
        done = complete(model=route, api_base=f"{CLUSTER}/v1", **ask)
        Forecast.model_validate_json(done.choices[0].message.content)


def forced_tools() -> None:
    tool = {"type": "function", "function": {"name": "tell", "parameters": Forecast.model_json_schema()}}
    ask: Any = {"messages": [{"role": "user", "content": "Forecast."}], "tools": [tool]}
    for route, base in (("openai/tools", f"{CLUSTER}/v1"), ("anthropic/tools", CLUSTER)):
        for choice in ("required", {"type": "function", "function": {"name": "tell"}}):
            done = complete(model=route, api_base=base, tool_choice=choice, parallel_tool_calls=False, **ask)
            (call,) = done.choices[0].message.tool_calls
            Forecast.model_validate_json(call.function.arguments)


def errors() -> None:
    for route, base in (("openai/unknown", f"{SCRIPTED}/v1"), ("anthropic/unknown", SCRIPTED)):
        error = refusal(litellm.NotFoundError, complete, model=route, api_base=base, messages=HELLO)
        assert "unknown" in str(error)


if __name__ == "__main__":
    run(
        tools, tools_by_the_route_of_vllm, tools_by_the_route_of_anthropic, stream_of_tools, response_format,
        forced_tools, errors,
    )  # fmt: skip
