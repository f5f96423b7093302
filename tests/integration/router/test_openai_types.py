"""Test answers and stored objects against the types of the `openai` package."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch, Completion, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.integration.router.house import RouterHarness
from tools.waiting import wait_for

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


ASK: dict[str, Any] = {"model": "tiny", "input": "Say something.", "max_output_tokens": 6, "temperature": 0}
TOLD_AGAIN: dict[str, Any] = {
    "instructions": "Be brief.",
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "top_p": 0.5,
    "user": "u",
}
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[ResponseItem] = TypeAdapter(ResponseItem)
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "Hi"}}


def get(house: RouterHarness, path: str, **query: Any) -> Any:
    answer = httpx.get(f"{house.url}{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def page(listed: Any) -> list[Any]:
    """The entries of a list, which names its ends."""
    assert (listed["object"], type(listed["has_more"])) == ("list", bool)
    ends = [listed["data"][0]["id"], listed["data"][-1]["id"]]
    assert [listed["first_id"], listed["last_id"]] == ends
    entries: list[Any] = listed["data"]
    return entries


def valid(kind: type[BaseModel], raw: Any) -> Any:
    """The object; ValidationError for a field that is missing or of another type."""
    return kind.model_validate_json(json.dumps(raw), strict=True)


@pytest.mark.parametrize(
    "more", [{}, TOLD_AGAIN, {"service_tier": "auto"}, {"store": False}], ids=lambda more: str(len(more))
)
def test_responses(keeping: RouterHarness, more: dict[str, Any]) -> None:
    sent = httpx.post(f"{keeping.url}/v1/responses", json=ASK | more)
    assert sent.status_code == 200, sent.text
    answer = valid(Response, sent.json())
    assert {name: sent.json()[name] for name in more} == more | (
        {"service_tier": "default"} if "service_tier" in more else {}
    )
    if answer.store is False:
        return
    assert valid(Response, get(keeping, f"/v1/responses/{answer.id}")) == answer
    for item in page(get(keeping, f"/v1/responses/{answer.id}/input_items")):
        assert ITEM.validate_json(json.dumps(item), strict=True).type == "message"
    deleted = httpx.delete(f"{keeping.url}/v1/responses/{answer.id}").json()
    assert deleted == {"id": answer.id, "object": "response", "deleted": True}


def test_events_of_a_response(keeping: RouterHarness) -> None:
    text = httpx.post(f"{keeping.url}/v1/responses", json={**ASK, "stream": True}).text
    assert "[DONE]" not in text
    kinds = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"
        kinds.append(event.type)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")


def test_files_and_batches(keeping: RouterHarness) -> None:
    data = json.dumps(LINE).encode()
    sent = httpx.post(f"{keeping.url}/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", data)})
    file = valid(FileObject, sent.json())
    assert valid(FileObject, get(keeping, f"/v1/files/{file.id}")) == file
    assert file.id in [valid(FileObject, each).id for each in page(get(keeping, "/v1/files", limit=2))]
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = valid(Batch, httpx.post(f"{keeping.url}/v1/batches", json=body).json())
    assert valid(Batch, get(keeping, f"/v1/batches/{batch.id}")).input_file_id == file.id
    assert batch.id in [valid(Batch, each).id for each in page(get(keeping, "/v1/batches", limit=2))]
    wait_for(lambda: get(keeping, f"/v1/batches/{batch.id}")["status"] == "completed")
    over = valid(Batch, get(keeping, f"/v1/batches/{batch.id}"))
    assert valid(FileObject, get(keeping, f"/v1/files/{over.output_file_id}")).purpose == "batch_output"
    assert valid(FileDeleted, httpx.delete(f"{keeping.url}/v1/files/{file.id}").json()).deleted


def test_the_client_is_told_that_there_are_no_embeddings(keeping: RouterHarness) -> None:
    with openai.OpenAI(base_url=f"{keeping.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="embeddings") as caught:
            client.embeddings.create(model="tiny", input="Hi")
        assert caught.value.code == "unsupported_endpoint"
