"""Grammars of structured outputs: from JSON schemas, regular expressions, choices and tags.

Errors name the place in the client's schema. Whitespace between the tokens of JSON is bounded, since models fill what
is left of an answer with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from tandem.core.errors import InvalidGrammarError
from tandem.core.output_grammar import SPACING, OutputGrammar
from tandem.router.error_quoting import quoted, shortened
from tandem.router.json_schemas.keywords import MAX_NESTING, is_deeper, with_paths

MAX_CHOICES = 8192
MAX_TAGS = 128
MAX_WHITESPACE_CHARS = 64
MAX_GBNF_CHARS = 1 << 14
MAX_GBNF_RULES = 256
"""Its conversion to Lark takes the square of the rules: 8,000 of them take 40 s."""


def schema_grammar(schema: Any, param: str, *, is_strict: bool = False, whitespace: str | None = None) -> OutputGrammar:
    """JSON that a schema describes. `is_strict`: OpenAI's rules for schemas hold. `whitespace`: a regular expression of
    what may stand between the tokens of JSON, "" = nothing. Raises InvalidGrammarError."""
    ruled = _ruled(schema, param, is_strict, whitespace)
    return OutputGrammar(orjson.dumps({"grammars": [{"json_schema": ruled}]}).decode(), param, "schema")


def regex_grammar(pattern: str, param: str) -> OutputGrammar:
    """Text that matches a regular expression from its first to its last character."""
    return OutputGrammar(LLMatcher.grammar_from_regex(pattern), param, "regex")


def choice_grammar(choices: Sequence[str], param: str) -> OutputGrammar:
    """One of these texts."""
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise InvalidGrammarError(
            f"{param} is not usable", why=f"it needs 1 to {MAX_CHOICES} texts, none of them empty", param=param
        )
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    # One terminal: its alternatives cost no rules.
    return OutputGrammar(f"start: CHOICE\nCHOICE: {texts}", param, "choice")


def text_grammar(text: str, param: str) -> OutputGrammar:
    """A grammar that the client wrote: Lark in llguidance's dialect, or GBNF, which is converted here."""
    if is_lark_syntax(text):
        return OutputGrammar(text, param, is_written=True)
    rules = text.count("::=")
    if len(text) > MAX_GBNF_CHARS or rules > MAX_GBNF_RULES:
        why = f"it has {len(text)} characters and {rules} rules; {MAX_GBNF_CHARS} and {MAX_GBNF_RULES} are allowed"
        raise InvalidGrammarError(f"{param} is too large for GBNF", why=why, todo="write it in Lark", param=param)
    try:
        return OutputGrammar(gbnf_to_lark(text), param, is_written=True)
    except Exception as error:  # noqa: BLE001 - the converter's parser raises nothing more specific
        raise InvalidGrammarError(f"{param} cannot be read", why=str(error), param=param) from None


def tag_grammar(tags: Sequence[tuple[str, Any, str]], triggers: Sequence[str], param: str) -> OutputGrammar:
    """Free text in which each trigger begins a tag: (begin, schema of what is inside, end)."""
    if not tags or len(tags) > MAX_TAGS:
        raise InvalidGrammarError(
            f"{param} has {len(tags)} structures", why=f"1 to {MAX_TAGS} are allowed", param=param
        )
    made = []
    for position, (begin, schema, end) in enumerate(tags):
        where = f"{param}.structures[{position}]"
        trigger = next((one for one in triggers if one and begin.startswith(one)), None)
        if trigger is None:
            why, todo = f"no trigger begins {quoted(begin)}", "add one to triggers"
            raise InvalidGrammarError(f"{where}.begin is not reachable", why=why, todo=todo, param=f"{where}.begin")
        inner = _ruled(schema, f"{where}.schema", False, None)
        made.append(StructTag(trigger=trigger, begin=begin, grammar=inner, end=end))
    return OutputGrammar(StructTag.to_grammar(made, assume_special=False), param, "tags")


def _ruled(schema: Any, param: str, is_strict: bool, whitespace: str | None) -> dict[str, Any]:
    """The schema as llguidance takes it, with this server's rules in place of any that the client put there."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidGrammarError(f"{param} is not valid JSON", why=str(error), param=param) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidGrammarError(f"{param} is no JSON schema", why="it must be an object", param=param)
    if is_deeper(schema, MAX_NESTING):
        why = f"at most {MAX_NESTING} lists and objects may be inside each other"
        raise InvalidGrammarError(f"{param} is nested too deeply", why=why, param=param)
    if whitespace is not None and len(whitespace) > MAX_WHITESPACE_CHARS:
        why = f"it has {len(whitespace)} characters, and {MAX_WHITESPACE_CHARS} are allowed"
        raise InvalidGrammarError("whitespace_pattern is too long", why=why, param=param)
    if is_strict:
        _check_strict(schema, param)
    spacing: dict[str, Any] = {"whitespace_flexible": False} if whitespace == "" else dict(SPACING)
    if whitespace:
        spacing["whitespace_pattern"] = whitespace
    return {**schema, "x-guidance": spacing}


def _check_strict(schema: Mapping[str, Any], param: str) -> None:
    """OpenAI's rules of strict schemas: no further properties, and none that may be left out."""
    for path, one in with_paths(schema, param, shortened):
        properties = one.get("properties")
        is_object = one.get("type") == "object" or isinstance(properties, dict)
        if not is_object:
            continue
        if one.get("additionalProperties") is not False:
            where, todo = f"{path}.additionalProperties", "set it to false, or leave out strict"
            raise InvalidGrammarError(f"{where} is not false", why="strict schemas need it", todo=todo, param=where)
        required = one.get("required")
        listed = required if isinstance(required, list) else []
        left_out = [name for name in properties or () if name not in listed]
        if left_out:
            where, why = f"{path}.required", "strict schemas need every property in it"
            what, todo = f"{where} lacks {quoted(left_out[0])}", "add it, or leave out strict"
            raise InvalidGrammarError(what, why=why, todo=todo, param=where)
