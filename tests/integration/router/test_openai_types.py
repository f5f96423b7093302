"""Answers are valid, not just readable, as the `openai` package types them: its client itself checks nothing."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.integration.router.house import RouterHarness

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": ["Hi", "Ho"], "max_tokens": 5}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 2, "stop": "e"},
    {"service_tier": "auto"},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]
LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}


def post(house: RouterHarness, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(house.url + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("options", [*OPTIONS, LOGPROBS])
def test_chat(shared: RouterHarness, options: dict[str, Any]) -> None:
    body = CHAT | options
    streamed = events(post(shared, "/v1/chat/completions", body | {"stream": True}))
    assert all(ChatCompletionChunk.model_validate(event, strict=True).object for event in streamed)
    body.pop("stream_options", None)
    whole = ChatCompletion.model_validate(post(shared, "/v1/chat/completions", body).json(), strict=True)
    assert len(whole.choices) == body.get("n", 1)


@pytest.mark.parametrize("options", [*OPTIONS, {"logprobs": 2}])
def test_completions(shared: RouterHarness, options: dict[str, Any]) -> None:
    body = TEXT | options
    streamed = events(post(shared, "/v1/completions", body | {"stream": True}))
    for event in streamed:  # the package has one type for both; a chunk's choice has no reason to end yet
        reasons = [choice["finish_reason"] or "stop" for choice in event["choices"]]
        ended = [choice | {"finish_reason": why} for choice, why in zip(event["choices"], reasons, strict=True)]
        assert Completion.model_validate(event | {"choices": ended}, strict=True).object == "text_completion"
    body.pop("stream_options", None)
    whole = Completion.model_validate(post(shared, "/v1/completions", body).json(), strict=True)
    assert len(whole.choices) == 2 * body.get("n", 1)


def test_models(shared: RouterHarness) -> None:
    listed = httpx.get(f"{shared.url}/v1/models").json()["data"]
    for model in listed:
        assert Model.model_validate(model, strict=True).id == model["id"]
        assert Model.model_validate(httpx.get(f"{shared.url}/v1/models/{model['id']}").json(), strict=True)
