"""Responses, files and batches as pydantic models: for the OpenAPI document and for tests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.router.api.http.response_models import Documented
from tandem.router.api.http.responses.items import (
    Annotation,
    OutputLogprob,
    Status,
    SummaryPart,
    ThoughtPart,
)
from tandem.router.api.http.schemas import RefusalPart

Nothing = Annotated[list[Any], Field(max_length=0)]


class InputTokensDetails(Documented):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Documented):
    reasoning_tokens: int


class ResponseUsage(Documented):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


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


class BatchInputDetails(Documented):
    cached_tokens: int


class BatchUsage(Documented):
    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchObject(Documented):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
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
