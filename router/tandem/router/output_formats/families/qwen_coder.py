"""`<tool_call><function=f><parameter=k>v</parameter></function></tool_call>` of Qwen3-Coder: values are plain text, and
the schema of the function tells which of them are strings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tandem.router.output_formats.families.hermes import BEGIN, END
from tandem.router.output_formats.families.pythonic import literal_as_json
from tandem.router.output_formats.part_collector import PartCollector
from tandem.router.output_formats.reader import Reader, Step
from tandem.router.output_formats.tool_format import CallShape, Schemas, ToolFormat

FUNCTION, PARAMETER = "<function=", "<parameter="
END_PARAMETER, END_FUNCTION = "</parameter>", "</function>"
_KINDS: Mapping[type, set[str]] = {
    str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"},
    dict: {"object"}, type(None): {"null"},
}  # fmt: skip
"""JSON Schema's names for the types of values."""


def _read(reader: Reader, output: PartCollector, schemas: Schemas) -> Step[bool]:
    yield from reader.skip(BEGIN)
    has_begun = False
    while (yield from reader.skip(FUNCTION)):
        parts: list[str] = []
        if not (yield from reader.until((">",), parts.append)):
            return False
        reader.take(1)
        name = "".join(parts).strip()
        output.start(name)
        has_begun = True
        if not (yield from _arguments(reader, output, schemas.get(name, {}))):
            return False
    if has_begun:
        yield from reader.skip(END)
    return has_begun


def _arguments(reader: Reader, output: PartCollector, schema: Mapping[str, Any]) -> Step[bool]:
    """Read up to the end of the function; False = the answer ends within a value."""
    properties = schema.get("properties")
    before = "{"
    while (yield from reader.skip(PARAMETER)):
        parts: list[str] = []
        if not (yield from reader.until((">",), parts.append)):
            return False
        reader.take(1)
        key = "".join(parts).strip()
        output.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        value = _Value(output, kinds_of(properties.get(key) if isinstance(properties, Mapping) else None))
        if not (yield from reader.until((END_PARAMETER, END), value.add)):
            value.break_off()
            return False
        value.end()
        yield from reader.skip(END_PARAMETER)
    output.arguments("{}" if before == "{" else "}")
    yield from reader.skip(END_FUNCTION)
    return True


class _Value:
    """One value, of one of `kinds`; a newline at each end belongs to the tags."""

    def __init__(self, output: PartCollector, kinds: set[str]) -> None:
        self._output, self._kinds, self._is_text = output, kinds, kinds == {"string"}
        self._held, self._has_begun = "", False

    def add(self, text: str) -> None:
        self._held += text
        if not self._has_begun and self._held:
            self._has_begun = True
            self._held = self._held.removeprefix("\n")
            if self._is_text:
                self._output.arguments('"')
        if self._is_text and self._held:
            shown = self._held.removesuffix("\n")
            self._output.arguments(_inside_string(shown))
            self._held = self._held[len(shown) :]

    def end(self) -> None:
        if self._is_text:
            self._output.arguments('"' if self._has_begun else '""')
        else:
            self._output.arguments(_as_json(self._held.removesuffix("\n"), self._kinds))

    def break_off(self) -> None:
        """The answer ended within it."""
        self._output.arguments(_inside_string(self._held))


def _inside_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str, kinds: set[str]) -> str:
    """A value that is no JSON, or not of a kind that it may have, is a string. Templates write some values in Python,
    and so do models: `True`, `None`, lists and objects."""
    try:
        value, written, are_checked = json.loads(text), text.strip(), "string" in kinds
    except (ValueError, RecursionError):
        written, are_checked = literal_as_json(text) or '""', bool(kinds)
        value = json.loads(written)
        if isinstance(value, str | float) or type(value) is int:
            return json.dumps(text, ensure_ascii=False)
    if are_checked and not kinds & _KINDS[type(value)]:
        return json.dumps(text, ensure_ascii=False)
    return written


def kinds_of(schema: Any) -> set[str]:
    """Types that a value of `schema` may have; without any schema it is a string, and an empty set means any type."""
    if not isinstance(schema, Mapping):
        return {"string"}
    if isinstance(values := schema.get("enum"), list):
        return {"string"} if all(isinstance(one, str) for one in values) else set()
    for name in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(name), list):
            found = [kinds_of(one) for one in choices]
            return set().union(*found) if all(found) else set()
    kinds = schema.get("type", [])
    return {kinds} if isinstance(kinds, str) else {one for one in kinds if isinstance(one, str)}


QWEN_CODER = ToolFormat(
    name="qwen3_coder",
    read=_read,
    shape=CallShape(call=f"{BEGIN}\n{FUNCTION}$name>\n$arguments{END_FUNCTION}\n{END}", between="\n", style="xml"),
    tags=(BEGIN, END),
    triggers=(BEGIN, FUNCTION),
    signs=((FUNCTION,),),
)
