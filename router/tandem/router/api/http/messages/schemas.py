"""Requests that /v1/messages accepts: strict types; Anthropic features that this server lacks are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.core.errors import UnsupportedParameterError
from tandem.router.api.http.messages.blocks import Block, TextBlock, Values, check_blocks
from tandem.router.api.http.responses.items import LIST, TEXT_OR_LIST, Text
from tandem.router.api.http.schemas import MAX_PARTS, CacheControl, Int, Name
from tandem.router.api.http.strict_models import FIRST_ERROR, Strict
from tandem.router.api.http.tool_fields import MAX_DESCRIPTION
from tandem.router.error_quoting import quoted
from tandem.router.serving.request_parser import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS

MAX_TOOLS = 512
"""Clients offer those of all servers that they are connected to."""
_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)
_KEPT_THOUGHTS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

# Values that ask for nothing; any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": _NOTHING,
    "context_management": (*_NOTHING, {"edits": []}, _KEPT_THOUGHTS),
    "diagnostics": (None,),
    "inference_geo": _NOTHING,
    "mcp_servers": _NOTHING,
    "speed": (None, "standard"),
    "thread": (None, False),
    "user_profile_id": (None,),
    "workspace_id": (None,),
}


class MessageParam(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | Annotated[list[Block], Field(max_length=MAX_PARTS), FIRST_ERROR, LIST], TEXT_OR_LIST]


class ToolParam(Strict):
    """A tool that the client runs."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$", max_length=128)]
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    input_schema: Values
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1), FIRST_ERROR] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolChoiceParam(Strict):
    """`name` is of the type "tool" alone."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=128)] | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Strict):
    """`budget_tokens` is of the type "enabled" alone."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[Values, Field(alias="schema")]


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class UserMetadata(Strict):
    """Information for the operator of a server that keeps it; this one keeps nothing."""

    user_id: Name | None = None


class CountTokensRequest(Strict):
    """The fields that a prompt is made of."""

    model: Name
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ERROR]
    system: (
        Annotated[Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS), FIRST_ERROR, LIST], TEXT_OR_LIST]
        | None
    ) = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS), FIRST_ERROR] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[Int, Field(ge=1)]
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(max_length=MAX_STOPS),
            FIRST_ERROR,
        ]
        | None
    ) = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    metadata: UserMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def without_neutral(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without parameters that ask for nothing; UnsupportedParameterError for the others, and for blocks and
    tools that this server lacks."""
    kept = {}
    for name, value in body.items():
        if name not in NEUTRAL:
            kept[name] = value
        elif not any(type(value) is type(one) and value == one for one in NEUTRAL[name]):
            raise UnsupportedParameterError(f"{name} is not supported yet", todo="leave it out", param=name)
    check_blocks(body.get("messages"))
    _check_tools(body.get("tools"))
    return kept


def _check_tools(tools: Any) -> None:
    """Name tools that Anthropic's servers run, rather than call them a wrong type."""
    for position, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            param = f"tools[{position}].type"
            what = f"{param} is {quoted(kind)}: tools that the server runs are not supported"
            raise UnsupportedParameterError(what, todo="send tools of your own", param=param)
