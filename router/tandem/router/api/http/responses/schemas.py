"""Requests that /v1/responses accepts: strict types; OpenAI features that this server lacks are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.core.errors import UnsupportedParameterError
from tandem.router.api.http.output_fields import FlatFormat
from tandem.router.api.http.responses.items import LIST, TEXT_OR_LIST, Item, Text, check_items
from tandem.router.api.http.responses.tools import ToolChoice, Tools, check_tools
from tandem.router.api.http.schemas import Int, Name, Short, StreamOptions
from tandem.router.api.http.strict_models import FIRST_ERROR, Strict
from tandem.router.api.http.tool_fields import Effort
from tandem.router.serving.request_parser import MAX_MESSAGES

_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)

# Values that ask for nothing; any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": _NOTHING,
    "background": _NOTHING,
    "background_options": _NOTHING,
    "context_management": _NOTHING,
    "conversation": _NOTHING,
    "image": _NOTHING,
    "include": (*_NOTHING, ["reasoning.encrypted_content"]),  # what the model thought is in `content`, readable
    "max_tool_calls": (None,),
    "moderation": _NOTHING,
    "prompt": _NOTHING,
    "prompt_cache_options": _NOTHING,
    "prompt_cache_retention": (None, "in_memory"),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}

_KNOWN_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "text": {"verbosity": (None, "medium")},
    "reasoning": {"summary": (None, "auto")},
}
"""The same, of fields of an object."""
MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]


class TextOptions(Strict):
    format: FlatFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict):
    """`summary`: "auto" asks for the most detailed one there is; the answer has the reasoning itself."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponseRequest(Strict):
    model: Name
    input: Annotated[
        Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ERROR, LIST], TEXT_OR_LIST
    ]
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Name | None = None
    # Repeated in the response, and kept with it; the tiers are the same.
    user: Name | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Short | None = None


def without_neutral(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without parameters that ask for nothing; UnsupportedParameterError for the others, and for such items
    and tools."""
    kept = {}
    for name, given in body.items():
        # Objects of the answer come back with all their fields, those without a value as null.
        value = {key: one for key, one in given.items() if one is not None} if isinstance(given, dict) else given
        if name not in NEUTRAL:
            kept[name] = given
        elif not any(type(value) is type(one) and value == one for one in NEUTRAL[name]):
            raise UnsupportedParameterError(f"{name} is not supported yet", todo="leave it out", param=name)
    for name, options in _KNOWN_OPTIONS.items():
        given = body.get(name)
        if isinstance(given, dict):
            _check_options(name, given, options)
    check_tools(body.get("tools"), body.get("tool_choice"))
    check_items(body.get("input"))
    return kept


def _check_options(name: str, given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for option, values in neutral.items():
        if given.get(option) not in values:
            param = f"{name}.{option}"
            raise UnsupportedParameterError(f"{param} is not supported yet", todo="leave it out", param=param)
