"""`<start_function_call>call:f{k:<escape>v<escape>,n:1}<end_function_call>` of FunctionGemma."""

from __future__ import annotations

import json
import re

from tandem.router.output_formats.families.pythonic import PYTHON_NAMES
from tandem.router.output_formats.part_collector import PartCollector
from tandem.router.output_formats.reader import Reader, Step
from tandem.router.output_formats.tool_format import CallShape, Schemas, ToolFormat

BEGIN, END, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^:,{}\[\]\udc80-\udcff]*")
_SCALAR = re.compile(r"[^,{}\[\]\udc80-\udcff]*")
_CLOSING = {"{": "}", "[": "]"}


def _read(reader: Reader, output: PartCollector, schemas: Schemas) -> Step[bool]:
    yield from reader.skip(BEGIN)
    if not (yield from reader.skip("call:")):
        return False
    name = yield from reader.run(_NAME)
    if not name or not (yield from reader.skip("{")):
        return False
    output.start(name)
    if not (yield from _arguments(reader, output)):
        return False
    yield from reader.skip(END)
    return True


def _arguments(reader: Reader, output: PartCollector) -> Step[bool]:
    """Read up to the closing brace; False = the text breaks off before. What cannot be read is passed on as it is."""
    output.arguments("{")
    closing, is_first = ["}"], True
    while closing:
        if (yield from reader.skip(closing[-1])):
            output.arguments(closing.pop())
            is_first = False
            continue
        if not is_first and not (yield from reader.skip(",")):
            return False
        key = "" if is_first else ", "
        if closing[-1] == "}":
            name = yield from reader.run(_KEY)
            if not name or not (yield from reader.skip(":")):
                return False
            key += json.dumps(name.strip(), ensure_ascii=False) + ": "
        output.arguments(key)
        opening = yield from reader.skip(*_CLOSING)
        if opening:
            output.arguments(opening)
            closing.append(_CLOSING[opening])
        elif not (yield from _scalar(reader, output)):
            return False
        is_first = bool(opening)
    return True


def _scalar(reader: Reader, output: PartCollector) -> Step[bool]:
    """A string, or anything that is written without marks around it; False if it has no end."""
    if (yield from reader.skip(ESCAPE)):
        output.arguments('"')
        yield from reader.until((ESCAPE,), lambda text: output.arguments(json.dumps(text, ensure_ascii=False)[1:-1]))
        if not (yield from reader.skip(ESCAPE)):
            return False
        output.arguments('"')
        return True
    text = yield from reader.run(_SCALAR)
    is_whole = yield from reader.fill(1)
    output.arguments(_as_json(text.strip()) if is_whole else text)
    return is_whole


def _as_json(text: str) -> str:
    text = PYTHON_NAMES.get(text, text)
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return text


FUNCTION_GEMMA = ToolFormat(
    name="function_gemma",
    read=_read,
    shape=CallShape(call=f"{BEGIN}call:$name{{$arguments}}{END}", style="gemma"),
    tags=(BEGIN, END, ESCAPE),
    triggers=(BEGIN,),
    signs=((BEGIN,),),
)
