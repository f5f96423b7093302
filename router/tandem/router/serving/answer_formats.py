"""Applies the formats of a model to a request: reasoning effort, the grammar of calls, and the parsing of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tandem.core.errors import InvalidRequestError, UnsupportedParameterError
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.output_formats.parser import ParserSpec
from tandem.router.output_formats.registry import ModelFormats
from tandem.router.tokenization.tokenizer import Tokenizer

_PARSED_APIS = ("chat", "responses", "messages")
_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn reasoning on or off: Qwen's and others', DeepSeek's."""
_LEVELS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Levels of gpt-oss for those that it does not know."""
_PROMPT_END_TOKENS = 16
"""Enough to see whether a prompt ends with the beginning of reasoning."""


def with_effort(ask: GenerationRequest, tokenizer: Tokenizer) -> GenerationRequest:
    """`ask` with its reasoning effort as variables of the chat template; those that the client gave itself win.

    InvalidRequestError if the template reads none; an effort of "none" asks such a model for nothing, and messages ask
    for thoughts where there are any.
    """
    if ask.effort is None:
        return ask
    switches: dict[str, Any] = {name: ask.effort != "none" for name in _SWITCHES if tokenizer.reads(name)}
    if tokenizer.reads("reasoning_effort"):
        switches["reasoning_effort"] = _LEVELS.get(ask.effort, ask.effort)
    if not switches and ask.effort != "none" and ask.api != "messages":
        why = "the model's chat template does not read it"
        param = "reasoning.effort" if ask.api == "responses" else "reasoning_effort"
        raise InvalidRequestError(f"{param} is {ask.effort}", why=why, todo="leave it out", param=param)
    variables = {**switches, **ask.rendering.variables}
    return replace(ask, rendering=replace(ask.rendering, variables=variables))


def with_call_grammar(ask: GenerationRequest, formats: ModelFormats) -> GenerationRequest:
    """`ask` with the grammar of the calls that its answer may, or must, contain; InvalidRequestError if the model
    cannot call tools."""
    if ask.tools is None:
        return ask
    if formats.tools is None:
        what, why = "this model cannot call tools", "its chat template has no known format of calls"
        raise InvalidRequestError(what, why=why, todo="leave tools out, or name a tool_format", param="tools")
    if ask.tools.is_forced:
        what = "tool_choice can only be none or auto yet"
        raise UnsupportedParameterError(what, todo="use auto", param="tool_choice")
    return ask


def parsing_of(
    ask: GenerationRequest, prompt: Sequence[int], tokenizer: Tokenizer, formats: ModelFormats
) -> ParserSpec | None:
    """How answers to `prompt` are taken apart; None = they are content alone."""
    tools = formats.tools if ask.tools is not None else None
    if ask.api not in _PARSED_APIS or (tools is None and formats.reasoning is None):
        return None
    used = replace(formats, tools=tools)
    tokens = tokenizer.added_tokens
    begin = formats.reasoning.begin if formats.reasoning is not None else ""
    end = tokenizer.decode_all(list(prompt[-_PROMPT_END_TOKENS:])).rstrip() if begin else ""
    return ParserSpec(
        tools=tools,
        reasoning=formats.reasoning,
        schemas=ask.tools.schemas if ask.tools is not None else {},
        tags={tokens[tag]: tag for tag in used.tags if tag in tokens},
        begins_inside=bool(begin) and end.endswith(begin),
        is_parallel=ask.tools is None or ask.tools.is_parallel,
    )
