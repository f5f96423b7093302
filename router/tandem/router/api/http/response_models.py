"""Answers and events of streams as pydantic models: for the OpenAPI document and for tests; nothing is built from
them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tandem.core.batch import BatchStatus

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


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


class CachedTokens(Documented):
    cached_tokens: int


class ReasoningTokens(Documented):
    reasoning_tokens: int


class CompletionDetails(Documented):
    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class UsageModel(Documented):
    """Reasoning is counted for models that mark it, predicted tokens where the request has a prediction."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails | None = None


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


class AnsweredFunction(Documented):
    name: str
    arguments: str


class AnsweredCall(Documented):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredCustomTool(Documented):
    name: str
    input: str


class AnsweredCustomCall(Documented):
    id: str
    type: Literal["custom"]
    custom: AnsweredCustomTool


class AssistantMessage(Documented):
    """Content is null where there are calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnsweredCall | AnsweredCustomCall] | None = None


class FunctionDelta(Documented):
    name: str | None = None
    arguments: str


class CustomDelta(Documented):
    name: str | None = None
    input: str


class CallDelta(Documented):
    """The first one of a call has its id, type and name, the others more of the arguments, or of the input."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class ChatDelta(Documented):
    """The first one of a choice has the role, the last one nothing."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(Documented):
    index: int
    delta: ChatDelta
    finish_reason: ChatFinishReason | None
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = None


class ChatChoice(Documented):
    index: int
    message: AssistantMessage
    finish_reason: ChatFinishReason
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = None


class GeneratedModel(Documented):
    """Fields that whole answers and chunks share."""

    id: str
    created: int
    model: str


class ChatCompletionChunk(GeneratedModel):
    object: Literal["chat.completion.chunk"]
    service_tier: Literal["default"] | None = None
    choices: list[ChatChunkChoice]
    usage: UsageModel | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletion(GeneratedModel):
    object: Literal["chat.completion"]
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


class TextChunkChoice(Documented):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: TextLogprobs | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextChoice(TextChunkChoice):
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChunk(GeneratedModel):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: UsageModel | None = None


class Completion(GeneratedModel):
    object: Literal["text_completion"]
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


class BatchUsage(Documented):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ListPage(Documented):
    """A page of a list, and where it begins and ends."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileObject(Documented):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(ListPage):
    data: list[FileObject]


class DeletedFile(Documented):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(Documented):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(Documented):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Documented):
    total: int
    completed: int
    failed: int


class BatchObject(Documented):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(ListPage):
    data: list[BatchObject]
