"""Smolagents: agents that call tools and agents that write code."""

from __future__ import annotations

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from tests.e2e.clients.program import FOUND, KEY, SCRIPTED, get_weather, run, was_asked
from tests.e2e.clients.scenes import CODE, FINAL_ANSWER, SAID

model = OpenAIModel(model_id="scripted", api_base=f"{SCRIPTED}/v1", api_key=KEY)
look = tool(get_weather)


def tool_calling_agent() -> None:
    agent = ToolCallingAgent([look], model, max_steps=3, verbosity_level=0)
    assert agent.run(FINAL_ANSWER.question) == SAID
    was_asked(("Zürich", 2))


def stream_of_tool_calling_agent() -> None:
    agent = ToolCallingAgent([look], model, max_steps=3, verbosity_level=0, stream_outputs=True)
    assert agent.run(FINAL_ANSWER.question) == SAID
    was_asked(("Zürich", 2))


def code_agent() -> None:
    agent = CodeAgent([look], model, max_steps=3, verbosity_level=0)
    assert agent.run(CODE.question) == FOUND
    was_asked(("Zürich", 2))


if __name__ == "__main__":
    run(tool_calling_agent, stream_of_tool_calling_agent, code_agent)
