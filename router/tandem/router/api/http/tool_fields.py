"""Fields of chat requests for tools and reasoning, and what the router makes of them.

Schemas of parameters are free-form JSON for the model's template; their size and depth are bounded here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Discriminator, Field, Tag

from tandem.core.errors import InvalidRequestError, UnsupportedParameterError
from tandem.router.api.http.strict_models import FIRST_ERROR, Strict
from tandem.router.error_quoting import quoted
from tandem.router.output_formats.choice import Mode, ToolUse

MAX_TOOLS = 128
"""Of a request, and calls of one answer."""
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_TOOLS_BYTES = 512 * 1024
"""Of all tools of a request together: the model reads them with every prompt."""
MAX_DESCRIPTION = 32 * 1024
MAX_SCHEMA_KEYS = 256
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", max_length=64)]
SchemaKey = Annotated[str, Field(max_length=512)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_KNOWN_CHOICES = ("none", "auto", "required")


class Function(Strict):
    name: FunctionName
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    parameters: Annotated[dict[SchemaKey, Any], Field(max_length=MAX_SCHEMA_KEYS)] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionReference(Strict):
    name: FunctionName


class NamedChoice(Strict):
    """The one function that the answer must call."""

    type: Literal["function"]
    function: FunctionReference


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS), FIRST_ERROR]


class AllowedChoice(Strict):
    """The functions that the answer may call, of all that the model is told about."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "mode"
    return "allowed" if value.get("type") == "allowed_tools" else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedChoice, Tag("named")]
    | Annotated[AllowedChoice, Tag("allowed")],
    Discriminator(_choice_kind),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), FIRST_ERROR]


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


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOLS), FIRST_ERROR]


class ToolFields(Strict):
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None


def refuse_kinds(body: Mapping[str, Any]) -> None:
    """Name kinds of tools that OpenAI knows, rather than call them wrong types: UnsupportedParameterError."""
    tools = body.get("tools")
    for position, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            what = f"a tool of type {quoted(kind)} is not supported yet"
            raise UnsupportedParameterError(what, todo="send functions", param=f"tools[{position}].type")
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        what = f"tool_choice of type {quoted(kind)} is not supported yet"
        raise UnsupportedParameterError(what, todo="name a function", param="tool_choice.type")


def tools_of(tools: Sequence[Tool] | None) -> tuple[Mapping[str, Any], ...]:
    """Tools as chat templates read them; InvalidRequestError for schemas that are too large, and for equal names."""
    given, names, total = [], set[str](), 0
    for position, tool in enumerate(tools or ()):
        where, name = f"tools[{position}].function", tool.function.name
        if name in names:
            what = f"two tools are called {name}"
            raise InvalidRequestError(what, todo="give each a name of its own", param=f"{where}.name")
        names.add(name)
        total += len(tool.function.description or "") + _schema_bytes(tool.function.parameters, f"{where}.parameters")
        if total > MAX_TOOLS_BYTES:
            why = f"at most {MAX_TOOLS_BYTES} bytes are allowed together"
            raise InvalidRequestError("the tools are too large", why=why, todo="send fewer", param="tools")
        given.append({"type": "function", "function": tool.function.model_dump(exclude_none=True)})
    return tuple(given)


def tool_use_of(
    tools: tuple[Mapping[str, Any], ...], choice: ToolChoice | None, *, is_parallel: bool
) -> ToolUse | None:
    """How the answer may call `tools`; None = not at all."""
    mode, allowed = _read(choice)
    names = tuple(str(tool["function"]["name"]) for tool in tools)
    if not tools:
        if mode not in ("none", "auto"):
            what = "tool_choice asks for a call, and there are no tools"
            raise InvalidRequestError(what, todo="send tools", param="tool_choice")
        return None
    if mode == "none":
        return None
    for param, name in allowed:
        if name not in names:
            why = f"tools has {', '.join(map(quoted, names[:8]))}"
            raise InvalidRequestError(f"{param} is {quoted(name)}", why=why, todo="name one of them", param=param)
    kept = tuple(dict.fromkeys(name for _, name in allowed)) or names
    return ToolUse(tools=tools, mode=mode, allowed=kept, is_parallel=is_parallel and mode != "named")


def _read(choice: ToolChoice | None) -> tuple[Mode, list[tuple[str, str]]]:
    """The mode, and the functions that are named, each behind the path of its name."""
    if isinstance(choice, NamedChoice):
        return "named", [("tool_choice.function.name", choice.function.name)]
    if isinstance(choice, AllowedChoice):
        named = enumerate(choice.allowed_tools.tools)
        return choice.allowed_tools.mode, [
            (f"tool_choice.allowed_tools.tools[{position}].function.name", one.function.name) for position, one in named
        ]
    return choice or "auto", []


def calls_of(calls: Sequence[ToolCall], where: str) -> list[dict[str, Any]]:
    """Calls of an earlier answer, for templates; InvalidRequestError for arguments that are no JSON object."""
    return [_call_of(call, f"{where}[{position}].function.arguments") for position, call in enumerate(calls)]


def _call_of(call: ToolCall, where: str) -> dict[str, Any]:
    text = call.function.arguments.strip() or "{}"
    try:
        is_object = isinstance(orjson.loads(text), dict)
    except ValueError as error:
        why = str(error)
        raise InvalidRequestError(f"{where} is no JSON", why=why, todo="send a JSON object", param=where) from error
    if not is_object:
        raise InvalidRequestError(f"{where} is no JSON object", todo="send a JSON object", param=where)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": text}}


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
