"""Reads configuration files strictly and hands configurations to processes.

An unknown key is an error that names it, where it is, and the nearest known one; a wrong type names its field.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tandem.core.errors import ConfigError

T = TypeVar("T")

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_PROBLEM = re.compile(r"(?P<what>.*?)(?: - at `\$?(?P<where>[^`]*)`)?", re.DOTALL)


def load(path: Path, kind: type[T]) -> T:
    """Read the TOML or JSON file at `path` (chosen by its suffix) as the dataclass `kind`; raises ConfigError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"cannot read the configuration {path}", why=why, todo="Check the path") from error
    return from_mapping(_parse(data, path), kind, source=str(path))


def from_mapping(data: Mapping[str, Any], kind: type[T], *, source: str, is_text: bool = False) -> T:
    """Turn parsed `data` into `kind`; `source` names where it came from in errors. `is_text`: numbers and truth values
    may be spelled as texts, as on a command line."""
    for where, name, known in _unknown_keys(data, kind, ()):
        raise _unknown_key(where, name, known, source)
    try:
        return msgspec.convert(data, kind, strict=not is_text)
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), source) from error


def overlaid(config: T, settings: Mapping[str, str], *, source: str) -> T:
    """`config` with the settings at these places, such as {"worker.chunk_tokens": "256"}; raises ConfigError."""
    data = msgspec.to_builtins(config)
    for place, text in settings.items():
        *sections, name = place.split(".")
        section = data
        for part in sections:
            section = section.setdefault(part, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section[name] = _spelled(name, text, section.get(name))
    return from_mapping(data, type(config), source=source, is_text=True)


def _spelled(name: str, text: str, now: Any) -> Any:
    """In the form that a file has: lists by commas, bytes with a unit."""
    if isinstance(now, list | tuple):
        return [part.strip() for part in text.split(",") if part.strip()]
    return parse_size(text, field=name) if name.endswith("_bytes") else text


def dump(value: Any) -> bytes:
    """A configuration as JSON that `load` reads back; launchers hand it to a process in this form.

    Raises ConfigError for a text that is no UTF-8, such as a path with other bytes.
    """
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    except UnicodeEncodeError as error:
        why = f"{error.object!a} is no UTF-8 text"
        raise ConfigError("cannot hand over the configuration", why=why, todo="Rename what has that name") from error


def parse_size(text: str, *, field: str) -> int:
    """Bytes of a size such as `256MiB`, `1.5 GiB`, `2G` or `1048576`; ConfigError names `field` if it is none."""
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{field} is {text!r}", why="that is not a size", todo="Write a number with a unit, such as 256MiB or 2GiB"
        )
    size = float(match[1]) * factor
    if size < 1 or size >= 2**63:
        raise ConfigError(f"{field} is {text!r}", why="it must be at least one byte and below 8 EiB")
    return int(match[1]) * factor if "." not in match[1] else int(size)


def _parse(data: bytes, path: Path) -> Mapping[str, Any]:
    try:
        parsed = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        form = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path} is not valid {form}", why=str(error), todo="Correct that line") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} is not a configuration", why="it must be an object with named fields")
    return parsed


def _unknown_keys(
    data: Any, kind: Any, where: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    """(path to the section, unknown key, known keys) of every key that `kind` and the records inside it lack."""
    if dataclasses.is_dataclass(kind) and isinstance(data, Mapping):
        hints = typing.get_type_hints(kind)
        known = tuple(field.name for field in dataclasses.fields(kind))
        for name, value in data.items():
            if name in known:
                yield from _unknown_keys(value, hints[name], (*where, name))
            else:
                yield where, name, known
        return
    if typing.get_origin(kind) is dict and isinstance(data, Mapping):
        for name, value in data.items():
            yield from _unknown_keys(value, typing.get_args(kind)[1], (*where, name))
        return
    for argument in typing.get_args(kind):
        if isinstance(data, Mapping):
            yield from _unknown_keys(data, argument, where) if dataclasses.is_dataclass(argument) else ()
        elif isinstance(data, list):
            for index, item in enumerate(data):
                yield from _unknown_keys(item, argument, (*where, str(index)))


def _unknown_key(where: tuple[str, ...], name: str, known: tuple[str, ...], source: str) -> ConfigError:
    section = f" in [{'.'.join(where)}]" if where else ""
    nearest = _nearest(name, known)
    todo = f"The nearest known key is {nearest!r}" if nearest else f"Known keys here: {', '.join(known)}"
    return ConfigError(f"unknown key {name!r}{section} of {source}", todo=todo)


def _nearest(name: str, known: tuple[str, ...]) -> str | None:
    """The known key that `name` most likely means: by spelling, or as the beginning or a part of one."""
    plain = name.lower().replace("-", "_")
    close = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    return next((key for key in known if plain and (plain in key or key in plain)), None)


def _wrong_value(problem: str, source: str) -> ConfigError:
    match = _PROBLEM.fullmatch(problem)
    what, where = (match["what"], (match["where"] or "").lstrip(".")) if match else (problem, "")
    field = f"{where} in {source}" if where else source
    return ConfigError(f"wrong value for {field}", why=what.replace("`", ""), todo="Correct the file")
