"""Tools, and the choice among them, of /v1/messages as a chat takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.core.errors import InvalidRequestError
from tandem.router.api.http.messages.schemas import ToolChoiceParam, ToolParam

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: Sequence[ToolParam]) -> list[dict[str, Any]]:
    """The `tools` of a chat. Nothing of Anthropic's cache is in them, so a breakpoint that moves changes no prompt."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def chat_tool_choice(choice: ToolChoiceParam | None, tools: Sequence[ToolParam]) -> dict[str, Any]:
    """The fields of a chat that say which tools are called: `tool_choice` and `parallel_tool_calls`, where given.

    InvalidRequestError for the choice of a tool that there is not.
    """
    if choice is None:
        return {}
    _check(choice, tools)
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": named if choice.type == "tool" else _CHOICES[choice.type]}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _check(choice: ToolChoiceParam, tools: Sequence[ToolParam]) -> None:
    if (choice.type == "tool") != (choice.name is not None):
        why = "the type tool needs it, and no other has it"
        raise InvalidRequestError("tool_choice.name is wrong", why=why, param="tool_choice.name")
    if choice.type in ("any", "tool") and not tools:
        what = f"tool_choice is of type {choice.type}"
        raise InvalidRequestError(what, why="there are no tools", todo="send tools", param="tool_choice.type")
    if choice.name is not None and choice.name not in {tool.name for tool in tools}:
        what = f"tool_choice.name is {choice.name!r}"
        raise InvalidRequestError(what, why="no tool has that name", param="tool_choice.name")


def _function(tool: ToolParam) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return function
