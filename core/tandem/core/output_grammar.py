"""The grammar that an answer has to follow, as it travels: always as text, never compiled.

The text is llguidance's: a Lark grammar, or its JSON document of grammars, which may embed JSON schemas and regular
expressions. State inside an answer is the grammar and the tokens so far, so any worker can go on with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ConstraintKind = Literal["schema", "regex", "choice", "grammar", "tags", "tools"]
MAX_GRAMMAR_CHARS = 1 << 18
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"
"""Between the tokens of JSON. It has a bound, because models loop in blanks."""

SPACING: Mapping[str, Any] = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
"""Options of llguidance for JSON schemas (`x-guidance`)."""
_USUAL_SPACING: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

GRAMMAR_LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 250_000,
    "max_grammar_size": 20_000,
}
"""Limits of llguidance on the cost of compiling a grammar and of each mask. They count work instead of time, so a
grammar within them at a router is within them at every worker."""


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """A grammar of llguidance, and the field of the request that asked for it, which errors name. `is_written`: the
    client wrote the rules itself."""

    text: str
    param: str
    kind: ConstraintKind = "grammar"
    is_written: bool = False


def usually_spaced(text: str) -> str:
    """Return the grammar with JSON spaced as most models write it: a part of what `text` allows with SPACING, with more
    places where a single text can follow. `text` itself where it has no such JSON."""
    for separators in ((",", ":"), (", ", ": ")):
        own, usual = (json.dumps(one, separators=separators)[1:-1] for one in (SPACING, _USUAL_SPACING))
        text = text.replace(own, usual)
    return text
