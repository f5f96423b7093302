"""Hostile grammars of other kinds: Lark, GBNF, choices, structural tags and broken documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from proof.grammars.regex_recipes import regex
from proof.grammars.schema_recipes import SCHEMAS, some_count

Body = dict[str, Any]


def lark(random: Random) -> Body:
    """A Lark grammar."""
    return {"grammar": random.choice(_LARKS)(random)}


def _lark_rules(random: Random) -> str:
    count = some_count(random, 3000)
    lines = ["start: r0"]
    for n in range(count):
        names = [f"r{random.randrange(count)}" for _ in range(random.randint(0, 3))]
        ends = random.choice(
            ('"a"', '"bc"', "T0", "", '"x"?', '("y" | "z")*', "r0?", "r0*", f'"q"{{{n % 40},{n % 40 + 3}}}')
        )
        other = ends or '"e"'
        lines.append(f"r{n}: {' '.join(names)} {ends} | {other}")
    return "\n".join([*lines, "T0: /[0-9]+/"])


def _lark_doubling(random: Random) -> str:
    count = some_count(random, 300)
    call = random.choice(("r{0} r{0}", "r{0} | r{0} r{0}", "(r{0} r{0})*", "r{0}? r{0}?", "r{0}{{0,9}}", "r{0}{{100}}"))
    lines = [f"r{n}: {call.format(n + 1)}" for n in range(count)]
    last = random.choice(('"a"', '"a"?', "/a*/", "r0", '""'))
    return "\n".join(["start: r0", *lines, f"r{count}: {last}"])


def _lark_terminals(random: Random) -> str:
    count = some_count(random, 200)
    lines = []
    for n in range(count):
        inner = random.choice((f"/{_slashed(regex(random))}/", f'"w{n}"', f"T{n + 1} T{n + 1}", f"T{n + 1}+ | /x/",
                               f"(T{n + 1} & /.*{n}.*/)", f"~T{n + 1}",
                               f"(T{n + 1}){{{some_count(random, 1000)}}}"))  # fmt: skip
        lines.append(f"T{n}: {inner}")
    uses = " | ".join(f"T{random.randrange(count + 1)}" for _ in range(some_count(random, 50)))
    return "\n".join([f"start: ({uses})*", *lines, f"T{count}: /[a-z]/"])


def _slashed(pattern: str) -> str:
    return pattern.replace("/", "\\/").replace("\n", " ")


def _lark_extended(random: Random) -> str:
    schema = json.dumps(random.choice(SCHEMAS)(random))
    text = random.choice(("%json " + (schema if schema.startswith("{") else "{}"), '%regex {"substring_chars": '
                          + json.dumps("ab c" * some_count(random, 3000)) + "}", '%regex {"substring_words": '
                          + json.dumps("the word " * some_count(random, 3000)) + "}", '%lark { start: "a" }',
                          f'"a"{{{some_count(random, 10**6)}}}', f"/{_slashed(regex(random))}/"))  # fmt: skip
    attributes = random.choice(("", "[capture]", "[lazy]", "[max_tokens=3]", "[stop=\"x\"]", "[suffix=/y+/]",
                                "[temperature=0]", f"[max_tokens={10**9}]", "[stop=/(a|b)*/]"))  # fmt: skip
    ignore = f"\n%ignore /{_slashed(regex(random))}/" if random.random() < 0.3 else ""
    options = random.choice(("", "%llguidance {}\n", '%llguidance {"no_forcing": true, "allow_initial_skip": true}\n',
                             '%llguidance {"lenient": true}\n'))  # fmt: skip
    return f"{options}start: r* | r r\nr{attributes}: {text}{ignore}"


def _lark_parameters(random: Random) -> str:
    size = random.randint(1, 30)
    return ("start: lst::0\nlst::_: " + " | ".join(f'"{chr(97 + n % 26)}" lst::set_bit({n}) %if bit_clear({n})'
            for n in range(size)) + f' | "" %if is_ones([0:{size}])')  # fmt: skip


def _lark_nullable(random: Random) -> str:
    count = some_count(random, 200)
    lines = [f"r{n}: r{(n + 1) % count}? r{(n * 7) % count}* | r{n} r{n}" for n in range(count)]
    return "\n".join(["start: r0", *lines]) + '\nr0x: "a"'


def _lark_deep(random: Random) -> str:
    depth = some_count(random, 20_000)
    return "start: " + "(" * depth + '"a"' + random.choice((")", ")*", ")?")) * depth


def _lark_soup(random: Random) -> str:
    parts = ("start: ", "a", "A", '"x"', "/y/", "|", "(", ")", "*", "+", "?", "{1,5}", "\n", "b: ", "B: ", "%ignore ",
             "%json {", "}", "~", "&", "[", "]", "%import common.INT", "<[1-9]>", "<[^*]>", "<|end|>", "//",
             '"')  # fmt: skip
    return "start: " + " ".join(random.choice(parts) for _ in range(some_count(random, 400)))


_LARKS: tuple[Callable[[Random], str], ...] = (
    _lark_rules, _lark_doubling, _lark_terminals, _lark_extended, _lark_extended, _lark_parameters, _lark_nullable,
    _lark_deep, _lark_soup,
)  # fmt: skip


def gbnf(random: Random) -> Body:
    """A grammar of llama.cpp."""
    kind = random.randrange(5)
    if kind == 0:
        count = some_count(random, 400)
        text = "\n".join(
            f'r{n} ::= "a" r{random.randrange(count)} | [a-z]{{2,{n + 2}}} | r{(n + 1) % count}' for n in range(count)
        )
        return {"grammar": f"root ::= r0\n{text}"}
    if kind == 1:
        depth = some_count(random, 3000)
        return {"grammar": f'root ::= {"(" * depth}"a"{random.choice((")", ")*", ")+")) * depth}'}
    if kind == 2:
        return {
            "grammar": "root ::= "
            + " | ".join(f'"{"x" * random.randint(1, 9)}"' for _ in range(some_count(random, 2000)))
        }
    if kind == 3:
        count = some_count(random, 200)
        text = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(count))
        return {"grammar": f'root ::= r0\n{text}\nr{count} ::= "a"'}
    parts = ("root", "::=", '"a"', "[^x]", "|", "(", ")", "*", "{3}", "{,9}", "\n", "b ::= ", "#c\n", "[", "\\x41", '"')
    return {"grammar": "root ::= " + " ".join(random.choice(parts) for _ in range(some_count(random, 300)))}


def choice(random: Random) -> Body:
    """A list of choices."""
    count = some_count(random, 8192)
    kind = random.randrange(4)
    if kind == 0:
        return {"choice": [f"{n}" for n in range(count)]}
    if kind == 1:
        return {"choice": ["a" * n for n in range(1, min(count, 700))] or [""]}
    if kind == 2:
        return {"choice": ["".join(chr(random.choice((97, 233, 0x4E2D, 0x1F600, 34, 92, 10))) for _ in range(9))
                           for _ in range(min(count, 4000))]}  # fmt: skip
    return {"choice": ["x" * some_count(random, 200_000)]}


def tag(random: Random) -> Body:
    """Structural tags."""
    count = some_count(random, 128)
    begins = [f"<{'f' * random.randint(1, 4)}{n}>" for n in range(count)]
    schemas = [made if isinstance(made := random.choice(SCHEMAS)(random), dict) and count < 5 else {"type": "object"}
               for _ in begins]  # fmt: skip
    structures = [{"begin": begin, "schema": made, "end": random.choice(("", ">", "</f>", "\n" * 50))}
                  for begin, made in zip(begins, schemas, strict=True)]  # fmt: skip
    triggers = random.choice((["<"], ["<f", "<ff", "<fff"], begins, ["", "<"], ["x"]))
    return {"structural_tag": {"type": "structural_tag", "structures": structures, "triggers": triggers}}


def document(random: Random) -> Body:
    """The text of a schema, often broken: duplicate keys, deep brackets, cut off."""
    kind = random.randrange(6)
    depth = some_count(random, 100_000)
    if kind == 0:
        return {
            "json": '{"type": "object", "properties": {'
            + ", ".join('"a": {"type": "string"}' for _ in range(some_count(random, 3000)))
            + "}}"
        }
    if kind == 1:
        return {"json": "[" * depth + "]" * depth}
    if kind == 2:
        return {"json": '{"items":' * depth + "{}" + "}" * depth}
    text = json.dumps(random.choice(SCHEMAS)(random))
    if kind == 3:
        return {"json": text[: random.randrange(1, len(text) + 1)]}
    if kind == 4:
        return {"json": text.replace("e", "\\u0065").replace("1", "1" * some_count(random, 500))[: 1 << 18]}
    return {"json": text[: 1 << 18], "whitespace_pattern": regex(random)}


def pattern(random: Random) -> Body:
    """A regular expression."""
    return {"regex": regex(random)}
