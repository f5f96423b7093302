"""Grammars of structured outputs: from JSON schemas, regular expressions, choices and tags; checked before any worker
sees them.

llguidance decides about what can be enforced: it ignores no keyword of JSON Schema that would restrict an answer.
Errors name the place in the client's schema. Whitespace between the tokens of JSON is bounded, since models fill what
is left of an answer with it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from llguidance import LLMatcher, LLParserLimits, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from tandem.core.errors import InvalidGrammarError
from tandem.core.output_grammar import GRAMMAR_LIMITS, MAX_GRAMMAR_CHARS, SPACING, OutputGrammar
from tandem.router.error_quoting import quoted, shortened

MAX_NESTING = 64
"""Lists and objects inside each other in a schema."""
MAX_CHOICES = 8192
MAX_TAGS = 128
MAX_WHITESPACE_CHARS = 64
_LONG_CHARS = 2048
"""Grammars at least this long are checked in a thread: the event loop has other streams to feed."""
MAX_GBNF_CHARS = 1 << 14
MAX_GBNF_RULES = 256
"""Its conversion to Lark takes the square of the rules: 8,000 of them take 40 s."""
_CHECKED = 64
"""Grammars whose check is remembered: up to MAX_GRAMMAR_CHARS each."""
MAX_COMBINED = 9
"""Patterns that may have to hold for one text. llguidance takes four times as long for each further one, minutes for a
dozen, whatever its limits are."""
_COMBINERS = {"$ref", "anyOf", "oneOf"}
_COMBINED = {"pattern", "patternProperties", "properties"}
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples", "example")
_LIMITS = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)


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
    return OutputGrammar(f"start: {texts}", param, "choice")


def text_grammar(text: str, param: str) -> OutputGrammar:
    """A grammar that the client wrote: Lark in llguidance's dialect, or GBNF, which is converted here."""
    if is_lark_syntax(text):
        return OutputGrammar(text, param)
    rules = text.count("::=")
    if len(text) > MAX_GBNF_CHARS or rules > MAX_GBNF_RULES:
        why = f"it has {len(text)} characters and {rules} rules; {MAX_GBNF_CHARS} and {MAX_GBNF_RULES} are allowed"
        raise InvalidGrammarError(f"{param} is too large for GBNF", why=why, todo="write it in Lark", param=param)
    try:
        return OutputGrammar(gbnf_to_lark(text), param)
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


async def check_grammar(grammar: OutputGrammar) -> None:
    """Raise InvalidGrammarError for one that is too large or that no answer can be made to follow."""
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        why = f"as a grammar it has {len(grammar.text)} characters, and {MAX_GRAMMAR_CHARS} are allowed"
        raise InvalidGrammarError(f"{grammar.param} is too large", why=why, param=grammar.param)
    if len(grammar.text) < _LONG_CHARS:
        error = _error_of(grammar.text)
    else:
        error = await asyncio.to_thread(_error_of, grammar.text)
    if error:
        where = _place(grammar, error)
        raise InvalidGrammarError(f"{where} cannot be enforced", why=_first_line(error), param=where)


@functools.lru_cache(_CHECKED)
def _error_of(text: str) -> str:
    """Reason why llguidance cannot use a grammar; "" = it can."""
    has_many = "\\u" in text or text.count("pattern") > MAX_COMBINED
    if has_many and any(_combined(schema) > MAX_COMBINED for schema in _embedded(text)):
        how = "by allOf, or by $ref, anyOf and oneOf beside others"
        return f"more than {MAX_COMBINED} patterns may have to hold for one text, {how}"
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, limits=_LIMITS)
    return messages[0] if is_wrong else ""


def _embedded(text: str) -> Iterator[Any]:
    """The JSON schemas in a grammar of llguidance, Lark or a document."""
    if text.startswith("{"):
        for grammar in orjson.loads(text)["grammars"]:
            yield grammar.get("json_schema")
            yield from _embedded(grammar.get("lark_grammar") or "")
        return
    decoder = json.JSONDecoder()
    for found in _EMBEDDED.finditer(text):
        try:
            yield decoder.raw_decode(text, found.end())[0]
        except (json.JSONDecodeError, RecursionError):  # which llguidance refuses, too
            continue


def _combined(schema: Any) -> int:
    """At most so many patterns of a schema have to hold for one text."""
    counts = [0]
    for _, one in _schemas(schema, ""):
        if "allOf" in one or (_COMBINERS & one.keys() and _COMBINED & one.keys()):
            counts.append(_patterns(one, schema, set()))
    return max(counts)


def _patterns(value: Any, root: Mapping[str, Any], seen: set[str]) -> int:
    """Patterns in a part of the schema `root`, with those of each definition that it refers to."""
    if isinstance(value, list):
        return sum(_patterns(one, root, seen) for one in value)
    if not isinstance(value, dict):
        return 0
    count = int(isinstance(value.get("pattern"), str)) + len(value.get("patternProperties") or ())
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and reference not in seen:
        seen.add(reference)
        count += _patterns(_pointed(root, reference), root, seen)
    ignored = (*_VALUES, "$defs", "definitions")
    return count + sum(_patterns(one, root, seen) for key, one in value.items() if key not in ignored)


def _pointed(root: Any, reference: str) -> Any:
    """The part of a schema that a reference such as "#/$defs/a" points to; None if there is none."""
    for part in reference.removeprefix("#").split("/")[1:]:
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


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
    if _is_deeper(schema, MAX_NESTING):
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


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _check_strict(schema: Mapping[str, Any], param: str) -> None:
    """OpenAI's rules of strict schemas: no further properties, and none that may be left out."""
    for path, one in _schemas(schema, param):
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


def _schemas(schema: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every schema in a schema, itself first, with its path."""
    if isinstance(schema, list):
        for place, one in enumerate(schema):
            yield from _schemas(one, f"{path}[{place}]")
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            for name, one in value.items():
                yield from _schemas(one, f"{path}.{key}.{shortened(name)}")
        elif key not in _VALUES:
            yield from _schemas(value, f"{path}.{key}")


_PLACES = (
    (r'Unimplemented keys: \["([^"]+)"', ""),
    (r"Expected .* for '([^']+)'", ""),
    (r"(oneOf) constraints", ""),
    (r"Unsatisfiable schema: (minItems|minLength|minimum|minProperties)", ""),
    (r"Unknown format: (.*)", "format"),
    (r"Invalid type: (.*)", "type"),
    (r"Resource '([^']+)'", "$ref"),
    (r"Pointer '([^']+)'", "$ref"),
    (r"required property '([^']+)'", "required"),
    (r"regex parse error:\s+(.*)", "pattern"),
)
"""Errors of llguidance: what they quote is in the value of a key of the schema; "" = it is the key."""


def _place(grammar: OutputGrammar, error: str) -> str:
    """Where in the request the reason for an error is, as exactly as it can be told."""
    try:
        grammars = orjson.loads(grammar.text)["grammars"]
    except orjson.JSONDecodeError:
        return grammar.param
    schema = next((one["json_schema"] for one in grammars if one.get("json_schema")), None)
    for pattern, key in _PLACES:
        said = re.search(pattern, error)
        text = "" if said is None else said[1].strip()
        for path, one in _schemas(schema, grammar.param) if text else ():
            if text in str(one.get(key, "")) if key else text in one:
                return f"{path}.{key or text}"
    return grammar.param


def _first_line(error: str) -> str:
    """An error in a line: llguidance draws where it is below that."""
    lines = [line.strip() for line in error.splitlines() if line.strip(" ^")]
    last = next((line for line in reversed(lines) if line.startswith("error:")), "")
    return shortened(f"{lines[0]} {last.removeprefix('error:').strip()}" if last else lines[0]) if lines else error
