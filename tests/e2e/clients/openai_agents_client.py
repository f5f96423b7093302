"""OpenAI's Agents SDK over chat completions: tools, typed outputs, hand-overs, streams."""

from __future__ import annotations

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.e2e.clients.program import CLUSTER, KEY, SCRIPTED, Forecast, Report, get_weather, run, was_asked
from tests.e2e.clients.scenes import HAND_OVER, REPORT_AS_JSON, SAID, TWO_TOWNS, WEATHER

set_tracing_disabled(True)
look = function_tool(get_weather)


def scripted() -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel("scripted", AsyncOpenAI(base_url=f"{SCRIPTED}/v1", api_key=KEY, max_retries=0))


def real() -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel("tools", AsyncOpenAI(base_url=f"{CLUSTER}/v1", api_key=KEY, max_retries=0))


async def tools() -> None:
    agent = Agent("visitor", instructions="Be brief.", model=scripted(), tools=[look])
    done = await Runner.run(agent, TWO_TOWNS.question)
    assert done.final_output == SAID
    was_asked(("Zürich", 1), ("Oslo", 1))


async def stream() -> None:
    agent = Agent("visitor", model=scripted(), tools=[look], model_settings=ModelSettings(include_usage=True))
    done = Runner.run_streamed(agent, WEATHER.question)
    kinds = {event.type async for event in done.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
    assert done.final_output == SAID
    assert done.context_wrapper.usage.output_tokens > 0
    was_asked(("Zürich", 2))


async def output_type() -> None:
    done = await Runner.run(Agent("forecaster", model=real(), output_type=Forecast), "Forecast.")
    assert isinstance(done.final_output, Forecast), done


async def output_type_beside_tools() -> None:
    agent = Agent("reporter", model=scripted(), tools=[look], output_type=Report)
    done = await Runner.run(agent, REPORT_AS_JSON.question)
    assert done.final_output == Report(city="Zürich", degrees=21), done
    was_asked(("Zürich", 2))


async def handoffs() -> None:
    forecaster = Agent("forecaster", model=scripted(), tools=[look])
    desk = Agent("desk", model=scripted(), handoffs=[forecaster])
    done = await Runner.run(desk, HAND_OVER.question)
    assert (done.final_output, done.last_agent.name) == (SAID, "forecaster")
    was_asked(("Zürich", 2))


async def forced_tools() -> None:
    told: list[Forecast] = []

    def tell(forecast: Forecast) -> str:
        """Tell a forecast."""
        told.append(forecast)
        return "told"

    for choice in ("required", "tell"):
        settings = ModelSettings(tool_choice=choice, parallel_tool_calls=False, max_tokens=400)
        agent = Agent(
            "forecaster", model=real(), tools=[function_tool(tell)], model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        )  # fmt: skip
        assert (await Runner.run(agent, "Forecast.")).final_output == "told"
    assert len(told) == 2


if __name__ == "__main__":
    run(tools, stream, output_type, output_type_beside_tools, handoffs, forced_tools)
