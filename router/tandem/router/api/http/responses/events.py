"""The output of a response as it grows, item by item, and the events that a stream reports it by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import orjson

from tandem.core.errors import TandemError
from tandem.core.state_enums import FinishReason
from tandem.router.api.http.responses.objects import Draft, Item, new_id, text_part
from tandem.router.output_formats.events import CallArguments, CallInput, CallStart, Content, Event, Reasoning
from tandem.router.serving.choices import ChoiceUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class _ItemKind:
    """A kind of item whose text grows. `event` is the name of its events, which repeat `more`; in the last one the
    whole text is `text_field`. `part` makes a part of the item's content of the text; None = the text is a field of the
    item."""

    about: Mapping[str, Any]
    prefix: str
    event: str
    text_field: str = "text"
    part: Callable[[str], dict[str, Any]] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


_MESSAGE = _ItemKind(
    about={"type": "message", "role": "assistant"},
    prefix="msg",
    event="response.output_text",
    part=text_part,
    more={"logprobs": []},
)
_REASONING = _ItemKind(
    about={"type": "reasoning", "summary": []}, prefix="rs", event="response.reasoning_text", part=_thought_part
)
_FUNCTION_CALL = _ItemKind(
    about={"type": "function_call"}, prefix="fc", event="response.function_call_arguments", text_field="arguments"
)
_CUSTOM_CALL = _ItemKind(
    about={"type": "custom_tool_call"}, prefix="ctc", event="response.custom_tool_call_input", text_field="input"
)


class _OpenItem:
    """The item that is being written, the last one of the output."""

    def __init__(self, kind: _ItemKind, position: int, more: Mapping[str, Any]) -> None:
        self.kind = kind
        self._about = {"id": new_id(kind.prefix), **kind.about, **more}
        self.texts: list[str] = []
        self.place: dict[str, Any] = {"item_id": self._about["id"], "output_index": position}
        if kind.part is not None:
            self.place["content_index"] = 0
        head = {"type": f"{kind.event}.delta", **self.place, **kind.more}
        self.delta = f"event: {kind.event}.delta\ndata: ".encode() + orjson.dumps(head)[:-1] + b',"delta":'
        """The event of a piece of its text, up to the text."""

    def item(self, status: str) -> Item:
        kind = self.kind
        item = {**self._about, "status": status}
        if kind.part is None:
            return {**item, kind.text_field: "".join(self.texts)}
        return {**item, "content": [] if status == "in_progress" else [kind.part("".join(self.texts))]}


class OutputWriter:
    """The output items of one response, and its server-sent events, numbered from 0. An item ends where one of another
    kind, or another call, begins; of a piece only its text is encoded anew."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.items: list[Item] = []
        """All that are complete."""
        self._open: _OpenItem | None = None
        self._events = 0
        self.finish: FinishReason | None = None

    def opening(self) -> bytes:
        """The events before the output."""
        begun = {"response": self._draft.begun()}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def add(self, update: ChoiceUpdate) -> bytes:
        """The events of new output; b"" if there is nothing to show yet."""
        self.finish = update.finish or self.finish
        if update.parts is None:
            return self._text(_MESSAGE, update.text) if update.text else b""
        return b"".join(map(self._part, update.parts))

    def end(self) -> bytes:
        """The events of the end of the output; every answer has an item."""
        events = b""
        if self._open is None:
            events = self._begin(_MESSAGE)
        return events + self._close("incomplete" if self.finish is FinishReason.LENGTH else "completed")

    def closing(self, body: Mapping[str, Any]) -> bytes:
        """The last event; `body` is the finished object."""
        return self._event(f"response.{body['status']}", {"response": body})

    def failed(self, error: TandemError) -> bytes:
        return self._event("response.failed", {"response": self._draft.failed(error)})

    def _part(self, part: Event) -> bytes:
        match part:
            case Content(text):
                return self._text(_MESSAGE, text)
            case Reasoning(text) if self._open is None or self._open.kind is not _REASONING:
                return self._text(_REASONING, text.removeprefix("\n"))  # which separates it from earlier reasoning
            case Reasoning(text):
                return self._text(_REASONING, text)
            case CallStart(_, given, name, is_custom):
                return self._begin(_CUSTOM_CALL if is_custom else _FUNCTION_CALL, {"call_id": given, "name": name})
            case CallArguments(_, text):
                return self._text(_FUNCTION_CALL, text)
            case CallInput(_, text):
                return self._text(_CUSTOM_CALL, text)

    def _text(self, kind: _ItemKind, text: str) -> bytes:
        begun = b""
        if self._open is None or self._open.kind is not kind:
            begun = self._begin(kind)
        assert self._open is not None
        self._open.texts.append(text)
        return begun + self._open.delta + orjson.dumps(text) + b',"sequence_number":%d}\n\n' % self._number()

    def _begin(self, kind: _ItemKind, more: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        closed = self._close("completed")
        opened = self._open = _OpenItem(kind, len(self.items), more)
        place = {"output_index": len(self.items)}
        events = closed + self._event("response.output_item.added", {**place, "item": opened.item("in_progress")})
        if kind.part is not None:
            events += self._event("response.content_part.added", {**opened.place, "part": kind.part("")})
        return events

    def _close(self, status: str) -> bytes:
        """End the open item, if there is one."""
        opened, self._open = self._open, None
        if opened is None:
            return b""
        kind, text = opened.kind, "".join(opened.texts)
        events = self._event(f"{kind.event}.done", {**opened.place, **kind.more, kind.text_field: text})
        if kind.part is not None:
            events += self._event("response.content_part.done", {**opened.place, "part": kind.part(text)})
        item = opened.item(status)
        events += self._event("response.output_item.done", {"output_index": len(self.items), "item": item})
        self.items.append(item)
        return events

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        data = orjson.dumps({"type": kind, **fields, "sequence_number": self._number()})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _number(self) -> int:
        number, self._events = self._events, self._events + 1
        return number
