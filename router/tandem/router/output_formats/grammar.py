"""Grammars of llguidance for answers that call tools: in the model's own format, with arguments by their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from tandem.core.errors import UnsupportedParameterError
from tandem.router.output_formats.argument_rules import PLAIN_STYLES, ArgumentRules
from tandem.router.output_formats.choice import ToolUse
from tandem.router.output_formats.families.harmony import CHANNEL, HARMONY, MESSAGE, START
from tandem.router.output_formats.reasoning import ReasoningFormat
from tandem.router.output_formats.registry import ModelFormats
from tandem.router.output_formats.tool_format import ToolFormat

Thinking = Literal["begun", "possible", "over"]
"""Of a prompt: it ends inside reasoning, in front of an answer that may reason, or behind reasoning."""
MOST_CALLS = 16
"""Of an answer that is calls alone. Small models repeat a call until the answer is cut."""
_TEXT = "/(.|\\n)*/"
_BLANKS = "/[ \\n]{0,4}/"


def call_grammar(
    formats: ModelFormats, use: ToolUse, tags: Mapping[str, int], thinking: Thinking = "possible"
) -> str | None:
    """The grammar of answers that may, or must, call tools; None = any answer will do.

    Under "required" and "named" an answer is calls, behind reasoning. Under "auto" text is free and calls follow the
    grammar, if a function is strict and calls can be told from text by a tag. `tags` are ids of tags that are tokens.
    UnsupportedParameterError for a grammar of a custom tool that the format cannot follow.
    """
    form = formats.tools
    if form is None or not (use.is_forced or use.strict & set(use.allowed)):
        return None
    grammar = _CallGrammar(form, formats.reasoning, use, tags)
    text = grammar.forced(thinking) if use.is_forced else grammar.free(thinking)
    _check_inputs(form, use, has_grammar=text is not None)
    if text is None or not grammar.inputs:
        return text
    inputs = [{"name": name, "lark_grammar": lark} for name, lark in grammar.inputs.items()]
    return json.dumps({"grammars": [{"lark_grammar": text}, *inputs]}, ensure_ascii=False)


def _check_inputs(form: ToolFormat, use: ToolUse, *, has_grammar: bool) -> None:
    for name in use.allowed:
        given = use.customs.get(name)
        if given is None:
            continue
        if not has_grammar:
            what, why = f"{given.param} cannot be enforced", f"in {form.name} no tag tells a call from text"
            todo = "set tool_choice to required or to this tool, or leave the grammar out"
            raise UnsupportedParameterError(what, why=why, todo=todo, param=given.param)
        if given.syntax == "lark" and form.shape.style not in PLAIN_STYLES:
            param, why = f"{given.param}.syntax", f"in {form.name} an input is a JSON text, with escapes"
            what, todo = f"{param} is lark, which cannot be enforced", "send a regex, or leave the grammar out"
            raise UnsupportedParameterError(what, why=why, todo=todo, param=param)


def calls_or_answer(
    grammar: str, formats: ModelFormats, use: ToolUse, tags: Mapping[str, int], thinking: Thinking = "possible"
) -> str:
    """`behind_reasoning` of answers that may call tools instead: then they are calls alone, by their schemas."""
    form = formats.tools
    if form is None:
        return behind_reasoning(grammar, formats, tags, thinking)
    start = _CallGrammar(form, formats.reasoning, use, tags).calls_or(thinking, "@answer")
    return _with_answer(start, grammar)


def behind_reasoning(
    grammar: str, formats: ModelFormats, tags: Mapping[str, int], thinking: Thinking = "possible"
) -> str:
    """`grammar`, Lark or a JSON document of llguidance, of what stands behind the reasoning of an answer."""
    if formats.reasoning is None or (thinking == "over" and formats.tools is not HARMONY):
        return grammar
    return _with_answer(_Rules(formats.tools, formats.reasoning, tags).behind(thinking, "@answer"), grammar)


def _with_answer(start: str, grammar: str) -> str:
    """The rules `start`, whose "@answer" is `grammar`."""
    document = json.loads(grammar) if grammar.startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    first, *others = document["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": start}, {**first, "name": "answer"}, *others]}, ensure_ascii=False)


class _Rules:
    """Rules of one grammar, as they are made."""

    def __init__(self, form: ToolFormat | None, reasoning: ReasoningFormat | None, tags: Mapping[str, int]) -> None:
        self._is_harmony, self._reasoning, self._tags = form is HARMONY, reasoning, tags
        known = map(re.escape, sorted(tags, key=len, reverse=True))
        self._split = re.compile("(" + "|".join((*known, r"\$name", r"\$arguments")) + ")")
        self._rules = [f"TEXT: {_TEXT}", f"BLANKS: {_BLANKS}"]

    def behind(self, thinking: Thinking, rest: str) -> str:
        """Reasoning, then `rest`, in the message that harmony has for what users read."""
        return self._text(f"{self._reasoning_before(thinking)} {self._final} {rest}")

    @property
    def _final(self) -> str:
        return self._terms(f"{CHANNEL}final{MESSAGE}") if self._is_harmony else ""

    def _text(self, start: str) -> str:
        return "\n".join([f"start: {start.strip()}", *self._rules, ""])

    def _reasoning_before(self, thinking: Thinking) -> str:
        if self._is_harmony:
            message, after = self._terms(f"{CHANNEL}analysis{MESSAGE}"), self._terms(f"{START}assistant")
            return f"({message} {self._until('<|end|>')} {after})?"
        if self._reasoning is None or not self._reasoning.begin or thinking == "over":
            return ""
        end = f"{self._until(self._reasoning.end)} BLANKS"
        return end if thinking == "begun" else f"({self._terms(self._reasoning.begin)} {end})?"

    def _until(self, tag: str) -> str:
        """Any text up to `tag`, and the tag."""
        if tag in self._tags:
            return f"TEXT {self._terms(tag)}"
        rule = f"until_{len(self._rules)}"
        self._rules.append(f"{rule}[lazy]: TEXT {json.dumps(tag)}")
        return rule

    def _terms(self, text: str, name: str = "", arguments: str = "") -> str:
        """`text` in the grammar: tags that are tokens as such, all else as it is written."""
        return " ".join(self._term(part, name, arguments) for part in self._split.split(text) if part)

    def _term(self, part: str, name: str, arguments: str) -> str:
        if part in self._tags:
            return f"<[{self._tags[part]}]>"
        if part == "$arguments":
            return arguments
        return json.dumps(name if part == "$name" else part, ensure_ascii=False)


class _CallGrammar(_Rules):
    """Rules of a grammar of calls."""

    def __init__(
        self, form: ToolFormat, reasoning: ReasoningFormat | None, use: ToolUse, tags: Mapping[str, int]
    ) -> None:
        super().__init__(form, reasoning, tags)
        self._form, self._use = form, use
        self.inputs: dict[str, str] = {}
        """Further grammars that the rules name: those of inputs of custom tools, in Lark."""

    def forced(self, thinking: Thinking) -> str:
        """At least one call, one of a named function, and nothing but calls behind reasoning."""
        return self._text(f"{self._reasoning_before(thinking)} {self._calls()}")

    def calls_or(self, thinking: Thinking, rest: str) -> str:
        """Calls as in `forced`, or `rest` in place of them."""
        is_json = bool(self._form.openings) and self._form.shape.style == "json"
        return self._text(f"{self._reasoning_before(thinking)} ({self._calls(is_json=is_json)} | {self._final} {rest})")

    def _calls(self, *, is_json: bool = False) -> str:
        """`is_json`: other JSON may stand in place of a call."""
        shape = self._form.shape
        self._add_calls(shape.call, is_json=is_json)
        has_many = self._use.is_parallel and shape.is_parallel and self._use.mode != "named"
        more = f"({self._terms(shape.between)} call){{0,{MOST_CALLS - 1}}}" if has_many else ""
        return f"{self._terms(shape.before)} call {more} {self._terms(shape.after)}"

    def free(self, thinking: Thinking) -> str | None:
        """Text, and calls from each trigger on; None if no tag tells them from text."""
        shape = self._form.shape
        whole = shape.before or shape.call
        trigger = next((tag for tag in self._form.triggers if whole.startswith(tag)), None)
        if trigger is None:
            return None
        if shape.before:
            self._add_calls(shape.call)
            more = f"({self._terms(shape.between)} call)*" if self._use.is_parallel else ""
            calls = f"{self._terms(shape.before.removeprefix(trigger))} call {more} {self._terms(shape.after)}"
        else:
            self._add_calls(shape.call.removeprefix(trigger))
            calls = "call"
        times = "*" if self._use.is_parallel else "?"
        return self._text(f"{self._reasoning_before(thinking)} ({self._until(trigger)} {calls}){times} TEXT")

    def _add_calls(self, written: str, *, is_json: bool = False) -> None:
        functions = [tool["function"] for tool in self._use.tools if tool["function"]["name"] in self._use.allowed]
        for place, function in enumerate(functions):
            arguments = ArgumentRules(f"a{place}", self._terms, is_strict=function["name"] in self._use.strict)
            if is_json:
                rule = arguments.of_call(written, str(function["name"]), function.get("parameters"))
            else:
                rule = self._arguments(arguments, function, f"input_{place}")
                rule = self._terms(written, str(function["name"]), rule)
            self._rules.append(f"call_{place}: {rule}")
            self._rules += arguments.rules
        self._rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(functions))))

    def _arguments(self, rules: ArgumentRules, function: Mapping[str, Any], name: str) -> str:
        """The name of the rule for arguments of a function; `name` is free for a grammar of its input."""
        given, style = self._use.customs.get(function["name"]), self._form.shape.style
        if given is None or style not in PLAIN_STYLES:
            return rules.of(function.get("parameters"), style)
        self.inputs[name] = given.lark
        return rules.of_input(name, style)
