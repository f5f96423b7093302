"""`[TOOL_CALLS]name[ARGS]{…}` of Mistral, and the list `[TOOL_CALLS] [{"name": …, "arguments": {…}}]` of its models
before version 11 of its tokenizer."""

from __future__ import annotations

import re
import secrets
import string

from tandem.router.output_formats.families.json_calls import read_list
from tandem.router.output_formats.part_collector import PartCollector
from tandem.router.output_formats.reader import Reader, Step
from tandem.router.output_formats.tool_format import Schemas, ToolFormat

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LETTERS = string.ascii_letters + string.digits
_NAME = re.compile(r"[\w.-]*")


def _read(reader: Reader, output: PartCollector, schemas: Schemas) -> Step[bool]:
    yield from reader.skip(CALLS)
    if (yield from reader.begins("[", "{")) and not (yield from reader.begins(ARGS, CALL_ID)):
        return (yield from read_list(reader, output))
    yield from reader.blanks()
    name = yield from reader.run(_NAME)
    given = ""
    if (yield from reader.skip(CALL_ID)):
        given = yield from reader.run(_NAME)
    yield from reader.skip(ARGS)
    if not name or not (yield from reader.begins("{")):
        return False
    output.start(name, given)
    return (yield from reader.json_value(output.arguments))


def _new_id() -> str:
    """Templates of Mistral accept ids of nine letters and digits alone."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


MISTRAL = ToolFormat(
    name="mistral",
    read=_read,
    tags=(CALLS, ARGS, CALL_ID),
    triggers=(CALLS,),
    signs=((CALLS, ARGS),),
    new_id=_new_id,
)
MISTRAL_LIST = ToolFormat(
    name="mistral_list", read=_read, tags=(CALLS,), triggers=(CALLS,), signs=((CALLS,),), new_id=_new_id
)
