"""Items of a conversation as the API lists them, and as messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from tandem.core.errors import InvalidRequestError
from tandem.router.api.http.responses.items import (
    CallOutputItem,
    Item,
    ItemPart,
    MessageItem,
    ReasoningItem,
)
from tandem.router.api.http.responses.objects import new_id, text_part
from tandem.router.api.http.schemas import RefusalPart
from tandem.router.api.http.tool_fields import call_of, named_results
from tandem.router.error_quoting import quoted
from tandem.router.output_formats.custom_tools import arguments_with
from tandem.router.tokenization.call_arguments import object_of
from tandem.router.tokenization.chat_template import THOUGHT_NAMES

Message = dict[str, Any]
_PREFIXES = {
    "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc", "custom_tool_call_output": "ctco"
}  # fmt: skip
"""Of ids, by the type of an item."""


def items_of(given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The request's input as items with ids, as the API lists them; InvalidRequestError for calls whose arguments are
    no JSON object."""
    if isinstance(given, str):
        return [_message(MessageItem(role="user", content=given))]
    return [_listed(item, f"input[{position}]") for position, item in enumerate(given)]


def messages_of(items: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Items as messages with one text as content, as they are kept for later turns.

    Reasoning is part of the answer that follows it, of an empty one where none does; a summary of it is no message, nor
    is what is encrypted. Calls, and text between or behind them, are part of the answer in front of them.
    """
    turns = _Turns()
    for item in items:
        match item["type"]:
            case "reasoning":
                turns.reasoning(part["text"] for part in item.get("content", ()) if part["text"])
            case "function_call":
                turns.call(call_of(item["call_id"], item["name"], _object(item["arguments"])))
            case "custom_tool_call":
                turns.call(call_of(item["call_id"], item["name"], arguments_with(item["input"])))
            case "function_call_output" | "custom_tool_call_output":
                turns.add({"role": "tool", "tool_call_id": item["call_id"], "content": _joined(item["output"])})
            case _ if item["role"] == "assistant":
                turns.text(_joined(item["content"]))
            case _:
                turns.add({"role": item["role"], "content": _joined(item["content"])})
    turns.end()
    return tuple(turns.messages)


def for_template(messages: Sequence[Message], given: str | Sequence[Item]) -> tuple[Message, ...]:
    """Messages of `messages_of` as chat templates read them: a thought under every name that one reads, results with
    the names of their functions. InvalidRequestError for an output among the items `given` whose call is missing."""
    calls = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    for position, item in enumerate(() if isinstance(given, str) else given):
        if isinstance(item, CallOutputItem) and item.call_id not in calls:
            where = f"input[{position}].call_id"
            what, why = f"{where} is {quoted(item.call_id)}", "the conversation has no such call"
            raise InvalidRequestError(what, why=why, todo="send the call in front of its output", param=where)
    thoughtful = [
        message | dict.fromkeys(THOUGHT_NAMES, message[THOUGHT_NAMES[0]]) if THOUGHT_NAMES[0] in message else message
        for message in messages
    ]
    return named_results(thoughtful) if calls else tuple(thoughtful)


class _Turns:
    """Messages as they are made; the last answer is open while calls may join it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts: list[str] = []
        self._open: Message | None = None

    def reasoning(self, texts: Iterable[str]) -> None:
        self._open = None
        self._thoughts += texts

    def text(self, text: str) -> None:
        """Text of an answer: one of its own, unless the answer before it has calls that wait for their output."""
        if self._open is not None and "tool_calls" in self._open:
            self._open["content"] = "\n".join(filter(None, (self._open["content"], text)))
        else:
            self._begin(text)

    def call(self, call: Mapping[str, Any]) -> None:
        answer = self._begin(None) if self._open is None else self._open
        answer.setdefault("tool_calls", []).append(call)

    def add(self, message: Message) -> None:
        """A message that is no answer."""
        self.end()
        self.messages.append(message)

    def end(self) -> None:
        """No answer follows: thoughts without one are an empty one."""
        if self._thoughts:
            self._begin("")
        self._open = None

    def _begin(self, content: str | None) -> Message:
        self._open = {"role": "assistant", "content": content}
        if self._thoughts:
            self._open[THOUGHT_NAMES[0]] = "\n".join(self._thoughts)
            self._thoughts = []
        self.messages.append(self._open)
        return self._open


def _object(arguments: str) -> str:
    """Arguments as a JSON object, as templates read no other."""
    text = arguments.strip() or "{}"
    try:
        if isinstance(orjson.loads(text), dict):
            return text
    except ValueError:  # they were cut
        pass
    return orjson.dumps(object_of(text)).decode()


def _joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)


def _listed(item: Item, where: str) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        return _message(item)
    if isinstance(item, ReasoningItem):
        return {**item.model_dump(exclude_none=True), "id": item.id or new_id("rs")}
    given_id = item.id or new_id(_PREFIXES[item.type])
    return {"status": "completed", **item.model_dump(exclude_none=True), "id": given_id}


def _message(item: MessageItem) -> dict[str, Any]:
    parts: Sequence[str | ItemPart | RefusalPart] = (item.content,) if isinstance(item.content, str) else item.content
    kept = _output if item.role == "assistant" else _input
    return {
        "id": item.id or new_id("msg"),
        "type": "message",
        "role": item.role,
        "status": item.status or "completed",
        "content": [kept(part) for part in parts],
    }


def _output(part: str | ItemPart | RefusalPart) -> dict[str, Any]:
    if isinstance(part, RefusalPart):
        return {"type": "refusal", "refusal": part.refusal}
    if isinstance(part, str):
        return text_part(part)
    said = text_part(part.text)
    if part.annotations:
        said["annotations"] = part.annotations
    if part.logprobs:
        said["logprobs"] = [one.model_dump(exclude_none=True) for one in part.logprobs]
    return said


def _input(part: str | ItemPart | RefusalPart) -> dict[str, Any]:
    if isinstance(part, ItemPart):
        return {"type": "input_text", "text": part.text}
    return {"type": "input_text", "text": part if isinstance(part, str) else part.refusal}
