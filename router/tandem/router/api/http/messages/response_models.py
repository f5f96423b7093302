"""Messages, and events of their streams, as pydantic models: for the OpenAPI document and for tests; nothing is built
from them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from tandem.router.api.http.response_models import Documented


class AnthropicErrorBody(Documented):
    """`details`: what the SDK acts upon, of a refused `thread`."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicError(Documented):
    """Every answer that is no success, and the data of the event `error` of a stream that fails."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str


class MessageUsage(Documented):
    """All prompt tokens are the sum of the first three."""

    input_tokens: int = Field(ge=0)
    cache_creation_input_tokens: int = Field(ge=0)
    cache_read_input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)


class MessageText(Documented):
    type: Literal["text"]
    text: str


class MessageThinking(Documented):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(Documented):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageObject(Documented):
    """`stop_sequence` is the one of the request's that ended the answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Documented):
    """Beside its type, each has fields of its own."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]


class TokenCount(Documented):
    input_tokens: int = Field(ge=1)
