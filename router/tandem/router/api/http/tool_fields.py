"""Fields of chat requests for tools and reasoning, and what the router makes of them.

Schemas of parameters are free-form JSON for the model's template; their size and depth are bounded here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Discriminator, Field, Tag

from tandem.core.errors import InvalidRequestError, UnsupportedParameterError
from tandem.router.api.http.output_fields import PlainTextFormat
from tandem.router.api.http.strict_models import FIRST_ERROR, Strict
from tandem.router.error_quoting import quoted
from tandem.router.output_formats.choice import Mode, ThoughtLimit, ToolUse
from tandem.router.output_formats.custom_tools import Customs, InputGrammar, arguments_with, parameters_of

MAX_TOOLS = 128
"""Of a request, and calls of one answer."""
MAX_INPUT_GRAMMARS = 16
"""Of custom tools of a request: each is compiled to check it."""
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_TOOLS_BYTES = 512 * 1024
"""Of all tools of a request together: the model reads them with every prompt."""
MAX_DESCRIPTION = 32 * 1024
MAX_SCHEMA_KEYS = 256
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", max_length=64)]
SchemaKey = Annotated[str, Field(max_length=512)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Limit = Annotated[int, Field(ge=0, lt=2**31)]
REASONING = {"reasoning_effort", "include_reasoning", "thinking_token_budget", "reasoning"}
_DESCRIBED = {"name", "description", "parameters", "strict"}
Chosen = tuple[Mode, Sequence[tuple[str, str]]]
"""How tools may be called, and the functions that a request names for it, each behind the path of its name."""


class Function(Strict):
    name: FunctionName
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    parameters: Annotated[dict[SchemaKey, Any], Field(max_length=MAX_SCHEMA_KEYS)] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


def _kind(value: Any) -> str:
    return CUSTOM.tag if isinstance(value, Mapping) and value.get("type") == "custom" else FUNCTION.tag


FUNCTION, CUSTOM = Tag("a function"), Tag("a custom tool")
KIND = Discriminator(_kind)
"""Tells models of functions from those of custom tools: tools, references to them, and calls."""


class GrammarDefinition(Strict):
    """A grammar of the inputs of a custom tool: Lark in llguidance's dialect, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_BYTES)]


class GrammarFormat(Strict):
    type: Literal["grammar"]
    grammar: GrammarDefinition


class CustomFields(Strict):
    name: FunctionName
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None


class Custom(CustomFields):
    format: Annotated[PlainTextFormat | GrammarFormat, Field(discriminator="type")] | None = None


class CustomTool(Strict):
    """A tool whose input is a text."""

    type: Literal["custom"]
    custom: Custom


class FunctionReference(Strict):
    name: FunctionName


class NamedChoice(Strict):
    """The one function that the answer must call."""

    type: Literal["function"]
    function: FunctionReference


class NamedCustomChoice(Strict):
    """The one custom tool that the answer must call."""

    type: Literal["custom"]
    custom: FunctionReference


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[Annotated[NamedChoice, FUNCTION] | Annotated[NamedCustomChoice, CUSTOM], KIND]],
        Field(min_length=1, max_length=MAX_TOOLS),
        FIRST_ERROR,
    ]


class AllowedChoice(Strict):
    """The functions that the answer may call, of all that the model is told about."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "mode"
    return {"allowed_tools": "allowed", "custom": "custom"}.get(str(value.get("type")), "named")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedChoice, Tag("named")]
    | Annotated[NamedCustomChoice, Tag("custom")]
    | Annotated[AllowedChoice, Tag("allowed")],
    Discriminator(_choice_kind),
]
Tools = Annotated[
    list[Annotated[Annotated[Tool, FUNCTION] | Annotated[CustomTool, CUSTOM], KIND]],
    Field(max_length=MAX_TOOLS),
    FIRST_ERROR,
]


class CalledFunction(Strict):
    """`parsed_arguments`: what helpers of the `openai` package made of the arguments; nothing is done with it."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Strict):
    """A call in an earlier answer, as it was given."""

    id: Annotated[str, Field(min_length=1, max_length=512)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class CalledCustomTool(Strict):
    name: Annotated[str, Field(min_length=1, max_length=512)]
    input: str


class CustomToolCall(Strict):
    """A call of a custom tool in an earlier answer, as it was given."""

    id: Annotated[str, Field(min_length=1, max_length=512)]
    type: Literal["custom"]
    custom: CalledCustomTool
    index: Annotated[int, Field(ge=0, lt=2**31)] | None = None


ToolCalls = Annotated[
    list[Annotated[Annotated[ToolCall, FUNCTION] | Annotated[CustomToolCall, CUSTOM], KIND]],
    Field(max_length=MAX_TOOLS),
    FIRST_ERROR,
]


class ReasoningParam(Strict):
    """As OpenRouter takes it."""

    effort: Effort | None = None
    max_tokens: Limit | None = None
    exclude: bool | None = None
    enabled: bool | None = None


class ToolFields(Strict):
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Limit | None = None
    reasoning: ReasoningParam | None = None


def reasoning_of(body: ToolFields) -> dict[str, Any]:
    """How much the model thinks and if the answer shows it, as fields of GenerationRequest; InvalidRequestError for
    fields that contradict each other."""
    given = body.reasoning or ReasoningParam()
    effort = given.effort if given.enabled is None else given.effort or ("medium" if given.enabled else "none")
    if given.enabled is False and effort != "none":
        what = f"reasoning.effort is {effort} with reasoning.enabled false"
        raise InvalidRequestError(what, todo="give one of them", param="reasoning.effort")
    excludes = body.include_reasoning is False if given.exclude is None else given.exclude
    budget, limit = body.thinking_token_budget, given.max_tokens
    pairs = (
        ("reasoning_effort", body.reasoning_effort, "reasoning.effort", effort),
        ("include_reasoning", body.include_reasoning, "reasoning.exclude", not excludes),
        ("thinking_token_budget", budget, "reasoning.max_tokens", limit),
    )
    for name, value, param, other in pairs:
        if value is not None and other is not None and value != other:
            raise InvalidRequestError(f"{name} and {param} differ", todo="give one of them", param=param)
    bound = None
    if budget is not None:
        bound = ThoughtLimit(budget, "thinking_token_budget")
    elif limit is not None:
        bound = ThoughtLimit(limit, "reasoning.max_tokens")
    return {"effort": body.reasoning_effort or effort, "shows_reasoning": not excludes, "thought_limit": bound}


def refuse_kinds(body: Mapping[str, Any]) -> None:
    """Name kinds of tools that OpenAI knows, rather than call them wrong types: UnsupportedParameterError."""
    tools = body.get("tools")
    for position, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("function", "custom"):
            what = f"a tool of type {quoted(kind)} is not supported yet"
            todo = "send functions and custom tools"
            raise UnsupportedParameterError(what, todo=todo, param=f"tools[{position}].type")
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in ("function", "custom", "allowed_tools"):
        what = f"tool_choice of type {quoted(kind)} is not supported yet"
        raise UnsupportedParameterError(what, todo="name a tool", param="tool_choice.type")


def tools_of(tools: Sequence[Tool | CustomTool]) -> tuple[Mapping[str, Any], ...]:
    """Tools as chat templates read them; InvalidRequestError as `described`."""
    customs = _customs_of(tools)
    return described(
        (tool.function, f"tools[{position}].function")
        if isinstance(tool, Tool)
        else (function_for(tool.custom, customs[tool.custom.name]), f"tools[{position}].custom")
        for position, tool in enumerate(tools)
    )


def _customs_of(tools: Sequence[Tool | CustomTool]) -> Customs:
    customs = {}
    for position, tool in enumerate(tools):
        if isinstance(tool, CustomTool):
            form = tool.custom.format
            given = form.grammar if isinstance(form, GrammarFormat) else None
            customs[tool.custom.name] = input_grammar(given, f"tools[{position}].custom.format.grammar")
    return customs


def input_grammar(given: GrammarDefinition | None, param: str) -> InputGrammar | None:
    """The grammar at `param` in a request; None = any text."""
    return None if given is None else InputGrammar(syntax=given.syntax, definition=given.definition, param=param)


def function_for(custom: CustomFields, grammar: InputGrammar | None) -> Function:
    """The function that stands for a custom tool. With a grammar it is strict, so that the grammar holds."""
    return Function(
        name=custom.name,
        description=custom.description,
        parameters=parameters_of(grammar),
        strict=None if grammar is None else True,
    )


def described(functions: Iterable[tuple[Function, str]]) -> tuple[Mapping[str, Any], ...]:
    """Functions, each with its path in the request, as chat templates read them; InvalidRequestError for schemas that
    are too large, and for equal names."""
    given, names, total = [], set[str](), 0
    for function, where in functions:
        if function.name in names:
            what = f"two tools are called {function.name}"
            raise InvalidRequestError(what, todo="give each a name of its own", param=f"{where}.name")
        names.add(function.name)
        total += len(function.description or "") + _schema_bytes(function.parameters, f"{where}.parameters")
        if total > MAX_TOOLS_BYTES:
            why = f"at most {MAX_TOOLS_BYTES} bytes are allowed together"
            raise InvalidRequestError("the tools are too large", why=why, todo="send fewer", param="tools")
        written = function.model_dump(include=_DESCRIBED, exclude_none=True)
        given.append({"type": "function", "function": written})
    return tuple(given)


def chat_tool_use(
    body: ToolFields, tools: Sequence[Mapping[str, Any]], given: Sequence[Tool | CustomTool]
) -> ToolUse | None:
    """How the answer to a chat may call `tools`, those that it has `given`; see `tool_use_of`."""
    is_parallel = body.parallel_tool_calls is not False
    return tool_use_of(tools, _chosen(body.tool_choice), is_parallel=is_parallel, customs=_customs_of(given))


def tool_use_of(
    tools: Sequence[Mapping[str, Any]], choice: Chosen, *, is_parallel: bool, customs: Customs | None = None
) -> ToolUse | None:
    """How the answer may call `tools`, of which `customs` stand for custom tools; None = not at all."""
    mode, allowed = choice
    names = tuple(str(tool["function"]["name"]) for tool in tools)
    if not tools:
        if mode not in ("none", "auto"):
            what = "tool_choice asks for a call, and there are no tools"
            raise InvalidRequestError(what, todo="send tools", param="tool_choice")
        return None
    if mode == "none":
        return None
    grammars = sum(one is not None for one in (customs or {}).values())
    if grammars > MAX_INPUT_GRAMMARS:
        what, why = f"{grammars} custom tools have a grammar", f"at most {MAX_INPUT_GRAMMARS} may have one"
        raise InvalidRequestError(what, why=why, todo="leave some out", param="tools")
    for param, name in allowed:
        if name not in names:
            why = f"tools has {', '.join(map(quoted, names[:8]))}"
            raise InvalidRequestError(f"{param} is {quoted(name)}", why=why, todo="name one of them", param=param)
    kept = tuple(dict.fromkeys(name for _, name in allowed)) or names
    is_parallel = is_parallel and mode != "named"
    return ToolUse(tools=tools, mode=mode, allowed=kept, is_parallel=is_parallel, customs=customs or {})


def _chosen(choice: ToolChoice | None) -> Chosen:
    if isinstance(choice, NamedChoice):
        return "named", [("tool_choice.function.name", choice.function.name)]
    if isinstance(choice, NamedCustomChoice):
        return "named", [("tool_choice.custom.name", choice.custom.name)]
    if isinstance(choice, AllowedChoice):
        where = "tool_choice.allowed_tools.tools"
        return choice.allowed_tools.mode, [
            (f"{where}[{position}].function.name", one.function.name)
            if isinstance(one, NamedChoice)
            else (f"{where}[{position}].custom.name", one.custom.name)
            for position, one in enumerate(choice.allowed_tools.tools)
        ]
    return choice or "auto", []


def calls_of(calls: Sequence[ToolCall | CustomToolCall]) -> list[dict[str, Any]]:
    """Calls of an earlier answer, for templates. Arguments are as they were given: a model may have written no JSON."""
    return [
        call_of(call.id, call.function.name, call.function.arguments.strip() or "{}")
        if isinstance(call, ToolCall)
        else call_of(call.id, call.custom.name, arguments_with(call.custom.input))
        for call in calls
    ]


def call_of(given_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as chat templates read it."""
    return {"id": given_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def named_results(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """With the name of the function in each message of the role tool, which some templates read."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names.update((call["id"], call["function"]["name"]) for call in message.get("tool_calls") or ())
        if message["role"] == "tool" and not message.get("name"):
            message = {**message, "name": names.get(message["tool_call_id"])}
        named.append(message)
    return tuple(named)


def _schema_bytes(schema: Mapping[str, Any] | None, param: str) -> int:
    if schema is None:
        return 0
    if any(depth > MAX_SCHEMA_DEPTH for depth in _depths(schema)):
        why = f"at most {MAX_SCHEMA_DEPTH} levels are allowed"
        raise InvalidRequestError(f"{param} is nested too deeply", why=why, todo="flatten it", param=param)
    size = len(orjson.dumps(schema))
    if size > MAX_SCHEMA_BYTES:
        why = f"at most {MAX_SCHEMA_BYTES} are allowed"
        raise InvalidRequestError(f"{param} has {size} bytes", why=why, todo="shorten it", param=param)
    return size


def _depths(schema: Mapping[str, Any]) -> Iterator[int]:
    """The depth of each level, from the outside."""
    depth = 0
    here: list[Any] = [schema]
    while here:
        depth += 1
        yield depth
        inside = [value for one in here for value in (one.values() if isinstance(one, Mapping) else one)]
        here = [value for value in inside if isinstance(value, Mapping | list)]
