"""Dataclasses to protobuf messages and back, by the names of their fields. Knows no message itself.

Records inside records are converted likewise. A field of another name or shape is the caller's, in `others`. On the way
of every token, conversions are written by hand: they are faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_proto(kind: type[T], record: object, **others: Any) -> T:
    """Build a message of `kind` from `others`, and from the fields of `record` that it has too; None leaves one unset.

    Raises TypeError or ValueError for a value that a field cannot hold.
    """
    message_kind: Any = kind
    return kind(**_values(message_kind.DESCRIPTOR, record, others), **others)


def from_proto(kind: type[T], message: Any, **others: Any) -> T:
    """Build a record of `kind` from `others`, and from the fields of `message` that it has too.

    Repeated fields become tuples, absent optional ones None. Raises ValueError for an unknown value of a StrEnum.
    """
    record_kind: Any = kind
    readers = _readers(record_kind, message.DESCRIPTOR)
    values = {name: read(message) for name, read in readers if name not in others}
    return kind(**values, **others)


def _values(descriptor: Any, record: object, others: dict[str, Any]) -> dict[str, Any]:
    kind: Any = type(record)
    return {
        name: getattr(record, name) if nested is None else _nested(nested, getattr(record, name))
        for name, nested in _shared(descriptor, kind)
        if name not in others
    }


def _nested(descriptor: Any, value: Any) -> Any:
    """Values of a message inside a message as dictionaries, which a message's constructor takes."""
    if isinstance(value, tuple | list):
        return [_nested(descriptor, item) for item in value]
    return _values(descriptor, value, {}) if is_dataclass(value) else value


@cache
def _shared(descriptor: Any, record: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Names of the fields that both have, and the message that such a field holds; None = it holds a scalar."""
    known = descriptor.fields_by_name
    return tuple((field.name, known[field.name].message_type) for field in fields(record) if field.name in known)


@cache
def _readers(kind: type[Any], descriptor: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    hints, known = get_type_hints(kind), descriptor.fields_by_name
    shared = [field.name for field in fields(kind) if field.name in known]
    return tuple((name, _reader(known[name], hints[name])) for name in shared)


def _reader(field: Any, hint: Any) -> Callable[[Any], Any]:
    """Read `field` of a message as a value of the type `hint`."""
    get, name, item_kind = attrgetter(field.name), field.name, next(iter(get_args(hint)), hint)
    if field.is_repeated:
        if field.message_type is None:
            return lambda message: tuple(get(message))
        if get_origin(hint) is dict:
            return lambda message: dict(get(message))
        return lambda message: tuple(from_proto(item_kind, item) for item in get(message))
    if field.message_type is not None:
        return lambda message: from_proto(hint, get(message))
    if field.has_presence:
        return lambda message: get(message) if message.HasField(name) else None
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda message: hint(get(message))
    return get
