"""Responses, their items, and events of their streams, as pydantic models: for the OpenAPI document and for tests;
nothing is built from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.router.api.http.output_fields import FlatFormat
from tandem.router.api.http.response_models import BatchUsage, CachedTokens, Documented, ListPage
from tandem.router.api.http.responses.items import (
    Annotation,
    DirectCaller,
    OutputLogprob,
    OutputPart,
    Status,
    SummaryPart,
    ThoughtPart,
)
from tandem.router.api.http.responses.tools import ToolChoice, Tools
from tandem.router.api.http.schemas import RefusalPart
from tandem.router.api.http.tool_fields import Effort

Nothing = Annotated[list[Any], Field(max_length=0)]
Ended = Literal["completed", "incomplete"]


class InputTokensDetails(CachedTokens):
    cache_write_tokens: int


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
    status: Ended
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Documented):
    id: str
    type: Literal["reasoning"]
    status: Ended
    summary: Nothing
    content: list[ThoughtPart]


class FunctionCallFields(Documented):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputFunctionCall(FunctionCallFields):
    status: Ended


class CustomCallFields(Documented):
    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class OutputCustomCall(CustomCallFields):
    status: Ended


class IncompleteDetails(Documented):
    reason: Literal["max_output_tokens"]


class ReasoningSettings(Documented):
    effort: Effort | None
    summary: Literal["auto"] | None


class TextSettings(Documented):
    format: FlatFormat


class ResponseObject(Documented):
    id: str
    object: Literal["response"]
    created_at: int
    status: Ended
    background: Literal[False]
    completed_at: int | None
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: ToolChoice
    tools: Tools
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
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
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


class InputFunctionCall(FunctionCallFields):
    """Of an earlier answer, as the client sent it again."""

    status: Status
    caller: DirectCaller | None = None


class InputCustomCall(CustomCallFields):
    """Of an earlier answer, as the client sent it again."""

    status: Status
    caller: DirectCaller | None = None


class InputCallOutput(Documented):
    id: str
    type: Literal["function_call_output", "custom_tool_call_output"]
    status: Status
    call_id: str
    output: str | list[OutputPart]
    caller: DirectCaller | None = None


class InputItemList(ListPage):
    data: list[InputItem | InputReasoning | InputFunctionCall | InputCustomCall | InputCallOutput]
