"""Answers as pydantic models: for the OpenAPI document and for tests; nothing is built from them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Documented(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorBody(Documented):
    message: str
    type: str
    param: str | None
    code: str


class Error(Documented):
    """Every answer that is no success, and the last event of a stream that fails."""

    error: ErrorBody


class PromptTokensDetails(Documented):
    cached_tokens: int


class UsageModel(Documented):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Documented):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Documented):
    content: list[ChatTokenLogprob]
    refusal: None


class RankedToken(Documented):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]
"""For every prompt token, by token id; nothing precedes the first one."""


class AssistantMessage(Documented):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Documented):
    index: int
    message: AssistantMessage
    finish_reason: Literal["stop", "length"]
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = None


class ChatCompletion(Documented):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: Literal["default"] | None = None
    choices: list[ChatChoice]
    usage: UsageModel
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TextLogprobs(Documented):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Documented):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: TextLogprobs | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Documented):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageModel


class ModelObject(Documented):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(Documented):
    object: Literal["list"]
    data: list[ModelObject]


class Tokens(Documented):
    tokens: list[int]
    count: int
    max_model_len: int | None


class Text(Documented):
    prompt: str


class Liveness(Documented):
    status: Literal["alive"]


class ReadinessModel(Documented):
    status: Literal["ready", "not ready"]
    missing: list[str]


class VersionModel(Documented):
    version: str
