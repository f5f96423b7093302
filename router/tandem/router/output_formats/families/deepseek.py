"""Calls of DeepSeek: in V3 and R1 a type, a name and a fenced JSON object, in V3.1 a name and the object alone."""

from __future__ import annotations

from tandem.router.output_formats.part_collector import PartCollector
from tandem.router.output_formats.reader import Reader, Step
from tandem.router.output_formats.tool_format import Schemas, ToolFormat

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE, END_FENCE = "```json", "```"


def _read(reader: Reader, output: PartCollector, schemas: Schemas) -> Step[bool]:
    yield from reader.skip(CALLS)
    has_begun = False
    while (yield from reader.skip(CALL)):
        if not (yield from _call(reader, output)):
            return False
        has_begun = True
    if has_begun:
        yield from reader.skip(END_CALLS)
    return has_begun


def _call(reader: Reader, output: PartCollector) -> Step[bool]:
    parts: list[str] = []
    if (yield from reader.until((SEPARATOR, "{", END_CALL), parts.append)) != SEPARATOR:
        return False
    yield from reader.skip(SEPARATOR)
    if not (yield from reader.begins("{")):  # what came was the type
        parts.clear()
        if (yield from reader.until((FENCE, "{", END_CALL), parts.append)) == FENCE:
            yield from reader.skip(FENCE)
        if not (yield from reader.begins("{")):
            return False
    output.start("".join(parts).strip())
    if not (yield from reader.json_value(output.arguments)):
        return False
    yield from reader.skip(END_FENCE)
    yield from reader.skip(END_CALL)
    return True


_TAGS = (CALLS, END_CALLS, CALL, END_CALL, SEPARATOR)
DEEPSEEK_V3 = ToolFormat(name="deepseek_v3", read=_read, tags=_TAGS, triggers=(CALLS, CALL), signs=((CALLS, FENCE),))
DEEPSEEK_V31 = ToolFormat(name="deepseek_v31", read=_read, tags=_TAGS, triggers=(CALLS, CALL), signs=((CALLS,),))
