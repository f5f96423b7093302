"""Typed access to a parsed `config.json`. Every error names the file and the field. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.core.errors import ModelError


class Fields:
    """The fields of one JSON object. A null counts as absent: both take the default."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def error(self, what: str, why: str = "", todo: str = "") -> ModelError:
        return ModelError(f"{self.path}: {what}", why=why, todo=todo)

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def number(self, name: str, *, default: float | None = None) -> float:
        """A number above 0; raises ModelError for anything else, and where there is neither a value nor a default."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing", todo="use a complete Hugging Face config.json")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(f"{name} is {value!r}", why="it must be a number above 0")
        return float(value)

    def optional(self, name: str) -> float | None:
        """A number above 0, or None where it is absent."""
        return None if self.values.get(name) is None else self.number(name)

    def positive(self, name: str, *, default: int | None = None) -> int:
        value = self.number(name, default=default)
        if value != int(value):
            raise self.error(f"{name} is {value!r}", why="it must be a whole number")
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}", why="it must be true or false")
        return value


def read_fields(path: Path) -> Fields:
    """The fields of the JSON object in the file at `path`. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist", why="every model has one", todo="give a folder in Hugging Face format"
        ) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}", why=str(error)) from error
    except (ValueError, RecursionError) as error:  # the latter: nested too deep
        raise ModelError(f"{path} is not JSON", why=str(error), todo="download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object", todo="download the model again")
    return Fields(value, path)
