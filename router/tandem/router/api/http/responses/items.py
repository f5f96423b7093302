"""Items of the input of /v1/responses: messages, the reasoning and calls of earlier answers, and outputs of calls.
OpenAI features that this server lacks are refused by name, rather than called a wrong type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from tandem.core.errors import InvalidRequestError, UnsupportedParameterError
from tandem.core.sampling import MAX_LOGPROBS
from tandem.router.api.http.schemas import (
    MAX_PARTS,
    REFUSAL,
    TEXT,
    Int,
    Name,
    RefusalPart,
    Short,
    part_kind,
)
from tandem.router.api.http.strict_models import FIRST_ERROR, Strict
from tandem.router.error_quoting import quoted

MAX_DROPPED = 1 << 20
"""Characters of a text that is kept with a response and that no model reads."""
MAX_TOLD = 8192
"""Characters of one field of an annotation: addresses are the longest."""
MAX_LOGPROB_TOKENS = 8192
MAX_TOKEN_BYTES = 512
Status = Literal["in_progress", "completed", "incomplete"]
Dropped = Annotated[str, Field(max_length=MAX_DROPPED)]
Annotation = Annotated[
    dict[Short, bool | Int | float | Annotated[str, Field(max_length=MAX_TOLD)] | None], Field(max_length=16)
]
"""A citation; every kind of it is flat."""
_TEXTS = ("input_text", "output_text")


class OtherLogprob(Strict):
    token: Name
    bytes: Annotated[list[Int], Field(max_length=MAX_TOKEN_BYTES), FIRST_ERROR] | None = None
    logprob: float


class OutputLogprob(OtherLogprob):
    top_logprobs: Annotated[list[OtherLogprob], Field(max_length=MAX_LOGPROBS), FIRST_ERROR] | None = None


class ItemPart(Strict):
    """A text of a message; parts of earlier answers come back as servers gave them."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Annotation], Field(max_length=MAX_PARTS), FIRST_ERROR] | None = None
    logprobs: Annotated[list[OutputLogprob], Field(max_length=MAX_LOGPROB_TOKENS), FIRST_ERROR] | None = None
    prompt_cache_breakpoint: None = None


class SummaryPart(Strict):
    type: Literal["summary_text"]
    text: Dropped


class ThoughtPart(Strict):
    type: Literal["reasoning_text"]
    text: str


def _shape(value: Any) -> str:
    return "text" if isinstance(value, str) else "list"


TEXT_OR_LIST = Discriminator(_shape)
"""Of a union of Text and a list with the tag LIST: an error names the element that is wrong, not the list alone."""
Text = Annotated[str, Tag("text")]
LIST = Tag("list")


Part = Annotated[Annotated[ItemPart, TEXT] | Annotated[RefusalPart, REFUSAL], Discriminator(part_kind)]


class MessageItem(Strict):
    """A message of the conversation."""

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Text | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS), FIRST_ERROR, LIST], TEXT_OR_LIST
    ]
    id: Short | None = None
    status: Status | None = None
    phase: None = None


class ReasoningItem(Strict):
    """Reasoning before an answer: the chat template gets its content, nothing else of it is read."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart], Field(max_length=MAX_PARTS), FIRST_ERROR]
    content: Annotated[list[ThoughtPart], Field(max_length=MAX_PARTS), FIRST_ERROR] | None = None
    encrypted_content: Dropped | None = None
    id: Short | None = None
    status: Status | None = None


class DirectCaller(Strict):
    """The model itself called a tool, and no program."""

    type: Literal["direct"]


class _Repeated(Strict):
    """An item of an earlier answer, or one that belongs to it: fields that are null are as those that are left out."""

    id: Short | None = None
    call_id: Name
    status: Status | None = None
    caller: DirectCaller | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, item: Any) -> Any:
        return {key: one for key, one in item.items() if one is not None} if isinstance(item, dict) else item


class FunctionCallItem(_Repeated):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    name: Name
    arguments: str


class CustomCallItem(_Repeated):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    name: Name
    input: str


class OutputPart(Strict):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: None = None


class CallOutputItem(_Repeated):
    """The output of a call, for the model to read."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    output: Annotated[Text | Annotated[list[OutputPart], Field(max_length=MAX_PARTS), FIRST_ERROR, LIST], TEXT_OR_LIST]


_KINDS: Mapping[Any, str] = {
    "reasoning": "ReasoningItem",
    "function_call": "FunctionCallItem",
    "function_call_output": "CallOutputItem",
    "custom_tool_call": "CustomCallItem",
    "custom_tool_call_output": "CallOutputItem",
}


def _item(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return _KINDS.get(kind, "MessageItem") if isinstance(kind, str) else "MessageItem"


Item = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")]
    | Annotated[FunctionCallItem, Tag("FunctionCallItem")]
    | Annotated[CustomCallItem, Tag("CustomCallItem")]
    | Annotated[CallOutputItem, Tag("CallOutputItem")],
    Discriminator(_item),
]


def check_items(items: Any) -> None:
    """UnsupportedParameterError that names an item, a part or a field of it that OpenAI knows and this server lacks;
    InvalidRequestError for a refusal in another role than the assistant's."""
    for position, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            _check(item, f"input[{position}]")


def _check(item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type")
    if kind == "item_reference" or (kind is None and "id" in item and item.keys() <= {"id", "type"}):
        field = "type" if kind else "id"
        todo = "send the item itself, or continue its response by previous_response_id"
        raise _unsupported(f"{where}.{field}", "a reference to an item", todo)
    if isinstance(kind, str) and kind in _KINDS:
        _check_texts(item.get("output"), f"{where}.output")
        return
    if isinstance(kind, str) and kind != "message":
        todo = "send messages, reasoning, calls and their outputs only"
        raise _unsupported(f"{where}.type", f"an item of type {quoted(kind)}", todo)
    if item.get("phase") is not None:
        raise _unsupported(f"{where}.phase", "phase", "leave it out")
    content = item.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict):
            _check_part(part, item.get("role"), f"{where}.content[{number}]")


def _check_texts(parts: Any, where: str) -> None:
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "input_text":
            raise _unsupported(f"{where}[{number}].type", f"an output of type {quoted(kind)}", "send text only")


def _check_part(part: Mapping[str, Any], role: Any, where: str) -> None:
    kind = part.get("type")
    if kind == "refusal":
        if role in ("system", "developer", "user"):
            what, why = f"{where}.type is refusal", f"only answers have it, and the role is {role}"
            raise InvalidRequestError(what, why=why, todo="send text", param=f"{where}.type")
    elif isinstance(kind, str) and kind not in _TEXTS:
        raise _unsupported(f"{where}.type", f"content of type {quoted(kind)}", "send text only")
    if part.get("prompt_cache_breakpoint") is not None:
        raise _unsupported(f"{where}.prompt_cache_breakpoint", "prompt_cache_breakpoint", "leave it out")


def _unsupported(param: str, what: str, todo: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(f"{what} is not supported yet", todo=todo, param=param)
