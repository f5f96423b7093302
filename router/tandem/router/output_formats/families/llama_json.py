"""`{"name": …, "parameters": {…}}` of Llama 3, with or without `<|python_tag|>` in front, several separated by `;`.

An answer that begins with `{` may be JSON that was asked for: only the names of the request's tools make it a call.
"""

from __future__ import annotations

from tandem.router.output_formats.families.json_calls import read_call
from tandem.router.output_formats.part_collector import PartCollector
from tandem.router.output_formats.reader import Reader, Step
from tandem.router.output_formats.tool_format import Schemas, ToolFormat

TAG = "<|python_tag|>"


def _read(reader: Reader, output: PartCollector, schemas: Schemas) -> Step[bool]:
    yield from reader.skip(TAG)
    while True:
        if not (yield from read_call(reader, output, schemas)):
            return False
        if not (yield from reader.skip(";")):
            return True


LLAMA_JSON = ToolFormat(
    name="llama3_json",
    read=_read,
    tags=(TAG,),
    triggers=(TAG,),
    openings=("{",),
    signs=(("<|start_header_id|>", '"parameters": '), ("<|start_header_id|>", TAG)),
)
