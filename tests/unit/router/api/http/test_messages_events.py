"""Answers of chats as messages: blocks, events, the reason of the end, and errors."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tandem.core.errors import STATUS, InvalidRequestError, TandemError, from_code
from tandem.core.state_enums import FinishReason
from tandem.router.api.http.errors import error_event, error_response
from tandem.router.api.http.messages.events import PING, BlockWriter, MessageWriter, event
from tandem.router.api.http.messages.objects import MessageEnd, content_of, message_object
from tandem.router.serving.choices import ChoiceUpdate
from tandem.router.serving.response_stream import TokenUsage
from tandem.router.tokenization.call_arguments import object_of

USAGE = TokenUsage(prompt_tokens=20, completion_tokens=5, cached_tokens=16)
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
THOUGHT, TEXT = "Let me think.", "It is blue, naïvely ✓."
CALLS = [("t1", "look", '{"at": "the sky", "n": [1, 2]}'), ("t2", "wait", "{}"), ("t3", "stop", "")]


def pieces(size: int) -> Iterable[dict[str, Any]]:
    """The same answer as OpenAI streams it, in pieces of `size` characters."""
    for name, said in (("reasoning_content", THOUGHT), ("content", TEXT)):
        yield from ({name: said[at : at + size]} for at in range(0, len(said), size))
    for index, (id_, name, arguments) in enumerate(CALLS):
        begun = {"index": index, "id": id_, "type": "function", "function": {"name": name, "arguments": ""}}
        yield {"tool_calls": [begun]}
        for at in range(0, len(arguments), size):
            yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + size]}}]}


def events_of(data: bytes) -> list[dict[str, Any]]:
    found = []
    for block in data.decode().strip().split("\n\n"):
        name, line = block.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def accumulated(events: Iterable[dict[str, Any]]) -> Message:
    """The message that the events make, each of a type of Anthropic's client."""
    message: dict[str, Any] = {}
    for one in events:
        EVENT.validate_python(one)
        if one["type"] == "message_start":
            message = one["message"]
        elif one["type"] == "content_block_start":
            message["content"].append({**one["content_block"], "input": ""})
        elif one["type"] == "content_block_delta":
            block = message["content"][one["index"]]
            for name, piece in one["delta"].items():
                if name != "type":
                    name = "input" if name == "partial_json" else name
                    block[name] += piece
        elif one["type"] == "message_delta":
            message |= {**one["delta"], "usage": one["usage"]}
    for block in message["content"]:
        raw = block.pop("input")
        if block["type"] == "tool_use":
            block["input"] = json.loads(raw or "{}")
    return Message.model_validate(message)


@pytest.mark.parametrize("shows_thoughts", [True, False])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_joined_events_are_the_whole_answer(size: int, shows_thoughts: bool) -> None:
    writer = BlockWriter(shows_thoughts=shows_thoughts)
    begun = event("message_start", {"message": message_object("msg_1", "m", [], None, USAGE)})
    events = events_of(begun + b"".join(map(writer.add, pieces(size))) + writer.close())
    whole = message_object("msg_1", "m", content_of(pieces(1000), shows_thoughts=shows_thoughts), None, USAGE)
    streamed = accumulated(events)
    assert streamed == Message.model_validate(whole)
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use", "tool_use", "tool_use"]
    assert streamed.content[0].model_dump()["thinking"] == (THOUGHT if shows_thoughts else "")
    assert streamed.content[2].model_dump()["input"] == {"at": "the sky", "n": [1, 2]}
    assert writer.calls_tools
    raw = "".join(one["delta"].get("partial_json", "") for one in events if one["type"] == "content_block_delta")
    assert raw == "".join(arguments for _, _, arguments in CALLS)
    marks = [(one["type"], one["index"]) for one in events if one["type"] in STARTS_AND_STOPS]
    assert marks == [(kind, index) for index in range(5) for kind in STARTS_AND_STOPS]


STARTS_AND_STOPS = ("content_block_start", "content_block_stop")


def test_text_behind_a_call_is_a_block_of_its_own() -> None:
    writer = BlockWriter()
    call = {"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said: list[dict[str, Any]] = [{"content": "a"}, {"tool_calls": [call]}, {"content": "b"}]
    events = events_of(b"".join(map(writer.add, said)))
    kinds = [one["content_block"]["type"] for one in events if one["type"] == "content_block_start"]
    assert kinds == [block["type"] for block in content_of(said)] == ["text", "tool_use", "text"]
    assert writer.close()
    assert writer.close() == b""


def test_the_events_of_a_text() -> None:
    writer = MessageWriter("msg_1", "m", lambda: USAGE, is_cut=False)
    data = b"".join(
        writer.write(update)
        for update in (
            ChoiceUpdate(0, ""),
            ChoiceUpdate(0, "Hi"),
            ChoiceUpdate(0, ""),
            ChoiceUpdate(0, "!", finish=FinishReason.STOP, stop="\n"),
        )
    )
    events = events_of(data + writer.closing(USAGE, b""))
    assert [one["type"] for one in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    message = accumulated(events)
    assert message.content[0].model_dump()["text"] == "Hi!"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\n")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 16, 5)
    assert usage.cache_creation_input_tokens == 0


def test_a_message_without_text_has_no_block() -> None:
    writer = MessageWriter("msg_1", "m", lambda: USAGE, is_cut=False)
    data = writer.write(ChoiceUpdate(0, "", finish=FinishReason.STOP)) + writer.closing(USAGE, b"")
    assert [one["type"] for one in events_of(data)] == ["message_start", "message_delta", "message_stop"]
    assert content_of([{"content": ""}]) == []


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (MessageEnd(finish=FinishReason.STOP), "end_turn"),
        (MessageEnd(finish=FinishReason.STOP, stop="a"), "stop_sequence"),
        (MessageEnd(finish=FinishReason.STOP, calls_tools=True), "tool_use"),
        (MessageEnd(finish=FinishReason.LENGTH), "max_tokens"),
        (MessageEnd(finish=FinishReason.LENGTH, calls_tools=True), "max_tokens"),
        (MessageEnd(finish=FinishReason.LENGTH, is_cut=True), "model_context_window_exceeded"),
    ],
)
def test_why_it_stopped(end: MessageEnd, reason: str) -> None:
    assert end.reason == reason


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("", {}),
        ('{"a": 1, "b": "cut', {"a": 1}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ("[1]", {}),
        ("}", {}),
        (f'{{"a": {"7" * 30}, "b": NaN}}', {"a": float("7" * 30), "b": None}),
    ],
)
def test_arguments_that_were_cut_keep_what_is_complete(arguments: str, value: dict[str, Any]) -> None:
    assert object_of(arguments) == value


def test_pings_are_events() -> None:
    assert events_of(PING) == [{"type": "ping"}]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"])
@pytest.mark.parametrize("code", sorted(STATUS))
def test_errors_have_anthropics_shape(path: str, code: str) -> None:
    error: TandemError = from_code(code, "It went wrong")
    answer = error_response(error, path=path)
    body = json.loads(bytes(answer.body))
    kinds = {
        401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
        413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
    }  # fmt: skip
    status = STATUS[error.code][0]
    usual = "invalid_request_error" if status < 500 else "api_error"
    assert body["type"] == "error"
    assert body["error"] == {"type": kinds.get(status, usual), "message": "It went wrong."}
    assert answer.headers["request-id"] == body["request_id"] != ""
    assert events_of(error_event(error, path, "msg_1")) == [{**body, "request_id": "msg_1"}]


def test_errors_of_other_paths_have_openais() -> None:
    answer = error_response(InvalidRequestError("no"), path="/v1/messagesx")
    assert set(json.loads(bytes(answer.body))) == {"error"}
    assert "request-id" not in answer.headers
