"""Pydantic AI: an agent with a tool, its kinds of output, streams."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.clients.program import CLUSTER, KEY, SCRIPTED, Forecast, Report, get_weather, run, was_asked
from tests.e2e.clients.scenes import JSON_AT_ONCE, REPORT_AS_JSON, REPORT_BY_TOOL, SAID, TWO_TOWNS, WEATHER

scripted = OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=f"{SCRIPTED}/v1", api_key=KEY))
real = OpenAIChatModel("tools", provider=OpenAIProvider(base_url=f"{CLUSTER}/v1", api_key=KEY))
REPORTED = Report(city="Zürich", degrees=21)


def agent_of(model: Any, output: Any = str) -> Agent[None, Any]:
    return Agent(model, output_type=output, tools=[get_weather], instructions="Be brief.", retries=0)


async def tool() -> None:
    done = await agent_of(scripted).run(WEATHER.question)
    assert done.output == SAID, done
    was_asked(("Zürich", 2))


async def tool_output() -> None:
    made = await Agent(real, output_type=ToolOutput(Forecast), retries=0).run("Forecast.")
    assert isinstance(made.output, Forecast), made
    done = await agent_of(scripted, Report).run(REPORT_BY_TOOL.question)
    assert done.output == REPORTED, done
    was_asked(("Zürich", 2))


async def native_output() -> None:
    for strict in (None, True):
        made = await Agent(real, output_type=NativeOutput(Forecast, strict=strict), retries=0).run("Forecast.")
        assert isinstance(made.output, Forecast), made


async def native_output_beside_tools() -> None:
    done = await agent_of(scripted, NativeOutput(Report)).run(REPORT_AS_JSON.question)
    assert done.output == REPORTED, done
    was_asked(("Zürich", 2))


async def prompted_output() -> None:
    done = await Agent(scripted, output_type=PromptedOutput(Report), retries=0).run(JSON_AT_ONCE.question)
    assert done.output == REPORTED, done


async def stream() -> None:
    async with agent_of(scripted).run_stream(TWO_TOWNS.question) as answer:
        said = [text async for text in answer.stream_text(delta=True)]
    assert "".join(said) == SAID, said
    was_asked(("Zürich", 1), ("Oslo", 1))


async def stream_of_output() -> None:
    async with Agent(real, output_type=NativeOutput(Forecast), retries=0).run_stream("Forecast.") as answer:
        assert isinstance(await answer.get_output(), Forecast)


if __name__ == "__main__":
    run(
        tool, tool_output, native_output, native_output_beside_tools, prompted_output, stream, stream_of_output,
    )  # fmt: skip
