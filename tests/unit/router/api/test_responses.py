"""Requests to the Responses API: what is taken, what is refused by name, and how it becomes a conversation."""

import json
from typing import Any

import pytest
from openai.types.responses import Response
from pydantic import ValidationError

from tandem.core.errors import UnsupportedParameterError, WorkerLostError
from tandem.core.state_enums import FinishReason
from tandem.router.api.http.responses.conversation import items_of, messages_of
from tandem.router.api.http.responses.objects import Draft, EventWriter
from tandem.router.api.http.responses.schemas import ResponseRequest, without_neutral
from tandem.router.serving.response_stream import TokenUsage

BODY: dict[str, Any] = {"model": "m", "input": "Hi"}
USAGE = TokenUsage(prompt_tokens=20, completion_tokens=5, cached_tokens=16)


def parsed(**changes: Any) -> ResponseRequest:
    return ResponseRequest.model_validate(without_neutral({**BODY, **changes}))


@pytest.mark.parametrize(
    "neutral",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "background": False, "include": []},
        {"text": {"format": {"type": "text"}}, "truncation": "disabled", "top_logprobs": 0, "reasoning": None},
        {"text": {"format": {"type": "text"}, "verbosity": None}, "reasoning": {"effort": None, "summary": None}},
        {"prompt": None, "conversation": None, "max_tool_calls": None, "prompt_cache_retention": "in_memory"},
        {
            "user": "u",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "service_tier": "auto",
            "metadata": {"a": "b"},
        },
    ],
)
def test_what_asks_for_nothing_is_taken(neutral: dict[str, Any]) -> None:
    assert parsed(**neutral).input == "Hi"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "required"),
        ("background", True),
        ("include", ["message.output_text.logprobs"]),
        ("conversation", "conv_1"),
        ("reasoning", {"effort": "high"}),
        ("text.verbosity", {"verbosity": "low"}),
        ("truncation", "auto"),
        ("top_logprobs", 3),
        ("prompt", {"id": "pmpt_1"}),
        ("moderation", {"model": "x"}),
    ],
)
def test_what_is_not_there_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameterError, match=name) as caught:
        parsed(**{name.partition(".")[0]: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "function_call_output", "call_id": "c", "output": "x"}, "input[0].type"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].type"),
        ({"id": "msg_1"}, "input[0].id"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input[0].content[0].type"),
        ({"role": "assistant", "phase": "commentary", "content": "a"}, "input[0].phase"),
        (
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "x"}}],
            },
            "input[0].content[0].prompt_cache_breakpoint",
        ),
    ],
)
def test_items_that_are_not_there_are_refused_by_name(item: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameterError, match="not supported") as caught:
        parsed(input=[item])
    assert caught.value.param == param


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": []},
        {"input": 7},
        {"input": [{"role": "tool", "content": "x"}]},
        {"input": [{"role": "user"}]},
        {"input": [{"role": "user", "content": []}]},
        {"metadata": {str(n): "" for n in range(17)}},
        {"metadata": {"k" * 65: ""}},
        {"metadata": {"k": "v" * 513}},
        {"max_output_tokens": "5"},
        {"unknown": 1},
    ],
)
def test_wrong_types(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        parsed(**wrong)


def test_items_become_messages() -> None:
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
    ]
    items = items_of(parsed(input=given).input)
    assert [item["type"] for item in items] == ["message"] * 3
    assert items[2]["id"] == "msg_1"
    assert items[0]["id"] != items[1]["id"]
    assert messages_of(items) == (
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a\na"},
        {"role": "assistant", "content": "b"},
    )
    assert messages_of(items_of("Hi")) == ({"role": "user", "content": "Hi"},)


def reasoning(*texts: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short"}], "content": content} | more


ANSWER = {"role": "assistant", "content": "b"}
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ([USER, reasoning("Hm"), ANSWER], [USER, {**ANSWER, "reasoning_content": "Hm"}]),
        ([reasoning("1", "2"), reasoning("3"), ANSWER, ANSWER], [{**ANSWER, "reasoning_content": "1\n2\n3"}, ANSWER]),
        ([reasoning("Hm"), USER], [{**ANSWER, "content": "", "reasoning_content": "Hm"}, USER]),
        ([USER, reasoning("Hm")], [USER, {**ANSWER, "content": "", "reasoning_content": "Hm"}]),
        ([reasoning(), reasoning(content=None, encrypted_content="x"), ANSWER], [ANSWER]),
        ([reasoning("")], []),
    ],
)
def test_reasoning_is_part_of_the_answer_behind_it(given: list[Any], messages: list[Any]) -> None:
    assert list(messages_of(items_of(parsed(input=given).input))) == messages


def draft(**changes: Any) -> Draft:
    return Draft(id="resp_1", message="msg_1", created_s=5, request=parsed(**changes))


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_objects_are_openai_s(finish: FinishReason) -> None:
    asked = draft(instructions="Be brief.", temperature=0.5, max_output_tokens=5, metadata={"a": "b"})
    body = asked.ended("text", finish, USAGE, 9, is_kept=True)
    response = Response.model_validate(body, strict=True)
    assert response.output_text == "text"
    assert response.usage is not None
    assert (response.usage.total_tokens, response.usage.input_tokens_details.cached_tokens) == (25, 16)
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 1.0, 5)
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    if finish is FinishReason.STOP:
        assert (response.status, response.completed_at, response.incomplete_details) == ("completed", 9, None)
    else:
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
    for other in (asked.begun(), asked.failed(WorkerLostError("a worker was lost"))):
        assert Response.model_validate(other, strict=True).output == []


def test_events_in_order() -> None:
    asked = draft()
    writer = EventWriter(asked)
    text = writer.opening() + writer.delta('He said "') + writer.delta("é\n")
    text += writer.closing('He said "é\n', asked.ended('He said "é\n', FinishReason.STOP, USAGE, 9, is_kept=True))
    events = [block.split("\n") for block in text.decode().strip().split("\n\n")]
    data = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
    assert [lines[0].removeprefix("event: ") for lines in events] == [one["type"] for one in data]
    assert [one["sequence_number"] for one in data] == list(range(10))
    assert [one["type"].removeprefix("response.") for one in data] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert data[4]["delta"] + data[5]["delta"] == data[6]["text"] == data[7]["part"]["text"]
