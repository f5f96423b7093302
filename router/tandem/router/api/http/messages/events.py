"""The server-sent events of a message, as Anthropic's clients read them, made of the pieces of a chat's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from tandem.router.api.http.chat_parts import deltas
from tandem.router.api.http.messages.objects import REASONING, ChatDelta, MessageEnd, message_object, usage_object
from tandem.router.api.http.messages.signatures import signature_of
from tandem.router.serving.choices import ChoiceUpdate
from tandem.router.serving.response_stream import TokenUsage

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class BlockWriter:
    """Server-sent events of one message, made of the pieces of a chat's answer. A block ends where one of another kind
    begins."""

    def __init__(self, *, shows_thoughts: bool = True) -> None:
        self._shows_thoughts = shows_thoughts
        self._thoughts: list[str] = []
        """Of the open block, where they are not shown."""
        self._index = -1
        self._open = ""
        """The kind of the open block: "", "text", "thinking", or "tool" with the number of the call."""
        self._start = b""
        """Of an event with a text of the open block, all before the text."""
        self.calls_tools = False

    def add(self, delta: ChatDelta) -> bytes:
        """The events of one piece."""
        events = b""
        if thought := delta.get("reasoning_content"):
            events += self._thinking(thought)
        if text := delta.get("content"):
            events += self.text(text)
        for call in delta.get("tool_calls") or ():
            events += self._tool(call)
        return events

    def text(self, text: str) -> bytes:
        """The events of a piece of the text."""
        begun = b"" if self._open == "text" else self._begin("text", {"type": "text", "text": ""}, "text_delta", "text")
        return begun + self._start + orjson.dumps(text) + b"}}\n\n"

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if not self._open:
            return b""
        signature = b""
        if self._open == "thinking":
            signed = signature_of("".join(self._thoughts), is_shown=self._shows_thoughts)
            self._thoughts.clear()
            delta = {"type": "signature_delta", "signature": signed}
            signature = event("content_block_delta", {"index": self._index, "delta": delta})
        self._open = ""
        return signature + event("content_block_stop", {"index": self._index})

    def _thinking(self, thought: str) -> bytes:
        begun = b""
        if self._open != "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            begun = self._begin("thinking", block, "thinking_delta", "thinking")
        if not self._shows_thoughts:
            self._thoughts.append(thought)
            return begun
        return begun + self._start + orjson.dumps(thought) + b"}}\n\n"

    def _tool(self, call: Mapping[str, Any]) -> bytes:
        kind, function, begun = f"tool {call['index']}", call.get("function", {}), b""
        if self._open != kind:
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            begun = self._begin(kind, block, "input_json_delta", "partial_json")
            self.calls_tools = True
        arguments = function.get("arguments")
        return begun + (self._start + orjson.dumps(arguments) + b"}}\n\n" if arguments else b"")

    def _begin(self, kind: str, block: Mapping[str, Any], delta: str, field: str) -> bytes:
        closed = self.close()
        self._index += 1
        self._open = kind
        head = orjson.dumps({"type": "content_block_delta", "index": self._index})[:-1]
        self._start = b"event: content_block_delta\ndata: " + head + f',"delta":{{"type":"{delta}","{field}":'.encode()
        return closed + event("content_block_start", {"index": self._index, "content_block": block})


class MessageWriter:
    """All events of one message. `usage` returns that of the answer so far; `is_cut` as of MessageEnd."""

    def __init__(
        self, message: str, model: str, usage: Callable[[], TokenUsage], *, is_cut: bool, shows_thoughts: bool = True
    ) -> None:
        self._message, self._model, self._usage, self._is_cut = message, model, usage, is_cut
        self._blocks = BlockWriter(shows_thoughts=shows_thoughts)
        self._last = ChoiceUpdate(0, "")
        self.writes = 0
        """The number of updates written."""

    def write(self, update: ChoiceUpdate, usage: TokenUsage | None = None) -> bytes:
        """The events of one update; b"" if there is nothing to show yet."""
        begun = b"" if self.writes else self._begun()
        self._last = update
        self.writes += 1
        if update.parts is not None:
            return begun + b"".join(map(self._blocks.add, deltas(update.parts, REASONING)))
        return begun + self._blocks.text(update.text) if update.text else begun

    def closing(self, usage: TokenUsage, remark: bytes) -> bytes:
        """The events behind the last update, with a comment among them."""
        last, calls = self._last, self._blocks.calls_tools
        end = MessageEnd(finish=last.finish, stop=last.stop, is_cut=self._is_cut, calls_tools=calls)
        delta = {"stop_reason": end.reason, "stop_sequence": end.stop}
        ended = event("message_delta", {"delta": delta, "usage": usage_object(usage)})
        return self._blocks.close() + ended + remark + event("message_stop", {})

    def _begun(self) -> bytes:
        message = message_object(self._message, self._model, [], None, self._usage())
        return event("message_start", {"message": message})


def event(kind: str, fields: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"
