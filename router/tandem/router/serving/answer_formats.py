"""Applies the formats of a model to a request: reasoning effort, the grammar of calls, and the parsing of answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tandem.core.errors import InvalidRequestError, UnsupportedParameterError
from tandem.core.output_grammar import OutputGrammar
from tandem.core.thought_budget import ThoughtBudget
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.error_quoting import shortened
from tandem.router.output_formats.argument_rules import whole_schema, with_options
from tandem.router.output_formats.choice import ThoughtLimit
from tandem.router.output_formats.grammar import Thinking, behind_reasoning, call_grammar, calls_or_answer
from tandem.router.output_formats.parser import ParserSpec
from tandem.router.output_formats.registry import ModelFormats
from tandem.router.tokenization.chat_template import Rendering
from tandem.router.tokenization.tokenizer import Tokenizer

_PARSED_APIS = ("chat", "messages", "responses")
_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn reasoning on or off: Qwen's and others', DeepSeek's."""
_LEVELS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Levels of gpt-oss for those that it does not know."""
_SCHEMA_PARAMS = {"chat": "function.parameters", "messages": "input_schema", "responses": "parameters"}
"""Where a tool has the schema of its arguments, by API."""
_PROMPT_END_TOKENS = 16
"""Enough to see whether a prompt ends with the beginning of reasoning."""


def with_effort(ask: GenerationRequest, tokenizer: Tokenizer) -> GenerationRequest:
    """`ask` with its reasoning effort as variables of the chat template; those that the client gave itself win.

    UnsupportedParameterError if the template reads none; an effort of "none" asks such a model for nothing, and
    messages ask for thoughts where there are any.
    """
    if ask.effort is None:
        return ask
    switches: dict[str, Any] = {name: ask.effort != "none" for name in _SWITCHES if tokenizer.reads(name)}
    if tokenizer.reads("reasoning_effort"):
        switches["reasoning_effort"] = _LEVELS.get(ask.effort, ask.effort)
    if not switches and ask.effort != "none" and ask.api != "messages":
        why = "the model's chat template does not read it"
        what = f"{ask.effort_param} is {ask.effort}"
        raise UnsupportedParameterError(what, why=why, todo="leave it out", param=ask.effort_param)
    variables = {**switches, **ask.rendering.variables}
    return replace(ask, rendering=replace(ask.rendering, variables=variables))


def with_call_grammar(ask: GenerationRequest, tokenizer: Tokenizer, formats: ModelFormats) -> GenerationRequest:
    """`ask` with the grammar of the calls that its answer may, or must, contain; one that it has begins behind
    reasoning. UnsupportedParameterError if the model cannot call tools."""
    if ask.tools is None:
        return _behind_reasoning(ask, tokenizer, formats)
    if formats.tools is None:
        what, why = "this model cannot call tools", "its chat template has no known format of calls"
        raise UnsupportedParameterError(what, why=why, todo="leave tools out, or name a tool_format", param="tools")
    if formats.tools.shape.style != "json" and not tokenizer.knows_tools:
        what, why = "this model cannot call tools", "its chat template writes none, and its format is not JSON"
        todo = "leave tools out, or name another chat_template"
        raise UnsupportedParameterError(what, why=why, todo=todo, param="tools")
    tags = _tags_of(formats, tokenizer)
    thinking = _thinking(ask.rendering, tokenizer, formats)
    if ask.output_grammar is not None and not ask.tools.is_forced:
        text = calls_or_answer(ask.output_grammar.text, formats, ask.tools, tags, thinking)
        return replace(ask, output_grammar=replace(ask.output_grammar, text=text))
    grammar = call_grammar(formats, ask.tools, tags, thinking)
    return ask if grammar is None else _constrained(ask, grammar)


def _constrained(ask: GenerationRequest, grammar: str) -> GenerationRequest:
    """`ask` whose answer follows `grammar`, a Lark grammar of llguidance."""
    assert ask.tools is not None
    if ask.output_grammar is not None:
        what, why = f"{ask.output_grammar.param} cannot be combined with these tools", "an answer follows one grammar"
        todo = f"leave {ask.output_grammar.param} out, or set tool_choice to none"
        raise UnsupportedParameterError(what, why=why, todo=todo, param=ask.output_grammar.param)
    param = "tool_choice" if ask.tools.is_forced else "tools"
    return replace(ask, output_grammar=OutputGrammar(grammar, param, "tools"))


def argument_schemas(ask: GenerationRequest) -> Iterator[OutputGrammar]:
    """The schemas of the arguments of each function alone, and of each argument: where the grammar of all calls is
    refused, the first that is refused, too, has the place of the fault. Formats that write arguments one by one refuse
    some that nothing fits, where JSON leaves them out."""
    use = ask.tools
    for position, tool in enumerate(use.tools if use is not None else ()):
        name, schema = tool["function"]["name"], tool["function"].get("parameters")
        if use is None or name not in use.allowed or name in use.customs or not schema:
            continue
        whole, param = whole_schema(schema), f"tools[{position}].{_SCHEMA_PARAMS[ask.api]}"
        shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        properties = whole.get("properties")
        arguments = properties.items() if isinstance(properties, Mapping) else ()
        named = [(f"{param}.properties.{shortened(key)}", one) for key, one in arguments if isinstance(one, Mapping)]
        for place, one in ((param, whole), *named):
            asked = with_options({**shared, **one}, is_strict=name in use.strict)
            yield OutputGrammar(json.dumps({"grammars": [{"json_schema": asked}]}), place, "tools")


def _behind_reasoning(ask: GenerationRequest, tokenizer: Tokenizer, formats: ModelFormats) -> GenerationRequest:
    """`ask` whose grammar, if it has one, holds for what stands behind the reasoning of its answer."""
    if ask.output_grammar is None or ask.api not in _PARSED_APIS or formats.reasoning is None:
        return ask
    thinking = _thinking(ask.rendering, tokenizer, formats)
    text = behind_reasoning(ask.output_grammar.text, formats, _tags_of(formats, tokenizer), thinking)
    return replace(ask, output_grammar=replace(ask.output_grammar, text=text))


def _thinking(rendering: Rendering, tokenizer: Tokenizer, formats: ModelFormats) -> Thinking:
    """Where a prompt of this rendering ends, by that of a short chat."""
    form = formats.reasoning
    if form is None or not form.begin:
        return "possible"
    try:
        probe = Rendering(variables=rendering.variables)
        end = tokenizer.render_chat([{"role": "user", "content": "Hello"}], probe).rstrip()
    except InvalidRequestError:  # the chat itself may be one that the template accepts
        return "possible"
    return "begun" if end.endswith(form.begin) else "over" if end.endswith(form.end) else "possible"


def _tags_of(formats: ModelFormats, tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the tags of the formats that are tokens."""
    tokens = tokenizer.added_tokens
    return {tag: tokens[tag] for tag in formats.tags if tag in tokens}


def parsing_of(
    ask: GenerationRequest, prompt: Sequence[int], tokenizer: Tokenizer, formats: ModelFormats
) -> ParserSpec | None:
    """How answers to `prompt` are taken apart; None = they are content alone."""
    tools = formats.tools if ask.tools is not None else None
    if ask.api not in _PARSED_APIS or (tools is None and formats.reasoning is None):
        return None
    used = replace(formats, tools=tools)
    return ParserSpec(
        tools=tools,
        reasoning=formats.reasoning,
        schemas=ask.tools.schemas if ask.tools is not None else {},
        tags={token: tag for tag, token in _tags_of(used, tokenizer).items()},
        begins_inside=formats.reasoning is not None and _ends_with(formats.reasoning.begin, prompt, tokenizer),
        is_parallel=ask.tools is None or ask.tools.is_parallel,
        customs=frozenset(ask.tools.customs) if ask.tools is not None else frozenset(),
    )


def thought_budget_of(
    ask: GenerationRequest, limit: ThoughtLimit, prompt: Sequence[int], tokenizer: Tokenizer, formats: ModelFormats
) -> ThoughtBudget | None:
    """`limit` for answers to `prompt`, in tokens of the model; None = they have no thoughts.

    UnsupportedParameterError if the model does not mark its thoughts by tokens; for messages the limit is an effort
    then, and no more.
    """
    form, tags = formats.reasoning, tokenizer.added_tokens
    ends = () if form is None else tuple(tags[tag] for tag in form.endings if tag in tags)
    if form is None or not ends:
        if ask.api == "messages":
            return None
        why = "it has no known format of thoughts" if form is None else f"{form.endings[0]} is not one of its tokens"
        what, todo = f"{limit.param} cannot be kept by this model", "leave it out"
        raise UnsupportedParameterError(what, why=why, todo=todo, param=limit.param)
    if _ends_with(form.end, prompt, tokenizer):
        return None
    encode = partial(tokenizer.encode_now, add_special_tokens=False)
    has_tools = ask.tools is not None and formats.tools is not None
    closing = tuple(encode(form.closing if has_tools else form.closing + form.answer))
    lead = next(place for place, token in enumerate(closing) if token in ends)  # belongs to the thought
    triggers = formats.tools.triggers if has_tools and formats.tools is not None else ()
    return ThoughtBudget(
        tokens=max(0, limit.tokens - lead),
        begin=tuple(encode(form.opening)),
        ends=(*ends, *(tags[tag] for tag in triggers if tag in tags)),
        closing=closing[max(0, lead - limit.tokens) :],
        last_closing=tuple(encode(form.closing + form.answer)) if form.answer else (),
        is_begun=_ends_with(form.begin, prompt, tokenizer),
    )


def _ends_with(tag: str, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """True if a tag, "" = none, is at the end of a prompt, blanks behind it aside."""
    return bool(tag) and tokenizer.decode_all(list(prompt[-_PROMPT_END_TOKENS:])).rstrip().endswith(tag)
