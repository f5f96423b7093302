"""The response object and the events of a stream, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tandem.core.errors import TandemError
from tandem.core.state_enums import FinishReason
from tandem.router.api.http.responses.schemas import ResponseRequest, TextOptions
from tandem.router.serving.response_stream import TokenUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A response that is being written: everything that is known before its first token."""

    id: str
    message: str
    """Id of the one message in its output."""
    created_s: int
    request: ResponseRequest

    def begun(self) -> dict[str, Any]:
        """The object while it has no output."""
        return self._object("in_progress", [])

    def ended(
        self, text: str, finish: FinishReason | None, usage: TokenUsage, completed_s: int, *, is_kept: bool
    ) -> dict[str, Any]:
        """The finished object; an answer that ran into its length limit is "incomplete"."""
        is_whole = finish is not FinishReason.LENGTH
        status = "completed" if is_whole else "incomplete"
        body = self._object(status, [self.item(text, status)])
        body["usage"] = usage_object(usage)
        body["store"] = is_kept
        if is_whole:
            body["completed_at"] = completed_s
        else:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        return body

    def failed(self, error: TandemError) -> dict[str, Any]:
        """The object of a response that broke off; it is not stored."""
        body = self._object("failed", [])
        body["store"] = False
        body["error"] = {"code": "server_error", "message": error.message}
        return body

    def item(self, text: str, status: str) -> dict[str, Any]:
        """The output message."""
        content = [text_part(text)] if status != "in_progress" else []
        return {"id": self.message, "type": "message", "status": status, "role": "assistant", "content": content}

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        asked = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": asked.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": asked.store is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": _format_object(asked.text)},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }


def _format_object(text: TextOptions | None) -> dict[str, Any]:
    """The format of the answer, as it was asked for."""
    if text is None or text.format is None:
        return {"type": "text"}
    return text.format.model_dump(by_alias=True, exclude_none=True)


def usage_object(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class EventWriter:
    """Server-sent events of one response, numbered from 0. Of a delta only its text is encoded anew."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._next = 0
        self._place = {"item_id": draft.message, "output_index": 0, "content_index": 0}
        head = {"type": "response.output_text.delta", **self._place, "logprobs": []}
        self._delta = b"event: response.output_text.delta\ndata: " + orjson.dumps(head)[:-1] + b',"delta":'

    def opening(self) -> bytes:
        """Everything before the first text."""
        begun = self._draft.begun()
        return b"".join(
            (
                self._event("response.created", {"response": begun}),
                self._event("response.in_progress", {"response": begun}),
                self._event(
                    "response.output_item.added", {"output_index": 0, "item": self._draft.item("", "in_progress")}
                ),
                self._event("response.content_part.added", {**self._place, "part": text_part("")}),
            )
        )

    def delta(self, text: str) -> bytes:
        return self._delta + orjson.dumps(text) + b',"sequence_number":%d}\n\n' % self._number()

    def closing(self, text: str, body: Mapping[str, Any]) -> bytes:
        """Everything after the last text; `body` is the finished object."""
        return b"".join(
            (
                self._event("response.output_text.done", {**self._place, "text": text, "logprobs": []}),
                self._event("response.content_part.done", {**self._place, "part": text_part(text)}),
                self._event("response.output_item.done", {"output_index": 0, "item": body["output"][0]}),
                self._event(f"response.{body['status']}", {"response": body}),
            )
        )

    def failed(self, error: TandemError) -> bytes:
        return self._event("response.failed", {"response": self._draft.failed(error)})

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        data = orjson.dumps({"type": kind, **fields, "sequence_number": self._number()})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number
