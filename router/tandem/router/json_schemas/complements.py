"""Schemas of what finite sets of values leave."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tandem.router.json_schemas.keywords import TYPES, type_of

MAX_WORDS, MAX_WORD_CHARS, MAX_CHARS = 64, 48, 1024
MAX_NUMBERS = 64
MAX_STRUCTURES = 4
"""Lists and objects among the values."""
_ANY = "(?s:.)"


class InexpressibleError(Exception):
    """Nothing that llguidance enforces says this."""


def without_types(names: Collection[str]) -> Any:
    """All types but these."""
    left = [name for name in TYPES if name not in names]
    return {"type": left} if left else False


def without_values(values: Sequence[Any]) -> list[Any]:
    """Schemas whose union has no value but these; values of lists and objects in them may be left out, too."""
    kinds: dict[str, list[Any]] = {}
    for value in values:
        kinds.setdefault(type_of(value), []).append(value)
    found = [without_types(kinds)]
    if "boolean" in kinds:
        found += [{"const": one} for one in (True, False) if one not in kinds["boolean"]]
    if "string" in kinds and _is_small(kinds["string"]):
        found.append({"type": "string", "pattern": f"^{_without_words(dict.fromkeys(kinds['string']))}$"})
    if "number" in kinds and len(kinds["number"]) <= MAX_NUMBERS:
        found += _without_numbers(sorted(set(kinds["number"])))
    for kind, make in (("array", _without_list), ("object", _without_object)):
        if kind in kinds and len(kinds[kind]) <= MAX_STRUCTURES:
            each = [make(value) for value in kinds[kind]]
            found.append(each[0] if len(each) == 1 else {"allOf": each})
    return found


def is_exact(values: Sequence[Any]) -> bool:
    """True if `without_values` leaves out nothing but these."""
    kinds: dict[str, list[Any]] = {}
    for value in values:
        kinds.setdefault(type_of(value), []).append(value)
    is_small = "string" not in kinds or _is_small(kinds["string"])
    return is_small and len(kinds.get("number", ())) <= MAX_NUMBERS and not kinds.keys() & {"array", "object"}


def _is_small(words: Sequence[str]) -> bool:
    longest = max(map(len, words))
    return len(words) <= MAX_WORDS and longest <= MAX_WORD_CHARS and sum(map(len, words)) <= MAX_CHARS


def _without_words(words: Iterable[str]) -> str:
    """A regular expression of every text but these: how far one of them goes, and what it goes on with instead."""
    following: dict[str, set[str]] = {"": set()}
    whole = set(words)
    for word in whole:
        for place in range(len(word)):
            following.setdefault(word[:place], set()).add(word[place])
        following.setdefault(word, set())
    found = []
    for start, chars in following.items():
        other = f"[^{''.join(map(_escaped, sorted(chars)))}]{_ANY}*" if chars else f"{_ANY}+"
        found.append(f"{''.join(map(_escaped, start))}{other if start in whole else f'(?:{other})?'}")
    return f"(?:{'|'.join(found)})"


def _escaped(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"


def _without_numbers(numbers: Sequence[float]) -> list[Any]:
    """The open intervals between the numbers."""
    between = [
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in itertools.pairwise(numbers)
    ]
    ends = [{"type": "number", "exclusiveMaximum": numbers[0]}, {"type": "number", "exclusiveMinimum": numbers[-1]}]
    return [*ends, *between]


def _without_list(value: list[Any]) -> Any:
    """Lists of other lengths, and those with another value at one of its places."""
    size = len(value)
    found: list[Any] = [{"type": "array", "minItems": size + 1}]
    if size:
        found.append({"type": "array", "maxItems": size - 1})
    for place, one in enumerate(value):
        other = {"anyOf": without_values([one])}
        found.append({"type": "array", "minItems": place + 1, "prefixItems": [*[{}] * place, other]})
    return {"anyOf": found}


def _without_object(value: dict[str, Any]) -> Any:
    """Objects that lack one of its names, or have another value under it; not those that have more names alone."""
    if not value:
        return {"type": "object", "minProperties": 1}
    found: list[Any] = []
    for name, one in value.items():
        found.append({"type": "object", "properties": {name: False}})
        other = {"anyOf": without_values([one])}
        found.append({"type": "object", "properties": {name: other}, "required": [name]})
    return {"anyOf": found}
