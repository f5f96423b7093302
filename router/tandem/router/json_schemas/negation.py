"""Schemas of what another schema forbids.

The result never allows what the schema allows. It may allow less than all the rest: what no keyword of llguidance says
is left out, such as a list in which some item does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tandem.router.json_schemas.complements import InexpressibleError, is_exact, without_types, without_values
from tandem.router.json_schemas.keywords import RESTRICTIONS, pointed

MAX_DEPTH = 48
Rewrite = Callable[[Any], Any]
"""Makes a schema of one, both ways as llguidance takes it."""


def all_of(schemas: list[Any]) -> Any:
    """A schema of values that fit all of them."""
    left = [one for one in schemas if one is not True and one != {}]
    if any(one is False for one in left):
        return False
    return left[0] if len(left) == 1 else {"allOf": left} if left else {}


def any_of(schemas: list[Any]) -> Any:
    """A schema of values that fit one of them."""
    left = [one for one in schemas if one is not False]
    if any(one is True or one == {} for one in left):
        return {}
    return left[0] if len(left) == 1 else {"anyOf": left} if left else False


class Negation:
    """Negates parts of the schema `root`. `rewrite`: see Rewrite. `spend` is called for each schema and may raise.
    `is_narrower`: something that a schema does not forbid was left out."""

    def __init__(self, root: Any, rewrite: Rewrite, spend: Callable[[], None]) -> None:
        self._root, self._rewrite, self._spend = root, rewrite, spend
        self.is_narrower = False
        self._open: list[str] = []
        """References that are being followed."""
        self._depth = 0

    def of(self, schema: Any) -> Any:
        """A schema of values that do not fit this one; InexpressibleError if it has none."""
        self._spend()
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            raise InexpressibleError
        if self._depth >= MAX_DEPTH:
            raise InexpressibleError
        self._depth += 1
        try:
            return self._any(self._keyword(key, schema) for key in schema if key in RESTRICTIONS and key not in _READ)
        finally:
            self._depth -= 1

    def _any(self, makers: Iterator[Callable[[], Any]]) -> Any:
        """A schema of values that fit one of those that can be made."""
        found, is_cut = [], False
        for make in makers:
            try:
                found.append(make())
            except InexpressibleError:
                is_cut = True
        whole = any_of(found)
        self.is_narrower = self.is_narrower or is_cut
        if whole is False and is_cut:
            raise InexpressibleError
        return whole

    def _keyword(self, key: str, schema: dict[str, Any]) -> Callable[[], Any]:
        method: Callable[[Any, dict[str, Any]], Any] | None = getattr(self, f"_{_METHODS.get(key, '')}", None)
        bound = _BOUNDS.get(key)

        def make() -> Any:
            rule = schema[key]
            if bound is not None and isinstance(rule, int | float) and not isinstance(rule, bool):
                if any(isinstance(schema.get(one), bool) for one in ("exclusiveMinimum", "exclusiveMaximum")):
                    raise InexpressibleError  # as the fourth draft has it
                return bound(rule)
            if method is None:
                raise InexpressibleError
            return method(rule, schema)

        return make

    def _type(self, rule: Any, schema: dict[str, Any]) -> Any:
        names = rule if isinstance(rule, list) else [rule]
        if not all(isinstance(name, str) for name in names) or ("integer" in names and "number" not in names):
            raise InexpressibleError  # nothing says "a number that is no integer"
        return without_types(names)

    def _enum(self, rule: Any, schema: dict[str, Any]) -> Any:
        if not isinstance(rule, list):
            raise InexpressibleError
        self.is_narrower = self.is_narrower or not is_exact(rule)
        return any_of(without_values(rule))

    def _const(self, rule: Any, schema: dict[str, Any]) -> Any:
        return self._enum([rule], schema)

    def _properties(self, rule: Any, schema: dict[str, Any]) -> Any:
        if not isinstance(rule, dict):
            raise InexpressibleError
        return self._any(self._property(name, one) for name, one in rule.items())

    def _property(self, name: str, schema: Any) -> Callable[[], Any]:
        def make() -> Any:
            denied = self.of(schema)
            return denied and {"type": "object", "properties": {name: denied}, "required": [name]}

        return make

    def _required(self, rule: Any, schema: dict[str, Any]) -> Any:
        if not isinstance(rule, list):
            raise InexpressibleError
        return any_of([{"type": "object", "properties": {str(name): False}} for name in rule])

    def _prefix_items(self, rule: Any, schema: dict[str, Any]) -> Any:
        if not isinstance(rule, list):
            raise InexpressibleError
        return self._any(self._item(place, one) for place, one in enumerate(rule))

    def _item(self, place: int, schema: Any) -> Callable[[], Any]:
        def make() -> Any:
            denied = self.of(schema)
            return denied and {"type": "array", "prefixItems": [*[{}] * place, denied], "minItems": place + 1}

        return make

    def _contains(self, rule: Any, schema: dict[str, Any]) -> Any:
        if "minContains" in schema or "maxContains" in schema:
            raise InexpressibleError
        return {"type": "array", "items": self.of(rule)}

    def _closed(self, rule: Any, schema: dict[str, Any]) -> Any:
        if rule is not False or schema.get("properties") or schema.get("patternProperties"):
            return self._trivial(rule)
        return {"type": "object", "minProperties": 1}

    def _trivial(self, rule: Any) -> Any:
        """Of a keyword that forbids nothing; nothing says what the others forbid."""
        if rule is True or rule == {}:
            return False
        raise InexpressibleError

    def _property_names(self, rule: Any, schema: dict[str, Any]) -> Any:
        return {"type": "object", "minProperties": 1} if rule is False else self._trivial(rule)

    def _pattern_properties(self, rule: Any, schema: dict[str, Any]) -> Any:
        if isinstance(rule, dict) and all(one is True or one == {} for one in rule.values()):
            return False
        raise InexpressibleError

    def _all_of(self, rule: Any, schema: dict[str, Any]) -> Any:
        return self._any(self._later(one) for one in _listed(rule))

    def _later(self, schema: Any) -> Callable[[], Any]:
        return lambda: self.of(schema)

    def _any_of(self, rule: Any, schema: dict[str, Any]) -> Any:
        return all_of([self.of(one) for one in _listed(rule)])

    def _one_of(self, rule: Any, schema: dict[str, Any]) -> Any:
        """None of them, or two."""
        branches = _listed(rule)
        pairs = [(one, other) for place, one in enumerate(branches) for other in branches[:place]]
        both = [lambda one=one, other=other: all_of([self._rewrite(one), self._rewrite(other)]) for one, other in pairs]
        return self._any(iter([lambda: self._any_of(rule, schema), *both]))

    def _not(self, rule: Any, schema: dict[str, Any]) -> Any:
        return self._rewrite(rule)

    def _if(self, rule: Any, schema: dict[str, Any]) -> Any:
        then, otherwise = schema.get("then", True), schema.get("else", True)
        cases = [
            lambda: all_of([self._rewrite(rule), self.of(then)]),
            lambda: all_of([self.of(rule), self.of(otherwise)]),
        ]
        return self._any(iter(cases))

    def _dependencies(self, rule: Any, schema: dict[str, Any]) -> Any:
        if not isinstance(rule, dict):
            raise InexpressibleError
        return self._any(self._dependency(name, one) for name, one in rule.items())

    def _dependency(self, name: str, rule: Any) -> Callable[[], Any]:
        needed = {"required": rule} if isinstance(rule, list) else rule
        return lambda: all_of([{"type": "object", "required": [name]}, self.of(needed)])

    def _ref(self, rule: Any, schema: dict[str, Any]) -> Any:
        if not isinstance(rule, str) or not rule.startswith("#") or rule in self._open:
            raise InexpressibleError
        self._open.append(rule)
        try:
            return self.of(pointed(self._root, rule))
        finally:
            self._open.pop()


def _listed(rule: Any) -> list[Any]:
    if not isinstance(rule, list):
        raise InexpressibleError
    return rule


def _least(name: str, kind: str, rule: float) -> Any:
    return {"type": kind, name: int(rule) + 1}


def _most(name: str, kind: str, rule: float) -> Any:
    return {"type": kind, name: int(rule) - 1} if rule >= 1 else False


_READ = ("then", "else", "minContains", "maxContains")
"""Read with another keyword."""
_BOUNDS: dict[str, Callable[[Any], Any]] = {
    "minLength": lambda rule: _most("maxLength", "string", rule),
    "maxLength": lambda rule: _least("minLength", "string", rule),
    "minItems": lambda rule: _most("maxItems", "array", rule),
    "maxItems": lambda rule: _least("minItems", "array", rule),
    "minProperties": lambda rule: _fewer(rule),
    "maxProperties": lambda rule: _least("minProperties", "object", rule),
    "minimum": lambda rule: {"type": "number", "exclusiveMaximum": rule},
    "maximum": lambda rule: {"type": "number", "exclusiveMinimum": rule},
    "exclusiveMinimum": lambda rule: {"type": "number", "maximum": rule},
    "exclusiveMaximum": lambda rule: {"type": "number", "minimum": rule},
}


def _fewer(rule: float) -> Any:
    if rule == 1:
        return {"type": "object", "additionalProperties": False}
    return _most("maxProperties", "object", rule)


_METHODS = {
    "type": "type", "enum": "enum", "const": "const", "properties": "properties", "required": "required",
    "prefixItems": "prefix_items", "contains": "contains", "additionalProperties": "closed",
    "propertyNames": "property_names", "patternProperties": "pattern_properties", "allOf": "all_of", "anyOf": "any_of",
    "oneOf": "one_of", "not": "not", "if": "if", "dependencies": "dependencies", "dependentRequired": "dependencies",
    "dependentSchemas": "dependencies", "$ref": "ref",
}  # fmt: skip
