"""Spellings of a JSON value: the orders of names and the forms of numbers, of which a grammar may take one alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

from tandem.router.json_schemas.keywords import with_paths
from tandem.router.json_schemas.pattern_matching import byte_tokenizer

MAX_STEPS = 4_000
Then = Callable[[], bool]


class Spelling:
    """Looks for a spelling of a value that the grammar of a schema takes."""

    def __init__(self, grammar: str, schema: Any) -> None:
        self._matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
        self._orders = [
            list(one["properties"]) for _, one in with_paths(schema, "", str) if isinstance(one.get("properties"), dict)
        ]
        self._left = 0
        self._is_sorted = False

    def takes(self, value: Any) -> bool:
        """True if the grammar takes the value, as it is or in the order of the schema."""
        if self._matcher.get_error():
            return False
        for self._is_sorted in (False, True):
            self._matcher.reset()
            self._left = MAX_STEPS
            if self._value(value, self._matcher.is_accepting):
                return True
        return False

    def _names(self, value: dict[str, Any]) -> list[str]:
        if not self._is_sorted:
            return list(value)
        order = max(self._orders, key=lambda names: len(value.keys() & set(names)), default=[])
        return sorted(value, key=lambda name: order.index(name) if name in order else len(order))

    def _text(self, text: str, then: Then) -> bool:
        data = list(text.encode())
        self._left -= 1
        taken = self._matcher.try_consume_tokens(data) if self._left > 0 else 0
        if taken == len(data) and then():
            return True
        if taken:
            self._matcher.rollback(taken)
        return False

    def _value(self, value: Any, then: Then) -> bool:
        if isinstance(value, dict):
            return self._text("{", lambda: self._members(value, self._names(value), then))
        if isinstance(value, list):
            return self._text("[", lambda: self._items(value, 0, then))
        if isinstance(value, float) and value.is_integer() and self._text(str(int(value)), then):
            return True
        return self._text(json.dumps(value, ensure_ascii=False), then)

    def _items(self, items: list[Any], place: int, then: Then) -> bool:
        if place == len(items):
            return self._text("]", then)
        comma = "," if place else ""
        return self._text(comma, lambda: self._value(items[place], lambda: self._items(items, place + 1, then)))

    def _members(self, value: dict[str, Any], left: list[str], then: Then) -> bool:
        if not left:
            return self._text("}", then)
        comma = "" if len(left) == len(value) else ","
        return any(self._member(value, name, left, comma, then) for name in left)

    def _member(self, value: dict[str, Any], name: str, left: list[str], comma: str, then: Then) -> bool:
        rest = [one for one in left if one != name]
        start = f"{comma}{json.dumps(name, ensure_ascii=False)}:"
        return self._text(start, lambda: self._value(value[name], lambda: self._members(value, rest, then)))
