"""Random conversations with tools: schemas, calls by them, their results, and texts that are hard to write."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.router.tokenization.chat_template import THOUGHT_NAMES

WORDS = (
    "Zürich", "naïve", "日本語の天気", "שלום", "Ελλάδα", "😀👩\u200d🚀", "e\u0301", "a<b>c</b>", "[x]", "{y}",
    'say "hi"', "it's", "`x`", "C:\\dir\\n", "two\nlines", "tab\there", "\r\n", "1, 2", "k: v", "a=b",
    "100 %", "&amp;", "\u2028", "\x07", "]}", "null?", "true story", "-1.5e3 m", "# one", "```json",
    "; ", "(f)", "$name", "plain", "words", "of", "an", "ordinary", "answer",
)  # fmt: skip
ID_CHARS = string.ascii_letters + string.digits
THOUGHTS = ("I have to look that up.", "Der Nutzer fragt nach Zürich – einfach.", "First a, then b.\n\nThen c.")
CONTENTS = ("Let me see.", "Ich schaue nach: „Zürich“.", "One moment …\nthen two.", "好的。")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Limits of a format. `has_plain_keys`: the keys of objects inside arguments are words."""

    has_plain_keys: bool = False
    taken: tuple[str, ...] = ()
    """Texts that no value contains: a tag of the format that stands for itself alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An answer: thoughts and content, "" = none, and calls with their results."""

    content: str
    thoughts: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    ids: tuple[str, ...]
    results: tuple[str, ...]

    def cut(self, most_calls: int) -> Turn:
        """The same with fewer calls."""
        return replace(
            self, calls=self.calls[:most_calls], ids=self.ids[:most_calls], results=self.results[:most_calls]
        )

    def with_less(self) -> Turn:
        """The same without content beside thoughts."""
        return replace(self, content="" if self.thoughts else self.content)

    def message(self, *, is_text: bool, missing: Mapping[str, Any] | None) -> dict[str, Any]:
        """It as a message; arguments as text or objects, and `missing`, or null, in place of content that it lacks."""
        calls = [
            {"id": given, "type": "function", "function": {
                "name": name, "arguments": json.dumps(one, ensure_ascii=False) if is_text else one,
            }}
            for given, (name, one) in zip(self.ids, self.calls, strict=True)
        ]  # fmt: skip
        said = {"content": self.content} if self.content else {"content": None} if missing is None else dict(missing)
        thoughts = dict.fromkeys(THOUGHT_NAMES, self.thoughts) if self.thoughts else {}
        return {"role": "assistant", **said, **thoughts, "tool_calls": calls}

    def result_messages(self) -> list[dict[str, Any]]:
        return [
            {"role": "tool", "tool_call_id": given, "name": name, "content": result}
            for given, (name, _), result in zip(self.ids, self.calls, self.results, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A question, perhaps an earlier turn of calls with an answer and another question, and a turn of calls."""

    tools: Sequence[Mapping[str, Any]]
    start: Sequence[Mapping[str, Any]]
    earlier: Turn | None
    between: Sequence[Mapping[str, Any]]
    last: Turn

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The parameters of each function."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}

    def cut(self, most_calls: int) -> Conversation:
        """The same with fewer calls in each turn."""
        return replace(self, earlier=self.earlier and self.earlier.cut(most_calls), last=self.last.cut(most_calls))

    def with_less(self) -> Conversation:
        """The same without content beside thoughts."""
        return replace(self, earlier=self.earlier and self.earlier.with_less(), last=self.last.with_less())

    def before(self, *, is_text: bool = True, missing: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """The messages in front of the last turn."""
        messages = [dict(one) for one in self.start]
        if self.earlier is not None:
            messages.append(self.earlier.message(is_text=is_text, missing=missing))
            messages += self.earlier.result_messages()
            messages += [dict(one) for one in self.between]
        return messages

    def until_calls(self, *, is_text: bool = True, missing: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """The messages up to the last calls."""
        last = self.last.message(is_text=is_text, missing=missing)
        return [*self.before(is_text=is_text, missing=missing), last]

    def whole(self, *, is_text: bool = True, missing: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """All messages, with the last results."""
        return [*self.until_calls(is_text=is_text, missing=missing), *self.last.result_messages()]


def conversation(seed: str, kind: Kind) -> Conversation:
    """The conversation of a seed."""
    return _Maker(random.Random(seed), kind).conversation()


class _Maker:
    def __init__(self, rng: random.Random, kind: Kind) -> None:
        self._rng, self._kind = rng, kind

    def conversation(self) -> Conversation:
        rng = self._rng
        names = {self._name() for _ in range(rng.randint(1, 4))}
        schemas = {name: self._schema() for name in sorted(names)}
        tools = [
            {"type": "function", "function": {"name": name, "description": self._text(4), "parameters": schema}}
            for name, schema in schemas.items()
        ]
        start = [{"role": "user", "content": f"Ask: {self._text(5)}."}]
        if rng.random() < 0.4:
            start.insert(0, {"role": "system", "content": f"You help. {self._text(3)}."})
        earlier = self._turn(schemas) if rng.random() < 0.4 else None
        between = [{"role": "assistant", "content": "It is so."}, {"role": "user", "content": f"And {self._text(3)}?"}]
        return Conversation(tools=tools, start=start, earlier=earlier, between=between, last=self._turn(schemas))

    def _turn(self, schemas: Mapping[str, Any]) -> Turn:
        rng = self._rng
        names = [rng.choice(list(schemas)) for _ in range(rng.choice((1, 1, 2, 3)))]
        return Turn(
            content=rng.choice(CONTENTS) if rng.random() < 0.4 else "",
            thoughts=rng.choice(THOUGHTS) if rng.random() < 0.5 else "",
            calls=tuple((name, self._arguments(schemas[name])) for name in names),
            ids=tuple("".join(rng.choices(ID_CHARS, k=9)) for _ in names),
            results=tuple(self._text(4) or "-" for _ in names),
        )

    def _name(self) -> str:
        return "".join(self._rng.choices(string.ascii_lowercase + "_", k=self._rng.randint(1, 9))) + "_f"

    def _key(self) -> str:
        if self._kind.has_plain_keys or self._rng.random() < 0.7:
            return self._rng.choice(string.ascii_lowercase) + "".join(self._rng.choices(ID_CHARS + "_", k=5))
        return self._text(2) or "x"

    def _text(self, most: int) -> str:
        text = self._rng.choice((" ", " ", "")).join(self._rng.choices(WORDS, k=self._rng.randint(0, most)))
        for taken in self._kind.taken:
            text = text.replace(taken, "")
        return text.strip()

    def _schema(self) -> dict[str, Any]:
        names = [self._rng.choice(string.ascii_lowercase) + "".join(self._rng.choices(ID_CHARS + "_", k=4))
                 for _ in range(self._rng.choice((0, 1, 2, 3, 5)))]  # fmt: skip
        properties = {name: self._property(2) for name in dict.fromkeys(names)}
        required = [name for name in properties if self._rng.random() < 0.5]
        return {"type": "object", "properties": properties, "required": required}

    def _property(self, depth: int) -> dict[str, Any]:
        kinds = ["string", "string", "integer", "number", "boolean", "enum", "maybe"]
        kind = self._rng.choice([*kinds, "array", "object", "any"] if depth else kinds)
        if kind == "enum":
            return {"enum": [f"{n}-{self._text(1)}" for n in range(3)]}
        if kind == "maybe":
            return {"anyOf": [{"type": self._rng.choice(("string", "integer"))}, {"type": "null"}]}
        if kind == "array":
            return {"type": "array", "items": self._property(depth - 1)}
        if kind == "object":
            inner = {self._key(): self._property(depth - 1) for _ in range(self._rng.randint(0, 3))}
            return {"type": "object", "properties": inner}
        return {} if kind == "any" else {"type": kind, "description": self._text(2)}

    def _arguments(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self._value(one) for name, one in schema["properties"].items()
            if name in schema["required"] or self._rng.random() < 0.7
        }  # fmt: skip

    def _value(self, schema: Mapping[str, Any]) -> Any:
        rng = self._rng
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "anyOf" in schema:
            return self._value(rng.choice(schema["anyOf"]))
        match schema.get("type"):
            case "string":
                return self._text(rng.choice((1, 3, 6)))
            case "integer":
                return rng.choice((0, -1, rng.randint(-(10**6), 10**6), 2**53))
            case "number":
                return rng.choice((0.5, -1.25, 1e-7, 3, rng.uniform(-1000, 1000)))
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case "array":
                return [self._value(schema["items"]) for _ in range(rng.randint(0, 3))]
            case "object":
                return {key: self._value(one) for key, one in schema["properties"].items() if rng.random() < 0.8}
        return {self._key(): rng.choice((1, [True, None], {"b": self._text(2)}))}
