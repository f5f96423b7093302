"""Structured logs: one line a record, `key=value` pairs or JSON. Never prompts, tokens or headers.

Beside pairs a traceback follows its record, every line of it indented.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, TextIO

TEXT, JSON = FORMATS = ("text", "json")
_OWN: Final = ("time", "level", "component", "event", "traceback")
"""Keys of a JSON line that are not fields of an event."""


def setup(component: str, *, level: str = "INFO", as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send the root logger's records to `stream` (stderr by default), each marked with `component`."""
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(_Formatter(component, as_json))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def event(logger: logging.Logger, name: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event by `name` with machine-readable fields."""
    logger.log(level, name, extra={"fields": fields})


def event_with_stacks(logger: logging.Logger, name: str, level: int, stacks: str, **fields: Any) -> None:
    """Log an event with `stacks` in place of a traceback: of threads in which nothing was raised."""
    logger.log(level, name, extra={"fields": fields, "stacks": stacks})


class _Handler(logging.StreamHandler[TextIO]):
    """Drops records that a full disk or a closed terminal does not take, without an error on stderr each time."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - as logging calls it
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self, component: str, as_json: bool) -> None:
        super().__init__()
        self._component, self._as_json = component, as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        text = record.getMessage()
        stacks: str = getattr(record, "stacks", "")
        traceback = self.formatException(record.exc_info) if record.exc_info else stacks
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        if self._as_json:
            line = {"time": stamp, "level": record.levelname, "component": self._component, "event": text}
            line |= {"traceback": traceback} if traceback else {}
            return json.dumps(line | {f"{key}_" if key in _OWN else key: fields[key] for key in fields}, default=str)
        return f"{stamp} {record.levelname:<7} {self._component} {shown(text, fields, traceback)}"


def shown(text: str, fields: Mapping[str, Any], traceback: str = "") -> str:
    """An event with its fields in pairs behind it, and the traceback below it, indented."""
    pairs = "".join(f" {key}={_shown(value)}" for key, value in fields.items())
    below = "".join(f"\n    {line}" for line in traceback.splitlines())
    return f"{_one_line(text)}{pairs}{below}"


def read(line: str) -> tuple[str, str, str] | None:
    """Time, level and content of a line of JSON, as the other format would show it; None if it is no such line."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
        time_, level, text = (str(found[key]) for key in ("time", "level", "event"))
    except (ValueError, KeyError):
        return None
    fields = {key: value for key, value in found.items() if key not in _OWN}
    return time_, level, shown(text, fields, str(found.get("traceback", "")))


def _shown(value: object) -> str:
    """A value as it is, if nothing in it could pass for another pair or record; else quoted, as in JSON."""
    text = str(value)
    has_pair = " " in text and "=" in text
    return json.dumps(text) if has_pair or text.startswith('"') else _one_line(text)


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)
