"""Settings of a revision: those of a cluster's settings that it may change, and the resulting configuration."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

from tandem.core import config_loader
from tandem.core.bounds import out_of_bounds
from tandem.core.config import ClusterConfig
from tandem.core.errors import ConfigError

_SECTIONS = ("worker", "prefill", "decode", "mixed")
_POOLS = ("tp", "hardware")
"""Settings of a pool that its workers cannot override."""


def configured(config: ClusterConfig, settings: Mapping[str, str]) -> ClusterConfig:
    """`config` with those settings over it; ConfigError for one that does not exist, may not differ or is no value."""
    for place in settings:
        if place not in _places():
            raise ConfigError(f"{place[:80]!r} is not a worker setting that a revision may change", todo=_hint(place))
    changed = config_loader.overlaid(config, settings, source="the settings of the revision")
    for place, value, bound in out_of_bounds(changed):
        if place in settings:
            raise ConfigError(f"{place} is {value}", todo=f"use {bound}")
    return changed


@cache
def _places() -> tuple[str, ...]:
    """Paths of these settings, such as "worker.chunk_tokens"."""
    every = ClusterConfig()
    found = [place for section in _SECTIONS for place in _fields(getattr(every, section), section)]
    return tuple(place for place in found if place.rpartition(".")[2] not in _POOLS)


def _fields(record: Any, place: str) -> list[str]:
    found: list[str] = []
    for field in dataclasses.fields(record):
        value, name = getattr(record, field.name), f"{place}.{field.name}"
        found += _fields(value, name) if dataclasses.is_dataclass(value) else [name]
    return found


def _hint(place: str) -> str:
    if place.rpartition(".")[2] in _POOLS and place.partition(".")[0] in _SECTIONS:
        return "TP and hardware belong to the pool: start another cluster for it"
    near = difflib.get_close_matches(place, _places(), n=1)
    return f"did you mean {near[0]}?" if near else "use one of [worker], [prefill], [decode] or [mixed]"
