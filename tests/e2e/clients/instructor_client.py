"""Instructor: models as answers in its modes, whole and in parts."""

from __future__ import annotations

import anthropic
import instructor
import openai

from tests.e2e.clients.program import CLUSTER, KEY, SCRIPTED, Forecast, Report, run
from tests.e2e.clients.scenes import JSON_AT_ONCE

scripted = openai.OpenAI(base_url=f"{SCRIPTED}/v1", api_key=KEY, max_retries=0)
real = openai.OpenAI(base_url=f"{CLUSTER}/v1", api_key=KEY, max_retries=0)


def _made(mode: instructor.Mode) -> None:
    client = instructor.from_openai(real, mode=mode)
    made = client.chat.completions.create(
        model="tools", response_model=Forecast, messages=[{"role": "user", "content": "Forecast."}], max_retries=1
    )
    assert isinstance(made, Forecast), made


def tools() -> None:
    _made(instructor.Mode.TOOLS)


def strict_tools() -> None:
    _made(instructor.Mode.TOOLS_STRICT)


def json_schema() -> None:
    _made(instructor.Mode.JSON_SCHEMA)


def json() -> None:
    client = instructor.from_openai(scripted, mode=instructor.Mode.JSON)
    made = client.chat.completions.create(
        model="scripted", response_model=Report, messages=[{"role": "user", "content": JSON_AT_ONCE.question}]
    )
    assert made.model_dump() == {"city": "Zürich", "degrees": 21}


def stream_of_partial_models() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(real, mode=mode)
        parts = list(
            client.chat.completions.create_partial(
                model="tools", response_model=Forecast, messages=[{"role": "user", "content": "Forecast."}]
            )
        )
        assert len(parts) > 1, parts
        Forecast.model_validate(parts[-1].model_dump())


def anthropic_tools() -> None:
    claude = anthropic.Anthropic(base_url=CLUSTER, api_key=KEY, max_retries=0)
    client = instructor.from_anthropic(claude, mode=instructor.Mode.ANTHROPIC_TOOLS)
    made = client.messages.create(
        model="tools", max_tokens=200, response_model=Forecast, messages=[{"role": "user", "content": "Forecast."}]
    )
    assert isinstance(made, Forecast), made


if __name__ == "__main__":
    run(tools, strict_tools, json_schema, json, stream_of_partial_models, anthropic_tools)
