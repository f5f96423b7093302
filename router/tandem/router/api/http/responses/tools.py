"""Tools of /v1/responses, and the choice among them, as a chat takes them. Those that OpenAI's servers run are refused
by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tandem.core.errors import UnsupportedParameterError
from tandem.router.api.http.output_fields import PlainTextFormat
from tandem.router.api.http.strict_models import FIRST_ERROR, Strict
from tandem.router.api.http.tool_fields import (
    CUSTOM,
    FUNCTION,
    KIND,
    MAX_TOOLS,
    Chosen,
    CustomFields,
    Function,
    FunctionReference,
    GrammarDefinition,
    described,
    function_for,
    input_grammar,
    tool_use_of,
)
from tandem.router.error_quoting import quoted
from tandem.router.output_formats.choice import ToolUse

_SUPPORTED = ("function", "custom")


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class FlatGrammarFormat(GrammarDefinition):
    type: Literal["grammar"]


class FlatCustomTool(CustomFields):
    """A tool whose input is a text."""

    type: Literal["custom"]
    format: Annotated[PlainTextFormat | FlatGrammarFormat, Field(discriminator="type")] | None = None


class ChosenTool(FunctionReference):
    """One of the tools, by its name."""

    type: Literal["function", "custom"]


class AllowedToolsChoice(Strict):
    """The tools that the answer may call, of all that the model is told about."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS), FIRST_ERROR]


def _choice_kind(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "mode"
    return "allowed" if value.get("type") == "allowed_tools" else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[ChosenTool, Tag("named")]
    | Annotated[AllowedToolsChoice, Tag("allowed")],
    Discriminator(_choice_kind),
]
Tools = Annotated[
    list[Annotated[Annotated[FunctionTool, FUNCTION] | Annotated[FlatCustomTool, CUSTOM], KIND]],
    Field(max_length=MAX_TOOLS),
    FIRST_ERROR,
]


def check_tools(tools: Any, choice: Any) -> None:
    """UnsupportedParameterError that names a kind of tool which OpenAI knows and this server lacks."""
    _check_kinds(tools, "tools")
    if isinstance(choice, dict) and choice.get("type") != "allowed_tools":
        _check_kind(choice, "tool_choice")
    elif isinstance(choice, dict):
        _check_kinds(choice.get("tools"), "tool_choice.tools")


def _check_kinds(tools: Any, where: str) -> None:
    for position, tool in enumerate(tools if isinstance(tools, list) else ()):
        _check_kind(tool, f"{where}[{position}]")


def _check_kind(tool: Any, where: str) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind not in _SUPPORTED:
        what = f"a tool of type {quoted(kind)} is not supported yet"
        raise UnsupportedParameterError(what, todo="send functions and custom tools", param=f"{where}.type")


def tool_use(
    tools: Sequence[FunctionTool | FlatCustomTool], choice: ToolChoice | None, *, is_parallel: bool
) -> ToolUse | None:
    """How the answer may call `tools`; None = not at all. InvalidRequestError as `described` and `tool_use_of`."""
    customs = {
        tool.name: input_grammar(
            tool.format if isinstance(tool.format, FlatGrammarFormat) else None, f"tools[{position}].format"
        )
        for position, tool in enumerate(tools)
        if isinstance(tool, FlatCustomTool)
    }
    given = described(
        (tool if isinstance(tool, FunctionTool) else function_for(tool, customs[tool.name]), f"tools[{position}]")
        for position, tool in enumerate(tools)
    )
    return tool_use_of(given, _chosen(choice), is_parallel=is_parallel, customs=customs)


def _chosen(choice: ToolChoice | None) -> Chosen:
    if isinstance(choice, ChosenTool):
        return "named", [("tool_choice.name", choice.name)]
    if isinstance(choice, AllowedToolsChoice):
        return choice.mode, [(f"tool_choice.tools[{n}].name", one.name) for n, one in enumerate(choice.tools)]
    return choice or "auto", []
