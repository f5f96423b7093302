"""Hostile JSON schemas: deep, wide, exponential, recursive and full of patterns and giant numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from proof.grammars.regex_recipes import regex

SCALARS = ("string", "number", "integer", "boolean", "null")
COMBINERS = ("allOf", "anyOf", "oneOf")
NUMBERS = (
    0,
    -1,
    1,
    0.1,
    1e-300,
    1e300,
    10**9,
    10**18,
    2**63,
    2**64,
    10**30,
    -(2**63),
    0.3333333333333333,
    65536,
    100_000,
)
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "byte",
           "regex", "uri-reference", "uri-template", "url", "unknown", "semver", "idn-email", "json-pointer",
           "moon")  # fmt: skip


def some_count(random: Random, most: int) -> int:
    """A count up to `most`, small ones as often as large ones."""
    return int(most ** random.random())


def leaf(random: Random) -> Any:
    """A schema without schemas in it."""
    kind = random.randrange(9)
    if kind == 0:
        return {"type": "string", "pattern": regex(random)}
    if kind == 1:
        low = some_count(random, 10**6)
        return {"type": "string", "minLength": low, "maxLength": low + some_count(random, 10**6)}
    if kind == 2:
        bounds = {name: random.choice(NUMBERS) for name in ("minimum", "maximum", "exclusiveMinimum", "multipleOf")
                  if random.random() < 0.5}  # fmt: skip
        return {"type": random.choice(("number", "integer")), **bounds}
    if kind == 3:
        return {"enum": [random.choice((f"e{n}", n, None, [n], {"a": n})) for n in range(some_count(random, 300))]}
    if kind == 4:
        return {"const": value(random, 3)}
    if kind == 5:
        return {"type": "string", "format": random.choice(FORMATS)}
    if kind == 6:
        return random.choice((True, False, {}, {"type": []}, {"type": ["string", "null"]}))
    return {"type": random.choice(SCALARS)}


def value(random: Random, depth: int) -> Any:
    """A value of JSON."""
    kind = random.randrange(7) if depth else random.randrange(5)
    if kind < 5:
        return random.choice((None, True, "a", 'é\n"', "", 0, -1.5, 1e300, 10**25))
    count = some_count(random, 8)
    if kind == 5:
        return [value(random, depth - 1) for _ in range(count)]
    return {f"k{n}": value(random, depth - 1) for n in range(count)}


def deep(random: Random) -> Any:
    """One keyword around the other, up to the nesting that is allowed and beyond."""
    made = leaf(random)
    wrappers = random.sample(("items", "not", "if", "properties", "anyOf", "allOf", "oneOf", "contains",
                              "additionalProperties", "patternProperties", "propertyNames", "prefixItems",
                              "dependentSchemas", "else"), random.randint(1, 4))  # fmt: skip
    for _ in range(some_count(random, 80)):
        made = wrapped(random, random.choice(wrappers), made)
    return made


def wrapped(random: Random, keyword: str, made: Any) -> Any:
    """A schema with `made` under the keyword."""
    if keyword in ("anyOf", "allOf", "oneOf", "prefixItems"):
        return {keyword: [made, *([made] if random.random() < 0.05 else [leaf(random)])]}
    if keyword in ("properties", "patternProperties", "dependentSchemas"):
        name = "a" if keyword != "patternProperties" else "^a"
        return {keyword: {name: made}, **({"required": ["a"]} if random.random() < 0.5 else {})}
    if keyword == "if":
        return {"if": made, random.choice(("then", "else")): leaf(random)}
    return {keyword: made}


def wide(random: Random) -> Any:
    """An object of many properties, some required, or many items."""
    count = some_count(random, 900)
    if random.random() < 0.2:
        return {"type": "array", "prefixItems": [leaf(random) for _ in range(count)], "items": False}
    length = some_count(random, 2000) if random.random() < 0.2 else 3
    names = [f"{'p' * length}{n}" for n in range(min(count, 200_000 // (length + 40)))]
    required = [name for name in names if random.random() < random.choice((0, 0.5, 1))]
    return {"type": "object", "properties": {name: leaf(random) if random.random() < 0.3 else {"type": "string"}
                                             for name in names},
            "required": required, **({"additionalProperties": leaf(random)} if random.random() < 0.5 else {}),
            **({"minProperties": some_count(random, 2000)} if random.random() < 0.1 else {})}  # fmt: skip


def doubling(random: Random) -> Any:
    """Each definition refers twice to the next one: as many paths as two to the power of their number."""
    count, combiner = some_count(random, 60), random.choice((*COMBINERS, "properties", "items"))
    defs: dict[str, Any] = {f"d{count}": leaf(random)}
    for n in range(count):
        following = {"$ref": f"#/$defs/d{n + 1}"}
        if combiner == "properties":
            defs[f"d{n}"] = {"type": "object", "properties": {"a": following, "b": following}, "required": ["a"]}
        elif combiner == "items":
            defs[f"d{n}"] = {"type": "array", "prefixItems": [following, following], "minItems": 2}
        else:
            extra = {"type": "object", "properties": {f"x{n}": leaf(random)}} if random.random() < 0.5 else {}
            defs[f"d{n}"] = {combiner: [following, {**following, **extra}]}
    return {"$ref": "#/$defs/d0", "$defs": defs}


def crossed(random: Random) -> Any:
    """All of many choices: their product has to be combined."""
    sides, choices = some_count(random, 24), random.randint(2, 6)
    combiner = random.choice(("anyOf", "oneOf"))

    def option(side: int, choice: int) -> Any:
        kind = random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": regex(random)}
        if kind == 1:
            return {"properties": {f"k{side}": {"const": choice}}, "required": [f"k{side}"]}
        if kind == 2:
            return {"properties": {"k": {"enum": [side, choice, "x"]}, f"o{side}": leaf(random)}}
        return {"minLength": choice, "maxLength": choice + side, "minimum": choice}

    return {"allOf": [{combiner: [option(side, choice) for choice in range(choices)]} for side in range(sides)]}


def cyclic(random: Random) -> Any:
    """References in circles, with and without something between them."""
    count = some_count(random, 200)
    defs = {}
    for n in range(count):
        target = {"$ref": f"#/$defs/d{random.randrange(count)}"}
        kind = random.randrange(6)
        defs[f"d{n}"] = (
            target if kind == 0
            else {"anyOf": [target, leaf(random)]} if kind == 1
            else {"allOf": [target, leaf(random)]} if kind == 2
            else {"type": "array", "items": target} if kind == 3
            else {"properties": {"a": target, "b": {"$ref": "#"}}, "required": ["a"] * (n % 2)} if kind == 4
            else {**target, **leaf_object(random)}
        )  # fmt: skip
    return {"$ref": "#/$defs/d0", "$defs": defs}


def leaf_object(random: Random) -> dict[str, Any]:
    made = leaf(random)
    return made if isinstance(made, dict) else {}


def chained(random: Random) -> Any:
    """A long chain of references, each of which may add something."""
    count = some_count(random, 2000)
    is_adding = random.random() < 0.5
    defs = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", **(leaf_object(random) if is_adding else {})} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {"type": "string"}}}


def crowded(random: Random) -> Any:
    """Many patterns of properties, that may overlap each other and the properties."""
    count = some_count(random, 60)
    patterns = {
        regex(random) if random.random() < 0.5 else f"^{chr(97 + n % 26)}{n}": leaf(random) for n in range(count)
    }
    made: dict[str, Any] = {"type": "object", "patternProperties": patterns}
    if random.random() < 0.5:
        made["properties"] = {f"a{n}": leaf(random) for n in range(some_count(random, 100))}
    if random.random() < 0.5:
        made["additionalProperties"] = random.choice((False, True, leaf(random)))
    return made


def combined(random: Random) -> Any:
    """Patterns of which several have to hold for one text."""
    count = some_count(random, 14)
    patterns = [{"type": "string", "pattern": regex(random)} for _ in range(count)]
    kind = random.randrange(4)
    if kind == 0:
        return {"allOf": patterns}
    if kind == 1:
        return {"properties": {"a": {"allOf": patterns}}, "patternProperties": {regex(random): patterns[0]}}
    if kind == 2:
        made: dict[str, Any] = patterns[0]
        for one in patterns[1:]:
            made = {**one, random.choice(("anyOf", "oneOf")): [made, leaf(random)]}
        return made
    return {**patterns[0], "allOf": [{"anyOf": patterns[:3]}, {"anyOf": patterns[3:] or patterns}],
            "minLength": some_count(random, 1000), "format": random.choice(FORMATS)}  # fmt: skip


def numeric(random: Random) -> Any:
    """Giant, tiny and contradictory numbers in all places that take one."""
    keywords = random.sample((
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    ), 4)  # fmt: skip
    made: dict[str, Any] = {name: random.choice(NUMBERS) for name in keywords}
    if random.random() < 0.5:
        made["type"] = random.choice((*SCALARS, "object", "array"))
    if random.random() < 0.5:
        made["items"] = leaf(random)
    if random.random() < 0.3:
        made = {"allOf": [made, numeric(random)]}
    return made


def enumerated(random: Random) -> Any:
    """Thousands of values, alike or long or nested."""
    count = some_count(random, 6000)
    kind = random.randrange(4)
    if kind == 0:
        values: list[Any] = [f"{'common prefix ' * random.randint(0, 3)}{n}" for n in range(count)]
    elif kind == 1:
        values = ["x" * n for n in range(min(count, 600))]
    elif kind == 2:
        values = [random.random() * 10 ** random.randint(-20, 20) for _ in range(count)]
    else:
        values = [value(random, 3) for _ in range(min(count, 500))]
    made = {"enum": values}
    if random.random() < 0.4:
        return {"allOf": [made, random.choice((leaf(random), {"not": leaf(random)}, {"enum": values[::-2]}))]}
    return {"not": made} if random.random() < 0.1 else made


def denied(random: Random) -> Any:
    """Keywords that are rewritten for llguidance: not, if, oneOf, dependencies, in and beside each other."""
    return rewritten(random, random.randint(1, 6))


def rewritten(random: Random, depth: int) -> Any:
    if depth == 0:
        return leaf(random)
    inner = [rewritten(random, depth - 1) for _ in range(random.randint(1, 3))]
    kind = random.randrange(8)
    if kind == 0:
        return {"not": inner[0]}
    if kind == 1:
        return {"if": inner[0], "then": inner[-1], "else": leaf(random)}
    if kind == 2:
        return {random.choice(COMBINERS): inner}
    if kind == 3:
        return {"dependentSchemas": {f"k{n}": one for n, one in enumerate(inner)}}
    if kind == 4:
        return {"dependencies": {f"k{n}": [f"k{n + 1}"] for n in range(some_count(random, 40))}}
    if kind == 5:
        return {"properties": {f"k{n}": one for n, one in enumerate(inner)}, "required": ["k0"],
                "minProperties": random.randint(0, 4)}  # fmt: skip
    if kind == 6:
        return {"allOf": [{"oneOf": inner}, {"not": inner[0]}, *inner]}
    return {"properties": {f"k{n}": {"not": {"const": n}} for n in range(some_count(random, 100))},
            "oneOf": [{"required": [f"k{n}"]} for n in range(some_count(random, 30))]}  # fmt: skip


def guided(random: Random) -> Any:
    """Settings of llguidance's own in a schema."""
    made = random.choice(SCHEMAS[:-1])(random)
    rules = {"whitespace_pattern": regex(random), "whitespace_flexible": random.random() < 0.5, "lenient": True,
             "coerce_one_of": True, "item_separator": regex(random),
             "key_separator": "(" * some_count(random, 50)}  # fmt: skip
    rules = {name: rules[name] for name in random.sample(sorted(rules), 3)}
    return {**made, "x-guidance": rules} if isinstance(made, dict) else {"items": {"x-guidance": rules}}


SCHEMAS: tuple[Callable[[Random], Any], ...] = (
    deep, wide, doubling, crossed, cyclic, chained, crowded, combined, numeric, enumerated, denied, guided,
)  # fmt: skip


class Mutations:
    """Schemas of a file, with parts exchanged, repeated, deleted and made larger."""

    def __init__(self, file: Path) -> None:
        self._schemas = [json.loads(line)["schema"] for line in file.read_text().splitlines()]

    def of(self, random: Random) -> Any:
        """One of them, mutated."""
        made = json.loads(json.dumps(random.choice(self._schemas)))
        for _ in range(random.randint(1, 6)):
            self._mutate(random, made)
        return made

    def _mutate(self, random: Random, schema: Any) -> None:
        places = [one for one in _containers(schema) if one]
        if not places:
            return
        place = random.choice(places)
        key: Any = random.choice(sorted(place)) if isinstance(place, dict) else random.randrange(len(place))
        kind = random.randrange(6)
        if kind == 0:
            place[key] = leaf(random)
        elif kind == 1:
            other = random.choice([one for one in _containers(random.choice(self._schemas)) if one] or [{}])
            place[key] = json.loads(json.dumps(other))
        elif kind == 2 and isinstance(place, dict):
            keyword = random.choice(("not", "allOf", "anyOf", "oneOf", "if", "dependencies", "contains", "uniqueItems"))
            place[keyword] = [place[key]] if keyword.endswith("Of") else place[key]
        elif kind == 3 and isinstance(place, list):
            place.extend(json.loads(json.dumps(place[:20])) * random.randint(1, 5))
        elif kind == 4:
            place[key] = random.choice(NUMBERS)
        elif isinstance(place, dict):
            place.pop(key)


def _containers(schema: Any) -> list[Any]:
    found, left = [], [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            found.append(one)
            left.extend(one.values() if isinstance(one, dict) else one)
    return found
