"""The message object, as Anthropic's clients read it, made of a chat's answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.state_enums import FinishReason
from tandem.router.api.http.messages.signatures import signature_of
from tandem.router.serving.response_stream import TokenUsage
from tandem.router.tokenization.call_arguments import object_of

ChatDelta = Mapping[str, Any]
"""A piece of a chat's answer: any of `content`, `reasoning_content` and `tool_calls`, as OpenAI streams them."""
REASONING = ("reasoning_content",)
"""The names of the field with the thought in such a piece."""


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


def content_of(deltas: Iterable[ChatDelta], *, shows_thoughts: bool = True) -> list[dict[str, Any]]:
    """The blocks of a chat's answer, in the order in which they were written."""
    blocks: list[dict[str, Any]] = []
    for delta in deltas:
        if thought := delta.get("reasoning_content"):
            _join(blocks, "thinking", "thinking", thought)
        if text := delta.get("content"):
            _join(blocks, "text", "text", text)
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": ""})
            blocks[-1]["input"] += call["function"]["arguments"]
    return [_ended(block, shows_thoughts=shows_thoughts) for block in blocks]


def _join(blocks: list[dict[str, Any]], kind: str, field: str, text: str) -> None:
    if blocks and blocks[-1]["type"] == kind:
        blocks[-1][field] += text
    else:
        blocks.append({"type": kind, field: text})


def _ended(block: dict[str, Any], *, shows_thoughts: bool) -> dict[str, Any]:
    if block["type"] == "tool_use":
        return {**block, "input": object_of(block["input"])}
    if block["type"] == "text":
        return block
    thought = block["thinking"]
    signature = signature_of(thought, is_shown=shows_thoughts)
    return {**block, "thinking": thought if shows_thoughts else "", "signature": signature}
