"""Checks grammars before any worker sees them, with the schemas in them rewritten as llguidance takes them.

llguidance decides about what can be enforced: it ignores no keyword of JSON Schema that would restrict an answer. All
bounds count: a grammar that passes at a router passes at every worker, however busy either is. Checks have one thread,
so that grammars cost other requests no more than that.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import orjson
from llguidance import LLMatcher, LLParserLimits

from tandem.core.errors import InvalidGrammarError
from tandem.core.output_grammar import GRAMMAR_LIMITS, MAX_GRAMMAR_CHARS, OutputGrammar
from tandem.router.error_quoting import shortened
from tandem.router.json_schemas.combined_patterns import MAX_COMBINED, combining_path
from tandem.router.json_schemas.combined_values import MAX_PAIRS, crossing_path
from tandem.router.json_schemas.exclusive_bounds import with_moved_bounds
from tandem.router.json_schemas.keywords import MAX_NESTING, is_deeper, with_paths
from tandem.router.json_schemas.lowest_numbers import LOWEST, lowest_path
from tandem.router.json_schemas.pattern_matching import byte_tokenizer
from tandem.router.json_schemas.rewriting import MAX_STEPS, NEEDED, Rewriting, TooManyStepsError

MAX_WRITTEN_SYMBOLS = 3_000
"""Of a grammar that the client wrote: rules that may be empty cost the square of it, at every token."""
MAX_REPETITIONS = 768
"""Of such a grammar: each `?`, `*` and `+` is one of them, a counted repetition 8 or 32."""
_CHECKED = 64
"""Grammars whose check is remembered: up to MAX_GRAMMAR_CHARS each."""
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*\s])(?:\\.|[^/\\\n])+/|//[^\n]*|%json\s*\{[^\n]*')
_REPEATED = re.compile(r"(?P<span>\{\s*\d*\s*,\s*\d*\s*\})|(?P<count>\{\s*\d+\s*\})|[?*+]")
_WEIGHTS = {"span": 32, "count": 8, None: 1}
_LIMITS = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
_WRITTEN_LIMITS = LLParserLimits(**{**GRAMMAR_LIMITS, "max_grammar_size": MAX_WRITTEN_SYMBOLS}, verbose_errors=False)
_THREAD = ThreadPoolExecutor(1, "grammar check")


@dataclass(frozen=True, slots=True)
class _Checked:
    """Outcome of a check. `text`: the grammar for workers. `error`: reason why there is none, at `place` if that is
    known; `kept`: places of keywords that could not be rewritten. Places begin behind the schema's own."""

    text: str
    error: str = ""
    place: str | None = None
    kept: tuple[str, ...] = ()


async def check_grammar(grammar: OutputGrammar) -> OutputGrammar:
    """The grammar as workers take it. Raises InvalidGrammarError for one that is too large or that no answer can be
    made to follow."""
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        why = f"as a grammar it has {len(grammar.text)} characters, and {MAX_GRAMMAR_CHARS} are allowed"
        raise InvalidGrammarError(f"{grammar.param} is too large", why=why, param=grammar.param)
    loop = asyncio.get_running_loop()
    checked = await loop.run_in_executor(_THREAD, _checked, grammar.text, grammar.is_written)
    if checked.error:
        where = _place(grammar, checked)
        raise InvalidGrammarError(f"{where} cannot be enforced", why=_first_line(checked.error), param=where)
    return replace(grammar, text=checked.text)


@functools.lru_cache(_CHECKED)
def _checked(given: str, is_written: bool) -> _Checked:
    if is_written and _repetitions(given) > MAX_REPETITIONS:
        return _Checked(given, f"its rules have more than {MAX_REPETITIONS} repetitions; counted ones are several")
    schemas = _Schemas()
    text = schemas.rewritten(given)
    if schemas.error:
        return _Checked(given, schemas.error, schemas.place)
    if len(text) > MAX_GRAMMAR_CHARS:
        return _Checked(given, f"rewritten it has more than {MAX_GRAMMAR_CHARS} characters")
    error = _error_of(text, _WRITTEN_LIMITS if is_written else _LIMITS)
    return _Checked(text, error, kept=tuple(schemas.kept))


def _error_of(text: str, limits: LLParserLimits) -> str:
    """Reason why llguidance cannot use a grammar; "" = it can."""
    if "<[" in text:  # it may name tokens of the model, which the vocabulary of bytes lacks
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
        return messages[0] if is_wrong else ""
    matcher = LLMatcher(byte_tokenizer(), text, log_level=0, limits=limits)
    if not matcher.get_error():
        matcher.compute_bitmask()  # which shows some of those that nothing fits
    return str(matcher.get_error())


def _repetitions(text: str) -> int:
    """How much is repeated in the rules of a Lark grammar."""
    return sum(_WEIGHTS[found.lastgroup] for found in _REPEATED.finditer(_LITERALS.sub(" ", text)))


class _Schemas:
    """Rewrites the JSON schemas in a grammar of llguidance, Lark or a document. `error` and `place` are of the first
    that is refused."""

    def __init__(self) -> None:
        self.error = ""
        self.place: str | None = None
        self.kept: list[str] = []

    def rewritten(self, text: str) -> str:
        """The grammar with the schemas as llguidance takes them."""
        if not text.startswith("{"):
            return self._in_lark(text)
        document = orjson.loads(text)
        is_changed = False
        for grammar in document["grammars"]:
            for key, rewrite in (("json_schema", self._schema), ("lark_grammar", self._in_lark)):
                before = grammar.get(key)
                if before:
                    grammar[key] = rewrite(before)
                    is_changed = is_changed or grammar[key] is not before
        # orjson writes no integers beyond 64 bits, which a complement of a bound may have
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")) if is_changed else text

    def _in_lark(self, text: str) -> str:
        decoder, parts, end = json.JSONDecoder(), [], 0
        for found in _EMBEDDED.finditer(text):
            if found.start() < end:
                continue
            try:
                schema, after = decoder.raw_decode(text, found.end())
            except (json.JSONDecodeError, RecursionError):  # which llguidance refuses, too
                continue
            made = self._schema(schema)
            if made is not schema:
                parts += [text[end : found.end()], json.dumps(made)]
                end = after
        return "".join((*parts, text[end:])) if parts else text

    def _schema(self, schema: Any) -> Any:
        """The schema itself if nothing of it is to be rewritten."""
        if self.error:
            return schema
        if is_deeper(schema, MAX_NESTING):
            return self._refuse(schema, "", f"more than {MAX_NESTING} lists and objects are inside each other")
        if (path := combining_path(schema)) is not None:
            return self._refuse(schema, path, f"more than {MAX_COMBINED} patterns may have to hold for one text, "
                                "by allOf, or by $ref, anyOf and oneOf beside others")  # fmt: skip
        if not NEEDED.search(json.dumps(schema)):
            return self._bounded(schema, schema)
        rewriting = Rewriting(schema)
        try:
            made = rewriting.result()
        except TooManyStepsError as error:
            return self._refuse(schema, str(error), f"rewriting it takes more than {MAX_STEPS} steps")
        if made is False:
            return self._refuse(schema, "", "nothing fits the schema")
        self.kept += rewriting.kept
        if (path := combining_path(made)) is not None:
            return self._refuse(schema, "", f"rewritten it has more than {MAX_COMBINED} patterns for one text")
        return self._bounded(made, schema)

    def _bounded(self, schema: Any, given: Any) -> Any:
        """The schema, which may be `given` rewritten, unless its values are too low, or too many to be compared."""
        if lowest_path(schema) is not None:
            return self._refuse(schema, lowest_path(given) or "", f"numbers below {LOWEST} are not supported here")
        if crossing_path(schema) is not None:
            why = f"more than {MAX_PAIRS} pairs of values would be compared: lists of them that have to hold together"
            return self._refuse(schema, crossing_path(given) or "", why)
        return with_moved_bounds(schema)

    def _refuse(self, schema: Any, place: str, why: str) -> Any:
        self.error, self.place = why, place
        return schema


_PLACES = (
    (r'Unimplemented keys: \["([^"]+)"', ""),
    (r"Expected .* for '([^']+)'", ""),
    (r"(oneOf) constraints", ""),
    (r"Unsatisfiable schema: (minItems|minLength|minimum|minProperties)", ""),
    (r"min/(maxProperties) only", ""),
    (r"Unknown format: (.*)", "format"),
    (r"Invalid type: (.*)", "type"),
    (r"Resource '([^']+)'", "$ref"),
    (r"Pointer '([^']+)'", "$ref"),
    (r"required property '([^']+)'", "required"),
    (r"regex parse error:\s+(.*)", "pattern"),
)
"""Errors of llguidance: what they quote is in the value of a key of the schema; "" = it is the key."""


def _place(grammar: OutputGrammar, checked: _Checked) -> str:
    """Where in the request the reason for an error is, as exactly as it can be told."""
    try:
        grammars = orjson.loads(grammar.text)["grammars"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return grammar.param
    schema = next((one["json_schema"] for one in grammars if one.get("json_schema")), None)
    if schema is None:
        return grammar.param
    if checked.place is not None:
        return grammar.param + checked.place
    for pattern, key in _PLACES:
        said = re.search(pattern, checked.error)
        text = "" if said is None else said[1].strip()
        if not text:
            continue
        kept = next((place for place in checked.kept if place.endswith(f".{text}")), None)
        if kept is not None and not key:
            return grammar.param + kept
        for path, one in with_paths(schema, grammar.param, shortened):
            if text in str(one.get(key, "")) if key else text in one:
                return f"{path}.{key or text}"
    return grammar.param


def _first_line(error: str) -> str:
    """An error in a line: llguidance draws where it is below that."""
    lines = [line.strip() for line in error.splitlines() if line.strip(" ^")]
    last = next((line for line in reversed(lines) if line.startswith("error:")), "")
    return shortened(f"{lines[0]} {last.removeprefix('error:').strip()}" if last else lines[0]) if lines else error
