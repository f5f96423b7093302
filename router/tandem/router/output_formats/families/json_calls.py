"""Calls as JSON objects with a name and arguments, the part that many formats share."""

from __future__ import annotations

from collections.abc import Container

from tandem.router.output_formats.part_collector import PartCollector
from tandem.router.output_formats.reader import Reader, Step

_ARGUMENTS = ("arguments", "parameters")


def read_call(reader: Reader, output: PartCollector, known: Container[str] | None = None) -> Step[bool]:
    """Read `{"name": …, "arguments": {…}}`, in any order; False = it breaks off. With `known` no other name counts.

    A call begins with its arguments, as they are written; those in front of the name wait for it.
    """
    if not (yield from reader.skip("{")):
        return False
    name, early, has_begun = None, "", False
    while not (yield from reader.skip("}")):
        key = yield from reader.string()
        if key is None or not (yield from reader.skip(":")):
            return False
        if key == "name":
            name = yield from reader.string()
            if name is None or (known is not None and name not in known):
                return False
        elif key in _ARGUMENTS and (yield from reader.begins("{")):
            if name is None:
                parts: list[str] = []
                if not (yield from reader.json_value(parts.append)):
                    return False
                early = "".join(parts)
            else:
                output.start(name)
                has_begun = True
                if not (yield from reader.json_value(output.arguments)):
                    return False
        elif not (yield from reader.json_value(len)):
            return False
        if not (yield from reader.skip(",")) and not (yield from reader.begins("}")):
            return False
    if name is not None and not has_begun:
        output.start(name)
        output.arguments(early or "{}")
    return name is not None


def read_list(reader: Reader, output: PartCollector, known: Container[str] | None = None) -> Step[bool]:
    """Read a JSON list of calls, or one of them without brackets; False = the last one is no call."""
    is_list = yield from reader.skip("[")
    while True:
        if not (yield from read_call(reader, output, known)):
            return False
        if not is_list or not (yield from reader.skip(",")):
            break
    if is_list:
        yield from reader.skip("]")
    return True
