"""Events of streams as pydantic models: for the OpenAPI document and for tests."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.router.api.http.response_models import ChatLogprobs, Documented, TextLogprobs, UsageModel


class ChatDelta(Documented):
    """The first one of a choice has the role, the last one nothing."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Documented):
    index: int
    delta: ChatDelta
    finish_reason: Literal["stop", "length"] | None
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Documented):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    service_tier: Literal["default"] | None = None
    choices: list[ChatChunkChoice]
    usage: UsageModel | None = None
    prompt_token_ids: list[int] | None = None


class TextChunkChoice(Documented):
    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: TextLogprobs | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunk(Documented):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: UsageModel | None = None


class ResponseEvent(BaseModel):
    """Beside these, each type has fields of its own; those that begin and end have the whole response."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int = Field(ge=0)
