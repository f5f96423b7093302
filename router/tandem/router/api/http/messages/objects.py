"""The message object, as Anthropic's clients read it, made of a chat's answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from tandem.core.state_enums import FinishReason
from tandem.router.api.http.messages.signatures import signature_of
from tandem.router.serving.response_stream import TokenUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEnd:
    """The end of an answer. `stop`: the stop string that ended it. `is_cut`: the context of the model ended before
    `max_tokens`."""

    finish: FinishReason | None
    stop: str | None = None
    is_cut: bool = False
    calls_tools: bool = False

    @property
    def reason(self) -> str:
        """The `stop_reason`."""
        if self.finish is FinishReason.LENGTH:
            return "model_context_window_exceeded" if self.is_cut else "max_tokens"
        if self.stop is not None:
            return "stop_sequence"
        return "tool_use" if self.calls_tools else "end_turn"


def usage_object(usage: TokenUsage) -> dict[str, int]:
    """Every computed token is read at once: writing to the cache costs nothing of its own."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def message_object(
    message: str, model: str, content: Sequence[Mapping[str, Any]], end: MessageEnd | None, usage: TokenUsage
) -> dict[str, Any]:
    """The message with the id `message`; without `end` one that is being written."""
    return {
        "id": message,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": end.reason if end is not None else None,
        "stop_sequence": end.stop if end is not None else None,
        "usage": usage_object(usage),
    }


def content_of(answer: Mapping[str, Any], *, shows_thoughts: bool = True) -> list[dict[str, Any]]:
    """The blocks of a chat's answer: its thought, its text and its calls of tools."""
    blocks: list[dict[str, Any]] = []
    if thought := answer.get("reasoning_content"):
        signature = signature_of(thought, is_shown=shows_thoughts)
        blocks.append({"type": "thinking", "thinking": thought if shows_thoughts else "", "signature": signature})
    if answer.get("content"):
        blocks.append({"type": "text", "text": answer["content"]})
    return blocks + [_tool_use(call) for call in answer.get("tool_calls") or ()]


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": input_of(function["arguments"])}


def input_of(arguments: str) -> dict[str, Any]:
    """Arguments as an object. Of a call that was cut, the fields that are complete."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
