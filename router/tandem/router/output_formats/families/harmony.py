"""Harmony of gpt-oss: messages with a header each, whose channel tells reasoning (analysis) from content, and whose
recipient makes it a call."""

from __future__ import annotations

import re

from tandem.router.output_formats.part_collector import PartCollector
from tandem.router.output_formats.reader import Reader, Step
from tandem.router.output_formats.tool_format import Schemas, ToolFormat

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = " to=functions."
_ANALYSIS = re.compile(r"(?<![\w.])analysis\b")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")


def read_messages(reader: Reader, output: PartCollector, schemas: Schemas | None) -> Step[None]:
    """Read a whole answer; `schemas` None = calls are content. Text outside of messages is content."""
    is_header = bool((yield from reader.begins("to=")))
    while is_header or (yield from reader.until((START, CHANNEL, MESSAGE), output.content)):
        is_header = False
        reader.kept = ""
        header: list[str] = []
        if not (yield from reader.until((MESSAGE,), header.append)):
            output.content(reader.kept)
            return
        yield from reader.skip(MESSAGE)
        yield from _body(reader, output, "".join(header), is_callable=schemas is not None)
        yield from reader.skip(*ENDS)


def _body(reader: Reader, output: PartCollector, header: str, *, is_callable: bool) -> Step[None]:
    ends = (*ENDS, START, CHANNEL)
    recipient = _RECIPIENT.search(header)
    if recipient is not None and is_callable:
        output.start(recipient[1])
        yield from reader.until(ends, output.arguments)
        output.end_arguments()
    elif _ANALYSIS.search(header):
        output.begin_reasoning()
        yield from reader.until(ends, output.reasoning)
        output.end_reasoning()
    else:
        yield from reader.until(ends, output.content)


def _read(reader: Reader, output: PartCollector, schemas: Schemas) -> Step[bool]:
    yield from read_messages(reader, output, schemas)
    return True


HARMONY = ToolFormat(
    name="harmony",
    read=_read,
    tags=(START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS),
    signs=((CHANNEL, MESSAGE),),
)
