"""Structured logs: one line a record, `key=value` pairs or JSON. Never prompts, tokens or headers."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO


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


class _Handler(logging.StreamHandler[TextIO]):
    """Loses what a full disk or a closed terminal does not take, instead of telling so on stderr each time."""

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
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        if self._as_json:
            line = {"time": stamp, "level": record.levelname, "component": self._component, "event": text, **fields}
            return json.dumps(line, default=str)
        pairs = "".join(f" {key}={value}" for key, value in fields.items())
        return f"{stamp} {record.levelname:<7} {self._component} {text}{pairs}"
