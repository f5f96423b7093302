"""`[f(a='x', b=1), g()]` of Llama 3.2 and 4 and of Gemma 3: calls as Python writes them, each argument a literal."""

from __future__ import annotations

import ast
import json
import re

from tandem.router.output_formats.part_collector import PartCollector
from tandem.router.output_formats.reader import Emit, Reader, Step
from tandem.router.output_formats.tool_format import CallShape, Schemas, ToolFormat

BEGIN, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.-]*")
_PLAIN = re.compile(r"""[^'"()\[\]{},\udc80-\udcff]*""")
_QUOTED = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_ESCAPES = {ord("\n"): "\\n", ord("\r"): "\\r", 0: "\\x00"}
"""Python has these in no string; models write them."""
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
"""Values as Python names them, in JSON: templates of other formats write them so, too."""
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def _read(reader: Reader, output: PartCollector, schemas: Schemas) -> Step[bool]:
    is_wrapped = yield from reader.skip(BEGIN)
    if not (yield from reader.skip("[")):
        return False
    while True:
        yield from reader.blanks()
        name = yield from reader.run(_NAME)
        if name not in schemas or not (yield from reader.skip("(")):
            return False
        output.start(name)
        if not (yield from _arguments(reader, output)):
            return False
        if not (yield from reader.skip(",")):
            break
    yield from reader.skip("]")
    if is_wrapped:
        yield from reader.skip(END)
    return True


def _arguments(reader: Reader, output: PartCollector) -> Step[bool]:
    """Read up to the closing parenthesis; False = it is not there. What is no literal is passed on as it is."""
    before = "{"
    while not (yield from reader.skip(")")):
        yield from reader.blanks()
        key = yield from reader.run(_NAME)
        if not key or not (yield from reader.skip("=")):
            return False
        parts: list[str] = []
        is_whole = yield from _literal(reader, parts.append)
        value = literal_as_json("".join(parts)) if is_whole else None
        output.arguments(f"{before}{json.dumps(key)}: {''.join(parts) if value is None else value}")
        before = ", "
        if value is None or not ((yield from reader.skip(",")) or (yield from reader.begins(")"))):
            return False
    output.arguments("{}" if before == "{" else "}")
    return True


def _literal(reader: Reader, emit: Emit) -> Step[bool]:
    """Give `emit` the text of a literal; False if it has no end."""
    closing: list[str] = []
    while True:
        emit((yield from reader.run(_PLAIN)))
        if not (yield from reader.fill(1)):
            return False
        char = reader.head
        if char in _QUOTED:
            if not (yield from _quoted(reader, char, emit)):
                return False
        elif char in _CLOSING:
            closing.append(_CLOSING[char])
            emit(reader.take(1))
        elif not closing:
            return char in ",)"
        elif char == closing[-1]:
            closing.pop()
            emit(reader.take(1))
        elif char == ",":
            emit(reader.take(1))
        else:
            return False


def _quoted(reader: Reader, quote: str, emit: Emit) -> Step[bool]:
    emit(reader.take(1))
    while True:
        text = yield from reader.run(_QUOTED[quote])
        emit(text.translate(_ESCAPES))
        if not (yield from reader.fill(1)):
            return False
        if reader.head == quote:
            emit(reader.take(1))
            return True
        is_whole = yield from reader.fill(2)
        emit(reader.take(2 if is_whole else 1))


def literal_as_json(text: str) -> str | None:
    """The literal as JSON; None = it is none. Models write JSON, too."""
    text = text.strip()
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        pass
    else:
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
        return written
    except (TypeError, ValueError, RecursionError):
        return None


PYTHONIC = ToolFormat(
    name="pythonic",
    read=_read,
    shape=CallShape(before="[", call="$name($arguments)", between=", ", after="]", style="python"),
    tags=(BEGIN, END),
    triggers=(BEGIN,),
    openings=("[",),
    signs=(("[func_name1(",), ("<|header_start|>", "func_name1(")),
)
