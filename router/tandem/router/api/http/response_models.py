"""Answers and events of streams as pydantic models: for the OpenAPI document and for tests; nothing is built from
them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.core.batch import BatchStatus
from tandem.router.api.http.responses.items import Annotation, OutputLogprob, Status, SummaryPart, ThoughtPart
from tandem.router.api.http.schemas import RefusalPart

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
Nothing = Annotated[list[Any], Field(max_length=0)]


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


class UsageModel(Documented):
    """Reasoning is counted for models that mark it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


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


class AssistantMessage(Documented):
    """Content is null where there are calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class FunctionDelta(Documented):
    name: str | None = None
    arguments: str


class CallDelta(Documented):
    """The first one of a call has its id, type and name, the others more of the arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


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


class InputTokensDetails(CachedTokens):
    cache_write_tokens: int


class BatchUsage(Documented):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseUsage(BatchUsage):
    input_tokens_details: InputTokensDetails


class OutputText(Documented):
    type: Literal["output_text"]
    text: str
    annotations: Nothing
    logprobs: Nothing


class OutputMessage(Documented):
    id: str
    type: Literal["message"]
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class IncompleteDetails(Documented):
    reason: Literal["max_output_tokens"]


class NoReasoning(Documented):
    effort: None
    summary: None


class TextFormat(Documented):
    type: Literal["text"]


class TextSettings(Documented):
    format: TextFormat


class ResponseObject(Documented):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    completed_at: int | None
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: NoReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: Literal["auto"]
    tools: Nothing
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None


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


class DeletedResponse(Documented):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputText(Documented):
    type: Literal["input_text"]
    text: str


class InputOutputText(Documented):
    """Of an earlier answer, as the client sent it again."""

    type: Literal["output_text"]
    text: str
    annotations: list[Annotation]
    logprobs: list[OutputLogprob]


class InputItem(Documented):
    id: str
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    status: Status
    content: list[InputText | InputOutputText | RefusalPart]


class InputReasoning(Documented):
    """As the client sent it: what it left out, or sent as null, is not there."""

    id: str
    type: Literal["reasoning"]
    summary: list[SummaryPart]
    content: list[ThoughtPart] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class ListPage(Documented):
    """A page of a list, and where it begins and ends."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputItemList(ListPage):
    data: list[InputItem | InputReasoning]


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
