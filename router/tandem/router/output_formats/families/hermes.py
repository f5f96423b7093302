"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>` of Hermes, Qwen 2.5 and 3, and SmolLM3; SmolLM2 writes a list
of calls between the tags."""

from __future__ import annotations

from tandem.router.output_formats.families.json_calls import read_list
from tandem.router.output_formats.part_collector import PartCollector
from tandem.router.output_formats.reader import Reader, Step
from tandem.router.output_formats.tool_format import CallShape, Schemas, ToolFormat

BEGIN, END = "<tool_call>", "</tool_call>"


def _read(reader: Reader, output: PartCollector, schemas: Schemas) -> Step[bool]:
    yield from reader.skip(BEGIN)
    is_call = yield from read_list(reader, output)
    if is_call:
        yield from reader.skip(END)
    return is_call


HERMES = ToolFormat(
    name="hermes",
    read=_read,
    shape=CallShape(call=f'{BEGIN}\n{{"name": "$name", "arguments": $arguments}}\n{END}', between="\n"),
    tags=(BEGIN, END),
    triggers=(BEGIN,),
    signs=((BEGIN,),),
)
SMOLLM2 = ToolFormat(
    name="smollm2",
    read=_read,
    shape=CallShape(
        before=f"{BEGIN}[", call='{"name": "$name", "arguments": $arguments}', between=", ", after=f"]{END}"
    ),
    tags=(BEGIN, END),
    triggers=(BEGIN,),
    signs=((f"{BEGIN}[",),),
    toolless_sign="named SmolLM, trained by Hugging Face",
)
