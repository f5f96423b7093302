"""What clients may send to /v1/responses: strict types; what OpenAI knows and this server lacks is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.core.errors import UnsupportedParameterError
from tandem.router.asking.asks import MAX_MESSAGES
from tandem.router.doors.http.schemas import (
    FIRST_ERROR,
    MAX_PARTS,
    Int,
    Name,
    Short,
    StreamOptions,
    Strict,
)
from tandem.router.quoting import quoted

_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)

# Values that ask for nothing; any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": _NOTHING,
    "background": _NOTHING,
    "background_options": _NOTHING,
    "context_management": _NOTHING,
    "conversation": _NOTHING,
    "image": _NOTHING,
    "include": _NOTHING,
    "max_tool_calls": (None,),
    "moderation": _NOTHING,
    "parallel_tool_calls": (None, True, False),
    "prompt": _NOTHING,
    "prompt_cache_options": _NOTHING,
    "prompt_cache_retention": (None, "in_memory"),
    "reasoning": (None, {}, {"effort": None}, {"effort": "none"}, {"effort": None, "summary": None}),
    "text": (
        None,
        {},
        {"format": {"type": "text"}},
        {"verbosity": "medium"},
        {"format": {"type": "text"}, "verbosity": "medium"},
    ),
    "tool_choice": (None, "none", "auto"),
    "tools": _NOTHING,
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
_TEXTS = ("input_text", "output_text")

MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]


Nothing = Annotated[list[Any], Field(max_length=0)]


class ItemPart(Strict):
    """A part of a message; parts of earlier answers come back as the server gave them."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


class Item(Strict):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ItemPart], Field(min_length=1, max_length=MAX_PARTS), FIRST_ERROR]
    id: Short | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: None = None


class ResponseRequest(Strict):
    model: Name
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ERROR]
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Name | None = None
    # Told again in the response, and kept with it; the tiers are the same.
    user: Name | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Short | None = None


def without_neutral(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without parameters that ask for nothing; UnsupportedParameterError for the others and for such items."""
    kept = {}
    for name, value in body.items():
        if name not in NEUTRAL:
            kept[name] = value
        elif not any(type(value) is type(one) and value == one for one in NEUTRAL[name]):
            raise UnsupportedParameterError(f"{name} is not supported yet", todo="leave it out", param=name)
    items = body.get("input")
    for position, item in enumerate(items if isinstance(items, list) else ()):
        _refuse(item, f"input[{position}]")
    return kept


def _refuse(item: Any, where: str) -> None:
    """Name items and parts that OpenAI knows, rather than call them wrong types."""
    if not isinstance(item, dict):
        return
    kind = item.get("type", "message")
    if isinstance(kind, str) and kind != "message":
        raise _unsupported(f"{where}.type", f"an item of type {quoted(kind)}", "send messages only")
    if item.get("phase") is not None:
        raise _unsupported(f"{where}.phase", "phase", "leave it out")
    content = item.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict):
            _refuse_part(part, f"{where}.content[{number}]")


def _refuse_part(part: Mapping[str, Any], where: str) -> None:
    kind = part.get("type")
    if isinstance(kind, str) and kind not in _TEXTS:
        raise _unsupported(f"{where}.type", f"content of type {quoted(kind)}", "send text only")
    for name in ("annotations", "logprobs"):
        if part.get(name):
            raise _unsupported(f"{where}.{name}", name, "send the text alone")


def _unsupported(param: str, what: str, todo: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(f"{what} is not supported yet", todo=todo, param=param)
