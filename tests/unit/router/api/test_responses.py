"""Requests to the Responses API: what is taken, what is refused by name, and how it becomes a conversation."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from tandem.core.errors import InvalidRequestError, UnsupportedParameterError, WorkerLostError
from tandem.core.state_enums import FinishReason
from tandem.router.api.http.responses.chat import for_template, items_of, messages_of
from tandem.router.api.http.responses.events import OutputWriter
from tandem.router.api.http.responses.objects import Draft
from tandem.router.api.http.responses.schemas import ResponseRequest, without_neutral
from tandem.router.api.http.responses.tools import tool_use
from tandem.router.output_formats.events import CallArguments, CallInput, CallStart, Content, Event, Reasoning
from tandem.router.serving.choices import ChoiceUpdate
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
        ("tools[0].type", [{"type": "web_search"}]),
        ("tool_choice.type", {"type": "file_search"}),
        ("max_tool_calls", 3),
        ("background", True),
        ("include", ["message.output_text.logprobs"]),
        ("conversation", "conv_1"),
        ("reasoning.summary", {"effort": "high", "summary": "auto"}),
        ("text.verbosity", {"verbosity": "low"}),
        ("truncation", "auto"),
        ("top_logprobs", 3),
        ("prompt", {"id": "pmpt_1"}),
        ("moderation", {"model": "x"}),
    ],
)
def test_what_is_not_there_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameterError, match="not supported yet") as caught:
        parsed(**{name.partition(".")[0].partition("[")[0]: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, "input[0].type"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]},
            "input[0].output[0].type",
        ),
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


def call(number: int, arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": arguments} | more


def output(number: int, text: Any = "1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": text}


def custom_output(number: int) -> dict[str, Any]:
    return {**output(number), "type": "custom_tool_call_output"}


def replaced(answer: dict[str, Any], arguments: str) -> dict[str, Any]:
    """An answer whose call has these arguments."""
    answer["tool_calls"][0]["function"]["arguments"] = arguments
    return answer


def called(*numbers: int, content: str | None = None, **more: Any) -> dict[str, Any]:
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in numbers]
    return {"role": "assistant", "content": content, "tool_calls": calls} | more


def result(number: int, text: str = "1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ([USER, call(1), output(1)], [USER, called(1), result(1)]),
        ([USER, call(1), call(2), output(2), output(1)], [USER, called(1, 2), result(2), result(1)]),
        (
            [USER, reasoning("Hm"), ANSWER, call(1), output(1)],
            [USER, called(1, content="b", reasoning_content="Hm"), result(1)],
        ),
        ([USER, reasoning("Hm"), call(1), output(1)], [USER, called(1, reasoning_content="Hm"), result(1)]),
        ([USER, call(1), ANSWER, call(2)], [USER, called(1, 2, content="b")]),
        ([USER, call(1), output(1), ANSWER], [USER, called(1), result(1), ANSWER]),
        ([call(1), output(1), reasoning("Hm"), call(2)], [called(1), result(1), called(2, reasoning_content="Hm")]),
        ([call(1), reasoning("Hm"), call(2)], [called(1), called(2, reasoning_content="Hm")]),
        ([call(1), output(1, [{"type": "input_text", "text": text} for text in "ab"])], [called(1), result(1, "a\nb")]),
        ([call(1), output(1, [])], [called(1), result(1, "")]),
        ([call(1, " "), output(1)], [called(1), result(1)]),
        ([call(1, '{"a":1,"b":"x'), output(1)], [replaced(called(1), '{"a":1}'), result(1)]),
        ([call(1, "[]"), output(1)], [called(1), result(1)]),
        (
            [{"type": "custom_tool_call", "call_id": "c1", "name": "f", "input": 'a"\n'}, custom_output(1)],
            [replaced(called(1), '{"input": "a\\"\\n"}'), result(1)],
        ),
    ],
)
def test_calls_and_outputs_become_an_answer_and_results(given: list[Any], messages: list[Any]) -> None:
    assert list(messages_of(items_of(parsed(input=given).input))) == messages


def test_results_have_the_names_of_their_functions_and_thoughts_every_name() -> None:
    request = parsed(input=[reasoning("Hm"), call(1), output(1)])
    first, second = for_template(messages_of(items_of(request.input)), request.input)
    assert (first["reasoning_content"], first["thinking"]) == ("Hm", "Hm")
    assert second["name"] == "f"


def test_an_output_without_its_call_is_named() -> None:
    request = parsed(input=[call(1), output(2)])
    with pytest.raises(InvalidRequestError) as caught:
        for_template(messages_of(items_of(request.input)), request.input)
    assert caught.value.param == "input[1].call_id"


def test_a_call_that_was_cut_has_its_complete_fields_in_the_next_turn() -> None:
    cut = messages_of([call(1, '{"a": "x", "b": {"c": 1, "d"')])[0]
    assert cut["tool_calls"][0]["function"]["arguments"] == '{"a":"x","b":{"c":1}}'
    long = messages_of([call(1, '{"a": 77777777777777777777, "b')])[0]
    assert json.loads(long["tool_calls"][0]["function"]["arguments"]) == {"a": float("7" * 20)}
    for broken in ("7", '"x', "{]"):
        assert messages_of([call(1, broken)])[0]["tool_calls"][0]["function"]["arguments"] == "{}"


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True, "description": "d"}


@pytest.mark.parametrize(
    ("choice", "mode", "allowed"),
    [
        (None, "auto", ("f", "g")),
        ("auto", "auto", ("f", "g")),
        ("required", "required", ("f", "g")),
        ({"type": "function", "name": "g"}, "named", ("g",)),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            "required",
            ("f",),
        ),
    ],
)
def test_a_choice_of_tools(choice: Any, mode: str, allowed: tuple[str, ...]) -> None:
    request = parsed(tools=[TOOL, {"type": "function", "name": "g"}], tool_choice=choice)
    use = tool_use(request.tools or (), request.tool_choice, is_parallel=True)
    assert use is not None
    assert (str(use.mode), use.allowed) == (mode, allowed)
    assert use.strict == {"f"}
    described = {key: value for key, value in TOOL.items() if key != "type"}
    assert list(use.tools) == [
        {"type": "function", "function": described}, {"type": "function", "function": {"name": "g"}}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([TOOL, TOOL], None, "tools[1].name"),
        ([TOOL], {"type": "function", "name": "g"}, "tool_choice.name"),
        (
            [TOOL],
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            "tool_choice.tools[0].name",
        ),
        ([], "required", "tool_choice"),
    ],
)
def test_tools_that_are_wrong_are_named(tools: list[Any], choice: Any, param: str) -> None:
    request = parsed(tools=tools, tool_choice=choice)
    with pytest.raises(InvalidRequestError) as caught:
        tool_use(request.tools or (), request.tool_choice, is_parallel=True)
    assert caught.value.param == param


def draft(**changes: Any) -> Draft:
    return Draft(id="resp_1", created_s=5, request=parsed(**changes))


def update(*parts: Event, finish: FinishReason | None = None) -> ChoiceUpdate:
    return ChoiceUpdate(0, "", parts=list(parts), finish=finish)


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_objects_are_openai_s(finish: FinishReason) -> None:
    asked = draft(
        instructions="Be brief.",
        temperature=0.5,
        max_output_tokens=5,
        metadata={"a": "b"},
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
    )
    writer = OutputWriter(asked)
    writer.add(ChoiceUpdate(0, "text", finish=finish))
    writer.end()
    body = asked.ended(writer.items, writer.finish, USAGE, 9, is_kept=True)
    assert (body["tools"], body["tool_choice"]) == ([TOOL], {"type": "function", "name": "f"})
    assert (body["parallel_tool_calls"], body["reasoning"]) == (False, {"effort": "low", "summary": None})
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


EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def read(stream: bytes) -> list[Any]:
    """The events of a stream, each as the client types it."""
    events = []
    for block in stream.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert EVENT.validate_json(data.removeprefix("data: "), strict=True).type == events[-1]["type"]
        assert name == f"event: {events[-1]['type']}"
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    return events


def written(*updates: ChoiceUpdate) -> tuple[list[Any], list[Any]]:
    """All events of an answer, and its items."""
    asked = draft()
    writer = OutputWriter(asked)
    stream = writer.opening() + b"".join(map(writer.add, updates)) + writer.end()
    stream += writer.closing(asked.ended(writer.items, writer.finish, USAGE, 9, is_kept=True))
    return read(stream), writer.items


def kinds(events: list[Any]) -> list[str]:
    return [one["type"].removeprefix("response.") for one in events]


MESSAGE_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
                  "content_part.done", "output_item.done"]  # fmt: skip
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
               "output_item.done"]  # fmt: skip
THOUGHT_EVENTS = [kind.replace("output_text", "reasoning_text") for kind in MESSAGE_EVENTS]


def test_events_in_order() -> None:
    events, items = written(ChoiceUpdate(0, 'He said "'), ChoiceUpdate(0, "é\n", finish=FinishReason.STOP))
    wanted = ["created", "in_progress", *MESSAGE_EVENTS, "completed"]
    wanted.insert(5, "output_text.delta")
    assert kinds(events) == wanted
    assert events[4]["delta"] + events[5]["delta"] == events[6]["text"] == events[7]["part"]["text"] == 'He said "é\n'
    assert [part["text"] for part in items[0]["content"]] == ['He said "é\n']


def test_an_answer_without_any_text_is_an_empty_message() -> None:
    events, items = written(ChoiceUpdate(0, "", finish=FinishReason.STOP))
    assert kinds(events[2:-1]) == [kind for kind in MESSAGE_EVENTS if not kind.endswith("delta")]
    assert [(item["type"], item["content"][0]["text"]) for item in items] == [("message", "")]


def test_items_follow_each_other() -> None:
    parts: list[Event] = [
        Reasoning("I "), Reasoning("look."), Content("Let me"), Content(" see."), CallStart(0, "c0", "f"),
        CallArguments(0, '{"a": '), CallArguments(0, "1}"), CallStart(1, "c1", "g"), CallArguments(1, "{}"),
        CallStart(2, "c2", "f"), Content("Well."), Reasoning("\nHm"),
    ]  # fmt: skip
    events, items = written(update(*parts[:3]), update(*parts[3:]), update(finish=FinishReason.STOP))
    runs = [THOUGHT_EVENTS, MESSAGE_EVENTS, CALL_EVENTS, CALL_EVENTS, CALL_EVENTS, MESSAGE_EVENTS, THOUGHT_EVENTS]
    once = [one for at, one in enumerate(kinds(events[2:-1])) if at == 0 or one != kinds(events[2:-1])[at - 1]]
    assert once == [
        kind for run, item in zip(runs, items, strict=True)
        for kind in run if not (item.get("call_id") == "c2" and kind.endswith("delta"))
    ]  # fmt: skip
    assert events[-1]["response"]["output"] == items
    assert len({item["id"] for item in items}) == len(items)
    shown = [item.get("arguments", "".join(part["text"] for part in item.get("content", ()))) for item in items]
    assert shown == ["I look.", "Let me see.", '{"a": 1}', "{}", "", "Well.", "Hm"]
    assert [(item["call_id"], item["name"]) for item in items[2:5]] == [("c0", "f"), ("c1", "g"), ("c2", "f")]
    for position, (item, text) in enumerate(zip(items, shown, strict=True)):
        of_item = [one for one in events if one.get("output_index") == position]
        assert {one.get("item_id") or one["item"]["id"] for one in of_item} == {item["id"]}
        assert "".join(one["delta"] for one in of_item if "delta" in one) == text
        (done,) = [one for one in of_item if one["type"].endswith(("text.done", "arguments.done"))]
        assert done.get("text", done.get("arguments")) == text
        assert of_item[-1]["item"] == item
        assert of_item[0]["item"]["status"] == "in_progress"
        assert item["status"] == "completed"


def test_a_custom_tool_has_events_of_its_own() -> None:
    parts = (
        CallStart(0, "c0", "run", is_custom=True),
        CallInput(0, "ls"),
        CallInput(0, " -l\n"),
        CallStart(1, "c1", "f"),
    )
    events, items = written(update(*parts, CallArguments(1, "{}"), finish=FinishReason.STOP))
    head = [kind.replace("function_call_arguments", "custom_tool_call_input") for kind in CALL_EVENTS]
    assert kinds(events[2:-1]) == [*head[:2], *head[1:], *CALL_EVENTS]
    assert [item["type"] for item in items] == ["custom_tool_call", "function_call"]
    assert (items[0]["input"], items[0]["call_id"], items[0]["name"]) == ("ls -l\n", "c0", "run")
    assert events[3]["delta"] + events[4]["delta"] == events[5]["input"] == "ls -l\n"


@pytest.mark.parametrize("last", [Content("a"), Reasoning("a"), CallStart(0, "c0", "f")])
def test_the_item_that_is_cut_is_incomplete(last: Event) -> None:
    events, items = written(update(Reasoning("I"), Content("b"), last, finish=FinishReason.LENGTH))
    assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + ["incomplete"]
    assert kinds(events)[-1] == "incomplete"
