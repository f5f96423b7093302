"""Rewrites keywords that llguidance lacks: not, if, dependencies, oneOf with branches that may both fit, and more.

What fits the result fits the schema. The other way round it holds, too, but for what `negation` leaves out. A keyword
that cannot be rewritten stays, and llguidance refuses it where it is needed.
"""

from __future__ import annotations

import re
from typing import Any

from tandem.router.json_schemas.complements import InexpressibleError
from tandem.router.json_schemas.disjointness import Disjointness
from tandem.router.json_schemas.evaluation import Evaluation
from tandem.router.json_schemas.formats import FORMAT_PATTERNS
from tandem.router.json_schemas.keywords import LISTS, MAPS, RESTRICTIONS, SCHEMAS
from tandem.router.json_schemas.negation import Negation, all_of, any_of

MAX_STEPS = 5_000
"""Schemas that rewriting makes of one, beyond those that it has."""
MAX_BRANCHES = 32
"""Of a oneOf, properties of a minProperties."""
MAX_DEPENDENCIES = 8
MAX_CANDIDATES = 256
NEEDED = re.compile(
    r'"(?:not|if|oneOf|dependen\w+|minProperties|maxProperties|propertyNames|format)"\s*:|"enum"\s*:.*"enum"\s*:',
    re.DOTALL,
)
"""Found in the text of a schema that may have something to rewrite; of two lists of values both may have to hold."""


class TooManyStepsError(Exception):
    """Rewriting takes more than MAX_STEPS. Its text is the path of the keyword."""


class Rewriting:
    """Rewrites one schema. `kept`: the paths, behind the schema's own, of keywords that could not be rewritten."""

    def __init__(self, root: Any) -> None:
        self.kept: list[str] = []
        self._root = root
        self._evaluation = Evaluation(root)
        self._disjointness = Disjointness(root, self._evaluation)
        self._negation = Negation(root, self._inner, self._spend)
        self._left, self._path, self._depth = MAX_STEPS, "", 0

    def result(self) -> Any:
        """The schema, rewritten. Raises TooManyStepsError."""
        return self._of(self._root, "")

    @property
    def is_narrower(self) -> bool:
        """True if something that fits the schema may not fit the result."""
        return self._negation.is_narrower

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TooManyStepsError(self._path)

    def _inner(self, schema: Any) -> Any:
        """A part that is used in another place than its own."""
        self._spend()
        return self._of(schema, self._path)

    def _of(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        if self._depth:
            self._spend()
        fitting = self._candidates(schema)
        if fitting is not None:
            others = {key: value for key, value in schema.items() if key not in RESTRICTIONS}
            return {**others, "enum": fitting} if fitting else False
        made = {key: self._part(key, value, path) for key, value in schema.items()}
        extras: list[Any] = []
        for key, rewrite in _REWRITES.items():
            if key not in schema:
                continue
            self._depth += 1
            outer, self._path = self._path, self._path if self._depth > 1 else f"{path}.{key}"
            try:
                extra = rewrite(self, schema, made)
            except InexpressibleError:
                self.kept.append(f"{path}.{key}")
            else:
                extras.append(extra)
            finally:
                self._depth -= 1
                self._path = outer
        whole = all_of(extras)
        if whole is False:
            return False
        if whole != {}:
            every = made.get("allOf")
            made["allOf"] = [*(every if isinstance(every, list) else ()), whole]
        return made

    def _part(self, key: str, value: Any, path: str) -> Any:
        """Value under a keyword; a part of one that is rewritten is left to that."""
        if key in _REWRITES and key != "oneOf":
            return value
        if key in MAPS and isinstance(value, dict):
            return {name: self._of(one, f"{path}.{key}.{name}") for name, one in value.items()}
        if (key in LISTS or key == "items") and isinstance(value, list):
            return [self._of(one, f"{path}.{key}[{place}]") for place, one in enumerate(value)]
        return self._of(value, f"{path}.{key}") if key in SCHEMAS else value

    def _candidates(self, schema: dict[str, Any]) -> list[Any] | None:
        """The values that fit a schema that lists some beside other restrictions, if that is known of each."""
        if len(schema.keys() & RESTRICTIONS - {"type"}) < 2 and "allOf" not in schema:
            return None
        every = schema.get("allOf")
        for part in (schema, *(every if isinstance(every, list) else ())):
            if not isinstance(part, dict):
                continue
            values = [part["const"]] if "const" in part else part.get("enum")
            if isinstance(values, list) and len(values) <= MAX_CANDIDATES:
                answers = [self._evaluation.holds(schema, value) for value in values]
                if None not in answers:
                    return [value for value, fits in zip(values, answers, strict=True) if fits]
        return None

    def _not(self, schema: dict[str, Any], made: dict[str, Any]) -> Any:
        denied = self._denied(schema["not"], _without(schema, "not"))
        made.pop("not")
        return denied

    def _denied(self, schema: Any, *around: Any) -> Any:
        """Complement of a schema; InexpressibleError if no value of what can be written of it fits `around` it."""
        negation = self._negation
        was_narrower, negation.is_narrower = negation.is_narrower, False
        denied = negation.of(schema)
        if negation.is_narrower and self._disjointness.excludes(denied, *around):
            raise InexpressibleError
        negation.is_narrower = negation.is_narrower or was_narrower
        return denied

    def _if(self, schema: dict[str, Any], made: dict[str, Any]) -> Any:
        """The condition with what then holds, or what the condition forbids with what holds else."""
        condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
        whole = all_of([]) if then is True and otherwise is True else any_of([
            all_of([self._inner(condition), self._inner(then)]),
            all_of([self._denied(condition, _without(schema, "if", "then", "else")), self._inner(otherwise)]),
        ])  # fmt: skip
        for key in ("if", "then", "else"):
            made.pop(key, None)
        return whole

    def _one_of(self, schema: dict[str, Any], made: dict[str, Any]) -> Any:
        """Each branch, without what fits another one that it does not exclude by itself."""
        branches = schema["oneOf"]
        if not isinstance(branches, list) or not 1 <= len(branches) <= MAX_BRANCHES:
            raise InexpressibleError
        around = _without(schema, "oneOf")
        denied = {place: {place} for place in range(len(branches))}
        for place, one in enumerate(branches):
            for before in range(place):
                if self._disjointness.excludes(one, branches[before], around):
                    denied[place].add(before)
                    denied[before].add(place)
        options = [
            all_of([option, *(self._denied(branches[other], branches[place], around) for other in range(len(branches))
                              if other not in denied[place])])
            for place, option in enumerate(made["oneOf"])
        ]  # fmt: skip
        made.pop("oneOf")
        return any_of(options)

    def _dependencies(self, key: str, schema: dict[str, Any], made: dict[str, Any]) -> Any:
        """Without the property, or with what it needs."""
        rules = schema[key]
        if not isinstance(rules, dict) or len(rules) > MAX_DEPENDENCIES:
            raise InexpressibleError
        extras = []
        for name, rule in rules.items():
            needed = {"required": rule} if isinstance(rule, list) else self._inner(rule)
            there = all_of([{"required": [name]}, needed])
            extras.append(any_of([{"properties": {name: False}}, there]) if needed is not True else True)
        made.pop(key)
        return all_of(extras)

    def _min_properties(self, schema: dict[str, Any], made: dict[str, Any]) -> Any:
        """One of the properties that may be left out, or another one."""
        least, optional, required = schema["minProperties"], _optional(schema), _required(schema)
        if not optional or not isinstance(least, int):
            return True
        missing = least - len(required)
        if missing > 1 or len(optional) > MAX_BRANCHES or ("maxProperties" in schema and missing > 0):
            return True  # as it is: llguidance refuses it
        made.pop("minProperties")
        if missing <= 0:
            return True
        other = {"properties": dict.fromkeys(optional, False), "minProperties": least}
        is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        return any_of([*({"required": [name]} for name in optional), not is_closed and other])

    def _max_properties(self, schema: dict[str, Any], made: dict[str, Any]) -> Any:
        """Nothing where no more are allowed anyway."""
        most, listed = schema["maxProperties"], schema.get("properties", {})
        is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if isinstance(most, int) and isinstance(listed, dict) and is_closed and len(listed) <= most:
            made.pop("maxProperties")
        return True

    def _property_names(self, schema: dict[str, Any], made: dict[str, Any]) -> Any:
        """Names of one pattern as a pattern of properties; of listed properties those whose names fit."""
        rule, listed = schema["propertyNames"], schema.get("properties", {})
        is_plain = isinstance(rule, dict) and rule.keys() & RESTRICTIONS <= {"pattern", "type"} and "pattern" in rule
        others = schema.get("additionalProperties", True)
        if not is_plain or rule.get("type", "string") != "string" or "patternProperties" in schema:
            raise InexpressibleError
        if not isinstance(others, bool) or not isinstance(listed, dict) or not isinstance(rule["pattern"], str):
            raise InexpressibleError
        fits = {name: self._evaluation.matches(rule["pattern"], name) for name in listed}
        if None in fits.values():
            raise InexpressibleError
        made.pop("propertyNames")
        if listed:
            made["properties"] = {name: one if fits[name] else False for name, one in made["properties"].items()}
        if others:
            made |= {"patternProperties": {rule["pattern"]: {}}, "additionalProperties": False}
        return True

    def _format(self, schema: dict[str, Any], made: dict[str, Any]) -> Any:
        """The pattern of a format that llguidance does not know, where no other pattern stands beside it."""
        pattern = FORMAT_PATTERNS.get(schema["format"]) if isinstance(schema["format"], str) else None
        if pattern is not None and "pattern" not in schema:
            made.pop("format")
            made["pattern"] = pattern
        return True


def _without(schema: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}


def _required(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _optional(schema: dict[str, Any]) -> list[str]:
    """Listed properties that may be left out."""
    listed = schema.get("properties")
    if not isinstance(listed, dict):
        return []
    return [name for name, one in listed.items() if one is not False and name not in _required(schema)]


_REWRITES = {
    "not": Rewriting._not,
    "if": Rewriting._if,
    "oneOf": Rewriting._one_of,
    "dependencies": lambda self, schema, made: self._dependencies("dependencies", schema, made),
    "dependentRequired": lambda self, schema, made: self._dependencies("dependentRequired", schema, made),
    "dependentSchemas": lambda self, schema, made: self._dependencies("dependentSchemas", schema, made),
    "propertyNames": Rewriting._property_names,
    "minProperties": Rewriting._min_properties,
    "maxProperties": Rewriting._max_properties,
    "format": Rewriting._format,
}
