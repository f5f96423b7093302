"""Rules of a grammar for the arguments of a call, by the schema of its parameters and in the style of a format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tandem.core.output_grammar import SPACING
from tandem.router.output_formats.custom_tools import INPUT
from tandem.router.output_formats.families.function_gemma import ESCAPE
from tandem.router.output_formats.families.qwen_coder import END_PARAMETER, PARAMETER, kinds_of

InGrammar = Callable[[str], str]
"""Text as terms of the grammar."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ELSEWHERE = {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties"}
"""Keywords that may name further parameters. A schema without them has all in its properties: functions that are
called with others fail."""
_BRANCHES = ("anyOf", "oneOf", "prefixItems")
_DEFINITIONS = ("$defs", "definitions")
PLAIN_STYLES = ("xml", "gemma")
"""Those that write texts as they are, without escapes."""
_MOST_CHARS = 4096
_DEPTH = 4


def whole_schema(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of parameters of a function with what it leaves unsaid: objects have the properties listed alone."""
    whole = {"type": "object", **schema} if schema else _NO_PARAMETERS
    if "allOf" in json.dumps(whole):  # several schemas describe one object
        return _without_others(whole)
    shared = {
        key: {name: _closed(one) for name, one in whole[key].items()}
        for key in _DEFINITIONS
        if isinstance(whole.get(key), Mapping)
    }
    return _without_others({**_closed(whole), **shared})


def _closed(schema: Any) -> Any:
    """The schema with objects inside closed that list properties: models fill others up without end."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    if isinstance(properties := schema.get("properties"), Mapping):
        made["properties"] = {name: _closed(one) for name, one in properties.items()}
    elif isinstance(schema.get("items"), Mapping):
        made["items"] = _closed(schema["items"])
    else:  # no branch closes what the others describe
        made |= {key: [_closed(one) for one in schema[key]] for key in _BRANCHES if isinstance(schema.get(key), list)}
    return _without_others(made) if made.get("properties") else made


def _without_others(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or _ELSEWHERE & schema.keys():
        return schema
    has_all = not isinstance(required, list) or all(name in properties for name in required)
    return {"additionalProperties": False, **schema} if has_all else schema


def with_options(schema: Mapping[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """The schema with llguidance's options; `is_strict` False = unknown keywords are ignored."""
    return {**schema, "x-guidance": {**SPACING, "lenient": not is_strict}}


class ArgumentRules:
    """`rules` are named behind `prefix`; `terms` writes tags; `is_strict` False = unknown keywords are ignored."""

    def __init__(self, prefix: str, terms: InGrammar, *, is_strict: bool) -> None:
        self._prefix, self._terms, self._is_strict = prefix, terms, is_strict
        self._definitions: Mapping[str, Any] = {}
        self.rules: list[str] = []

    def of(self, schema: Mapping[str, Any] | None, style: str) -> str:
        """The name of the rule for arguments by `schema`."""
        whole = self._whole(schema)
        if style == "json":
            return self._json(whole)
        properties = whole.get("properties")
        fields = properties if isinstance(properties, Mapping) else {}
        required = whole.get("required", [])
        if style == "xml":
            written = {name: self._parameter(name, one) for name, one in fields.items()}
            return self._add(" ".join(one if name in required else f"{one}?" for name, one in written.items()) or '""')
        if style == "python":
            return self._separated({f"{name}=": self._python(one) for name, one in fields.items()}, {
                f"{name}=" for name in required
            }, ", ")  # fmt: skip
        return self._gemma_fields(fields, required, _DEPTH)

    def of_call(self, written: str, name: str, schema: Mapping[str, Any] | None) -> str:
        """The name of the rule for a call that is one JSON object: it shares its beginning with other JSON, and may
        stand where that may. `written` has $name and $arguments."""
        whole = self._whole(schema)
        fields = json.loads(written.replace("$arguments", '"$arguments"'))
        properties = {key: {"const": name} if value == "$name" else whole for key, value in fields.items()}
        call = {"type": "object", "properties": properties, "required": [*fields], "additionalProperties": False}
        return self._json(call)

    def _whole(self, schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
        whole = whole_schema(schema)
        self._definitions = {key: whole[key] for key in _DEFINITIONS if key in whole}
        return whole

    def of_input(self, grammar: str, style: str) -> str:
        """The name of the rule for the arguments of a custom tool whose input is a text of `grammar`, the name of
        another grammar, in a style that writes texts as they are."""
        if style == "xml":
            begin, end = self._terms(f"{PARAMETER}{INPUT}>\n"), self._terms(f"\n{END_PARAMETER}\n")
        else:
            begin, end = self._terms(f"{INPUT}:{ESCAPE}"), self._terms(ESCAPE)
        return self._add(f"{begin} @{grammar} {end}")

    def _add(self, rule: str) -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}: {rule}")
        return name

    def _json(self, schema: Any) -> str:
        whole = {**self._definitions, **schema} if isinstance(schema, Mapping) else schema
        if isinstance(whole, Mapping):
            whole = with_options(whole, is_strict=self._is_strict)
        return self._add(f"%json {json.dumps(whole)}")

    def _separated(self, fields: Mapping[str, str], required: set[str], separator: str) -> str:
        """Fields in their order, those that are not `required` or not there, with a separator between each two."""
        rest = self._add('""')
        first = rest
        for key, value in reversed(list(fields.items())):
            field = f"{json.dumps(key)} {value}"
            skip_first, skip_rest = ("", "") if key in required else (f" | {first}", f" | {rest}")
            first = self._add(f"{field} {rest}{skip_first}")
            rest = self._add(f"{json.dumps(separator)} {field} {rest}{skip_rest}")
        return first

    def _python(self, schema: Any) -> str:
        if kinds_of(schema) == {"boolean"}:
            return '("True" | "False")'
        return self._json(schema)

    def _parameter(self, name: str, schema: Any) -> str:
        begin, end = self._terms(f"{PARAMETER}{name}>\n"), f"\n{END_PARAMETER}\n"
        values = _texts(schema)
        if values is not None:
            value = "(" + " | ".join(map(json.dumps, values)) + f") {self._terms(end)}"
        elif "string" in kinds_of(schema):
            value = self._free_text(schema, end)
        else:
            value = f"{self._json(schema)} {self._terms(end)}"
        return self._add(f"{begin} {value}")

    def _free_text(self, schema: Any, end: str) -> str:
        """Text of the length that the schema allows, and the first `end` behind it."""
        least, most = (schema.get(key) if isinstance(schema, Mapping) else None for key in ("minLength", "maxLength"))
        has_bounds = type(least) is int or (type(most) is int and most <= _MOST_CHARS)
        times = f"{{{least or 0},{most if type(most) is int else ''}}}" if has_bounds else "*"
        name = f"{self._prefix}_{len(self.rules)}".upper()
        terms = self._terms(end)
        if terms.startswith("<["):  # a token, which no text contains
            self.rules.append(rf"{name}: /(.|\n){times}/")
            return f"{name} {terms}"
        escaped = re.escape(end).replace("/", r"\/").replace("\n", "n")
        self.rules.append(rf"{name}: /(.|\n){times}{escaped}/ & ~/(.|\n)*{escaped}(.|\n)+/")
        return name

    def _gemma_fields(self, fields: Mapping[str, Any], required: Any, depth: int) -> str:
        names = set(required) if isinstance(required, list) else set()
        written = {f"{name}:": self._gemma(one, depth - 1) for name, one in fields.items()}
        return self._separated(written, {f"{name}:" for name in names}, ",")

    def _gemma(self, schema: Any, depth: int) -> str:
        kinds = kinds_of(schema)
        values = _texts(schema)
        if values is not None:
            quoted = " | ".join(self._terms(f"{ESCAPE}{value}{ESCAPE}") for value in values)
            return f"({quoted})"
        if kinds == {"string"} or depth == 0 or not isinstance(schema, Mapping):
            mark = self._terms(ESCAPE)
            return self._add(f"{mark} {self._free_text(schema, ESCAPE)}")
        if kinds == {"object"}:
            inside = schema.get("properties") or {}
            return self._add(f'"{{" {self._gemma_fields(inside, schema.get("required"), depth)} "}}"')
        if kinds == {"array"}:
            one = self._gemma(schema.get("items", {"type": "string"}), depth - 1)
            return self._add(f'"[" ({one} ("," {one})*)? "]"')
        return self._json(schema)


def _texts(schema: Any) -> list[str] | None:
    """The texts that a schema lists; None = it lists none."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    return values if isinstance(values, list) and values and all(isinstance(one, str) for one in values) else None
