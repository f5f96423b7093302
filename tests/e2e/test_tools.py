"""Tools and reasoning on a real cluster: the bundled model with a chat template that has both."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.router.tool_models import TEMPLATES
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, running

USER: Any = [{"role": "user", "content": "Tell me a story."}]
TOOLS: Any = [{"type": "function", "function": {"name": "tell", "parameters": {"type": "object", "properties": {}}}}]
OPENS = "{%- if add_generation_prompt and enable_thinking is not defined %}{{ '<think>\\n' }}{% endif %}"
"""The prompt begins the reasoning, as those of DeepSeek R1 do."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template: Path = tmp_path_factory.mktemp("tools") / "template.jinja"
    template.write_text((TEMPLATES / "hermes.jinja").read_text().rstrip() + OPENS)
    config = f'[model]\npath = "{MODEL}"\nchat_template = "{template}"\nserved_names = ["tools"]\ndtype = "float32"\n'
    with running("--prefill", "1", "--decode", "1", config=config) as cluster:
        yield from _client(cluster)


def _client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.api}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_what_the_prompt_began_is_reasoning_and_else_content(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tools", "messages": USER, "tools": TOOLS, "max_tokens": 24, "temperature": 0}
    thought = client.chat.completions.create(**ask)
    message, usage = thought.choices[0].message, thought.usage
    fields: Any = message.model_extra
    assert (message.content, message.tool_calls) == ("", None)
    assert fields["reasoning_content"].strip()
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 24

    said = client.chat.completions.create(**ask, reasoning_effort="none")
    assert said.choices[0].message.content
    assert "reasoning_content" not in (said.choices[0].message.model_extra or {})


def test_a_stream_has_the_same_reasoning(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tools", "messages": USER, "tools": TOOLS, "max_tokens": 24, "temperature": 0}
    whole: Any = client.chat.completions.create(**ask).choices[0].message.model_extra
    pieces = [
        (choice.delta.model_extra or {}).get("reasoning_content", "")
        for chunk in client.chat.completions.create(**ask, stream=True)
        for choice in chunk.choices
    ]
    assert "".join(pieces) == whole["reasoning_content"]
    assert len([piece for piece in pieces if piece]) > 4


def test_tools_are_in_the_prompt_unless_none_may_be_called(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tools", "messages": USER, "max_tokens": 4, "temperature": 0}
    counts = []
    for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        usage = client.chat.completions.create(**ask, **more).usage
        assert usage is not None
        counts.append(usage.prompt_tokens)
    assert counts[1] > counts[0] == counts[2]
