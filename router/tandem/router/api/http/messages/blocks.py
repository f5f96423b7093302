"""Content blocks of /v1/messages. Kinds that this server lacks are refused by name, rather than called a wrong type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tandem.core.errors import InvalidRequestError, UnsupportedParameterError
from tandem.router.api.http.responses.items import LIST, TEXT_OR_LIST, DirectCaller, Dropped, Text
from tandem.router.api.http.schemas import MAX_PARTS, CacheControl, Name
from tandem.router.api.http.strict_models import FIRST_ERROR, Strict
from tandem.router.error_quoting import quoted

MAX_FIELDS = 1024
"""Entries of a tool's input, and of the schema of one."""
Values = Annotated[dict[Name, Any], Field(max_length=MAX_FIELDS)]


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Strict):
    """Reasoning of an earlier answer. Its signature is not read."""

    type: Literal["thinking"]
    thinking: str
    signature: Dropped | None = None


class RedactedThinkingBlock(Strict):
    """Reasoning of an earlier answer that no model here can read."""

    type: Literal["redacted_thinking"]
    data: Dropped


class ToolUseBlock(Strict):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Values
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(Strict):
    """The result of a call; `is_error`: the call failed."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: (
        Annotated[Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS), FIRST_ERROR, LIST], TEXT_OR_LIST]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


_ROLES = {
    "text": ("user", "assistant", "system"),
    "tool_result": ("user",),
    "tool_use": ("assistant",),
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
}
"""By the type of a block: the roles whose messages have it."""


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return f"a {kind} block" if isinstance(kind, str) and kind in _ROLES else "a text block"


Block = Annotated[
    Annotated[TextBlock, Tag("a text block")]
    | Annotated[ThinkingBlock, Tag("a thinking block")]
    | Annotated[RedactedThinkingBlock, Tag("a redacted_thinking block")]
    | Annotated[ToolUseBlock, Tag("a tool_use block")]
    | Annotated[ToolResultBlock, Tag("a tool_result block")],
    Discriminator(_kind),
]


def check_blocks(messages: Any) -> None:
    """UnsupportedParameterError that names a block which Anthropic knows and this server lacks; InvalidRequestError for
    one in a message of a role that has none such."""
    for position, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        content, role = message.get("content"), message.get("role")
        for number, block in enumerate(content if isinstance(content, list) else ()):
            if isinstance(block, dict):
                _check_block(block, role, f"messages[{position}].content[{number}]")


def _check_block(block: Mapping[str, Any], role: Any, where: str) -> None:
    kind = block.get("type")
    if not isinstance(kind, str):
        return
    if kind not in _ROLES:
        raise _unsupported(f"{where}.type", kind)
    if role in ("user", "assistant", "system") and role not in _ROLES[kind]:
        what, why = f"{where} is of type {kind}", f"messages of the role {role} have none"
        raise InvalidRequestError(what, why=why, todo="leave it out", param=f"{where}.type")
    if kind == "tool_result":
        inner = block.get("content")
        for number, part in enumerate(inner if isinstance(inner, list) else ()):
            inside = part.get("type") if isinstance(part, dict) else None
            if isinstance(inside, str) and inside != "text":
                raise _unsupported(f"{where}.content[{number}].type", inside)


def _unsupported(param: str, kind: str) -> UnsupportedParameterError:
    what = f"{param} is {quoted(kind)}: content of this type is not supported yet"
    return UnsupportedParameterError(what, todo="send text", param=param)
