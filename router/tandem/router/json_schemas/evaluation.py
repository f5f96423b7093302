"""Decides whether a value fits a schema, where that is certain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tandem.router.json_schemas.keywords import RESTRICTIONS, is_equal, pointed, type_of
from tandem.router.json_schemas.pattern_matching import is_match

MAX_STEPS = 8_000
"""Of one schema: what would take more is unknown."""
MAX_MATCHES = 200
"""Matches with a pattern."""
MAX_DEPTH = 48
Fit = bool | None
"""None = it is not known."""


def every(answers: Iterable[Fit]) -> Fit:
    """True if all are, False if one is not."""
    is_known = True
    for answer in answers:
        if answer is False:
            return False
        is_known = is_known and answer is not None
    return True if is_known else None


def some(answers: Iterable[Fit]) -> Fit:
    """True if one is, False if none is."""
    return inverse(every(inverse(answer) for answer in answers))


def inverse(answer: Fit) -> Fit:
    return None if answer is None else not answer


class Evaluation:
    """Evaluates parts of the schema `root`, with a bound on all of them together."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps, self._matches, self._depth = MAX_STEPS, MAX_MATCHES, 0

    def holds(self, schema: Any, value: Any) -> Fit:
        """True if the value fits."""
        if isinstance(schema, bool):
            return schema
        self._steps -= 1
        if not isinstance(schema, dict) or self._steps < 0 or self._depth > MAX_DEPTH:
            return None
        self._depth += 1
        try:
            return every(self._keyword(key, schema, value) for key in schema if key in RESTRICTIONS)
        finally:
            self._depth -= 1

    def matches(self, pattern: Any, text: str) -> Fit:
        """True if a pattern is found in a text."""
        self._matches -= 1
        return is_match(pattern, text) if isinstance(pattern, str) and self._matches >= 0 else None

    def _keyword(self, key: str, schema: dict[str, Any], value: Any) -> Fit:
        self._steps -= 1
        kind, rule = type_of(value), schema[key]
        needed = _TYPE_OF_KEYWORD.get(key)
        if needed is not None and needed != kind:
            return True
        if key in _BOUNDS:
            return _BOUNDS[key](rule, value) if _is_number(rule) else None
        check: Callable[[Any, Any, dict[str, Any]], Fit] | None = getattr(self, f"_{_METHODS.get(key, '')}", None)
        return None if check is None else check(rule, value, schema)

    def _type(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        names = rule if isinstance(rule, list) else [rule]
        if type_of(value) in names:
            return True
        if "integer" in names and type_of(value) == "number":
            if isinstance(value, int):
                return True
            return None if value.is_integer() else False  # 1.0 is no integer in the fourth draft
        return False

    def _enum(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        return any(is_equal(one, value) for one in rule) if isinstance(rule, list) else None

    def _const(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        return is_equal(rule, value)

    def _all_of(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        return every(self.holds(one, value) for one in rule) if isinstance(rule, list) else None

    def _any_of(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        return some(self.holds(one, value) for one in rule) if isinstance(rule, list) else None

    def _one_of(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        if not isinstance(rule, list):
            return None
        answers = [self.holds(one, value) for one in rule]
        if answers.count(True) > 1:
            return False
        return None if None in answers else answers.count(True) == 1

    def _not(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        return inverse(self.holds(rule, value))

    def _if(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        answer = self.holds(rule, value)
        cases = {True: ("then",), False: ("else",), None: ("then", "else")}[answer]
        return every(self.holds(schema.get(case, True), value) for case in cases)

    def _given(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        return True  # beside a keyword that looks at it

    def _ref(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        if not isinstance(rule, str) or not rule.startswith("#"):
            return None
        return self.holds(pointed(self._root, rule), value)

    def _properties(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        if not isinstance(rule, dict):
            return None
        return every(self.holds(one, value[name]) for name, one in rule.items() if name in value)

    def _pattern_properties(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        if not isinstance(rule, dict):
            return None
        return every(
            some((inverse(self.matches(pattern, name)), self.holds(one, inner)))
            for pattern, one in rule.items() for name, inner in value.items()
        )  # fmt: skip

    def _additional_properties(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        listed, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        if not isinstance(listed, dict) or not isinstance(patterns, dict):
            return None
        return every(
            some((*(self.matches(pattern, name) for pattern in patterns), self.holds(rule, inner)))
            for name, inner in value.items() if name not in listed
        )  # fmt: skip

    def _property_names(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        return every(self.holds(rule, name) for name in value)

    def _required(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        return all(name in value for name in rule) if _is_texts(rule) else None

    def _dependencies(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        if not isinstance(rule, dict):
            return None
        return every(
            self._required(one, value, schema) if isinstance(one, list) else self.holds(one, value)
            for name, one in rule.items() if name in value
        )  # fmt: skip

    def _items(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        if isinstance(rule, list):
            return every(map(self.holds, rule, value))
        first = schema.get("prefixItems", [])
        return every(self.holds(rule, one) for one in value[len(first) :]) if isinstance(first, list) else None

    def _prefix_items(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        return every(map(self.holds, rule, value)) if isinstance(rule, list) else None

    def _pattern(self, rule: Any, value: Any, schema: dict[str, Any]) -> Fit:
        return self.matches(rule, value)


def _is_number(rule: Any) -> bool:
    return isinstance(rule, int | float) and not isinstance(rule, bool)


def _is_texts(rule: Any) -> bool:
    return isinstance(rule, list) and all(isinstance(name, str) for name in rule)


_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda rule, value: value >= rule, "maximum": lambda rule, value: value <= rule,
    "exclusiveMinimum": lambda rule, value: value > rule, "exclusiveMaximum": lambda rule, value: value < rule,
    "minLength": lambda rule, value: len(value) >= rule, "maxLength": lambda rule, value: len(value) <= rule,
    "minItems": lambda rule, value: len(value) >= rule, "maxItems": lambda rule, value: len(value) <= rule,
    "minProperties": lambda rule, value: len(value) >= rule, "maxProperties": lambda rule, value: len(value) <= rule,
}  # fmt: skip
_METHODS = {
    "type": "type", "enum": "enum", "const": "const", "allOf": "all_of", "anyOf": "any_of", "oneOf": "one_of",
    "not": "not", "if": "if", "then": "given", "else": "given", "$ref": "ref", "properties": "properties",
    "patternProperties": "pattern_properties", "additionalProperties": "additional_properties",
    "propertyNames": "property_names", "required": "required", "dependencies": "dependencies",
    "dependentRequired": "dependencies", "dependentSchemas": "dependencies", "items": "items",
    "prefixItems": "prefix_items", "pattern": "pattern",
}  # fmt: skip
_TYPE_OF_KEYWORD = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minItems", "maxItems", "uniqueItems", "items", "prefixItems", "additionalItems", "contains",
                     "minContains", "maxContains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("minProperties", "maxProperties", "properties", "patternProperties", "additionalProperties",
                     "propertyNames", "required", "dependencies", "dependentRequired", "dependentSchemas",
                     "unevaluatedProperties"), "object"),
}  # fmt: skip
