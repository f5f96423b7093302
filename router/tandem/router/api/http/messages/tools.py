"""Tools, and the choice among them, of /v1/messages as a chat takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.core.errors import InvalidRequestError
from tandem.router.api.http.messages.schemas import ToolChoiceParam, ToolParam
from tandem.router.api.http.tool_fields import (
    Chosen,
    Function,
    described,
    tool_use_of,
)
from tandem.router.error_quoting import quoted
from tandem.router.output_formats.choice import Mode, ToolUse

_MODES: Mapping[str, Mode] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def chat_tools(tools: Sequence[ToolParam]) -> tuple[Mapping[str, Any], ...]:
    """Tools as chat templates read them; InvalidRequestError for schemas that are too large, and for equal names.
    Nothing of Anthropic's cache is in them, so a breakpoint that moves changes no prompt."""
    return described((_function(tool), f"tools[{position}].function") for position, tool in enumerate(tools))


def tool_use(tools: Sequence[ToolParam], choice: ToolChoiceParam | None) -> ToolUse | None:
    """How the answer may call `tools`; None = not at all. InvalidRequestError for a choice that there is not."""
    if choice is None:
        return tool_use_of(chat_tools(tools), ("auto", ()), is_parallel=True)
    if (choice.type == "tool") != (choice.name is not None):
        why = "the type tool needs it, and no other has it"
        raise InvalidRequestError("tool_choice.name is wrong", why=why, param="tool_choice.name")
    if choice.name is not None and choice.name not in {tool.name for tool in tools}:
        what = f"tool_choice.name is {quoted(choice.name)}"
        raise InvalidRequestError(what, why="no tool has that name", param="tool_choice.name")
    return tool_use_of(chat_tools(tools), _chosen(choice), is_parallel=not choice.disable_parallel_tool_use)


def _chosen(choice: ToolChoiceParam) -> Chosen:
    return _MODES[choice.type], () if choice.name is None else (("tool_choice.name", choice.name),)


def _function(tool: ToolParam) -> Function:
    """Checked already: names may be longer than OpenAI's."""
    return Function.model_construct(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
