"""Every setting of a cluster: its default, bounds and flag from the code, its meaning from docs/configuration.md."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from tandem.controlplane.up_flag_map import FLAGS
from tandem.core.bounds import bound_of
from tandem.core.config import ClusterConfig
from tandem.core.urls import redacted

_ROLES = ("prefill", "decode", "mixed")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key of `cluster.toml`. `key` is such as "router.port" or "slo.<class>.ttft_s"; `flag` of `up`, "" = none."""

    key: str
    type: str
    default: Any
    bound: str
    flag: str
    text: str

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]


@cache
def every_setting() -> Mapping[str, Setting]:
    """Return all settings by key, in the order of the configuration."""
    flags = {place: flag for flag, place in FLAGS.items()}
    texts = _texts()
    found: dict[str, Setting] = {}
    for key, kind, default in _fields(ClusterConfig, ""):
        section, _, name = key.rpartition(".")
        bound = bound_of(kind)
        found[key] = Setting(
            key=key,
            type=_type_text(kind),
            default=plain(default),
            bound=str(bound) if bound else "",
            flag=flags.get(key, ""),
            text=texts.get((section, name), ""),
        )
    return found


def values(config: ClusterConfig) -> dict[str, Any]:
    """Return every setting's value in `config` as plain values, by key; classes, tenants and further models by their
    own name. URLs are without user, password and options."""
    return dict(_values(config, ""))


def changed(found: Mapping[str, Any]) -> list[str]:
    """Return the keys of `values` that differ from the defaults, in classes, tenants and further models from None."""
    known = every_setting()
    return [key for key, value in found.items() if value != (known[key].default if key in known else None)]


def plain(value: Any) -> Any:
    """Convert to a plain JSON value."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    if isinstance(value, str) and "://" in value:
        return redacted(value)
    return value


def _values(record: Any, place: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(record):
        value, key = getattr(record, field.name), f"{place}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _values(value, f"{key}.")
        elif isinstance(value, Mapping):
            for name, one in value.items():
                yield from _values(one, f"{key}.{name}.")
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for number, one in enumerate(value):
                yield from _values(one, f"{key}[{number}].")
        elif field.name != "models":  # those there are were given one by one
            yield key, plain(value)


def _fields(kind: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, type with its bounds, default) of every field, nested ones included."""
    types = typing.get_type_hints(kind, include_extras=True)
    empty = kind()
    for field in dataclasses.fields(kind):
        inner, key = types[field.name], f"{place}{field.name}"
        default = getattr(empty, field.name)
        arguments = typing.get_args(inner)
        if dataclasses.is_dataclass(default):
            yield from _fields(type(default), f"{key}.")
        elif typing.get_origin(inner) is dict:
            placeholder = {"slo": "<class>", "budget": "<tenant>"}[field.name]
            yield from _fields(arguments[1], f"{key}.{placeholder}.")
        elif typing.get_origin(inner) is tuple and dataclasses.is_dataclass(arguments[0]):
            yield from _fields(arguments[0], f"{key}[].")
        else:
            yield key, inner, default


def _type_text(kind: Any) -> str:
    """Return the name of a type, such as "integer" or "list of text"."""
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return _type_text(next(one for one in typing.get_args(kind) if one is not NoneType))
    if typing.get_origin(kind) is tuple:
        return f"list of {_type_text(typing.get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    return {"int": "integer", "float": "number", "str": "text", "bool": "true or false"}[kind.__name__]


# ---- their meaning -------------------------------------------------------------------------------------------------


def _texts() -> dict[tuple[str, str], str]:
    """Return (section, name) → the page's text on it."""
    found: dict[tuple[str, str], str] = {}
    sections: list[str] = []
    for line in _page().splitlines():
        if line.startswith("## "):
            sections = _sections_of(line.removeprefix("## "))
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" |")]
            for section in sections:
                found[section, cells[0].strip("` |")] = _LINK.sub(r"\1", cells[-1]).strip("| ")
    for role in _ROLES:  # their table has flags in that column
        names = [name for section, name in found if section == role]
        found |= {(role, name): f"of {role} workers: {found['worker', name]}" for name in names}
    plain_model = {("models[]", name): text for (section, name), text in found.items() if section in ("model", "pools")}
    return found | plain_model


def _sections_of(title: str) -> list[str]:
    """Return the sections of a title, such as ["prefill", "decode", "mixed"] of "`[prefill]`, `[decode]`,
    `[mixed]`"."""
    if title == "Top level":
        return [""]
    return [name.strip("[]") for name in re.findall(r"`(\[+[^`]+\]+)`", title) if name != "[[models]]"]


def _page() -> str:
    """Return docs/configuration.md of a checkout, or the copy in an installed wheel; "" where there is neither."""
    checkout = Path(__file__).resolve().parents[4] / "docs" / "configuration.md"
    places = [checkout] if (checkout.parents[1] / "pyproject.toml").is_file() else []
    namespace = importlib.util.find_spec("tandem")
    for root in (namespace.submodule_search_locations or ()) if namespace else ():
        places.append(Path(root) / "docs" / "configuration.md")
    return next((place.read_text(encoding="utf-8") for place in places if place.is_file()), "")
