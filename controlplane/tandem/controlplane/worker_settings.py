"""Settings of each worker: `[worker]` with its role's overrides over it, checked, and the cores divided."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tandem.controlplane.up_flag_map import name_of
from tandem.core.config import ENGINES, ClusterConfig, LauncherName, RoleSection, WorkerSection
from tandem.core.errors import ConfigError
from tandem.core.kv_compatibility import ALWAYS_BYTES_PER_S, CODECS
from tandem.core.state_enums import RoleName
from tandem.engine.model_config import DTYPES, ModelConfig, fitting_tp, tp_refusal
from tandem.kvtransfer.transports.registry import AUTO, TRANSPORTS

_AUTOMATIC = tuple(name for name, transport in TRANSPORTS.items() if transport.is_automatic)
_CHOICES = {
    "engine": ENGINES,
    "device": ("auto", "cpu", "cuda"),
    "transport": (AUTO, *TRANSPORTS),
    "kv_dtype": ("auto", *DTYPES),
}


def role_section(config: ClusterConfig, role: RoleName) -> RoleSection:
    """Return the overrides for workers of `role`."""
    return {RoleName.PREFILL: config.prefill, RoleName.DECODE: config.decode, RoleName.MIXED: config.mixed}[role]


def check_workers(config: ClusterConfig) -> None:
    """Raise ConfigError for a value that no worker can have, under the name that it was given by."""
    _check_values({field: getattr(config.worker, field) for field in _CHOICES}, None)
    for role in RoleName:
        _check_values(_given(role_section(config, role)), role)
    worker = config.worker
    for name in worker.transports:
        if name not in TRANSPORTS:
            raise ConfigError(f"worker.transports is {name!r}", todo=f"Use one of {', '.join(TRANSPORTS)}")
    if worker.wire_codec not in ("", *CODECS):
        raise ConfigError(
            f"--wire-codec is {worker.wire_codec!r}",
            why="no such codec is known",
            todo=f"Use one of none, {', '.join(CODECS)}",
        )


def effective(config: ClusterConfig, role: RoleName) -> WorkerSection:
    """Return `[worker]` with the overrides of `role`. `threads` 0 = still to be divided."""
    below = min(config.worker.wire_codec_below_bytes_per_s, ALWAYS_BYTES_PER_S)  # JSON has no infinity
    given = _given(role_section(config, role))
    return dataclasses.replace(config.worker, wire_codec_below_bytes_per_s=below, **given)


def check_fit(config: ClusterConfig, counts: Mapping[RoleName, int], model: ModelConfig) -> None:
    """Raise ConfigError if the model cannot be split over the ranks of some role's workers."""
    for role in (role for role, count in counts.items() if count):
        tp = effective(config, role).tp
        why = tp_refusal(model, tp)
        if why:
            is_given = role_section(config, role).tp is not None
            raise ConfigError(
                f"{_name('tp', role if is_given else None)} {tp} does not fit the model ({model.architecture})",
                why=why,
                todo=f"Use one of {', '.join(map(str, fitting_tp(model)))}",
            )


def check_transports(config: ClusterConfig, counts: Mapping[RoleName, int]) -> None:
    """Raise ConfigError if workers of some role would push over a transport that no worker listens on."""
    listened = config.worker.transports
    for role in (role for role, count in counts.items() if count and listened):
        if not _pushed_over(config, role).isdisjoint(listened):
            continue
        wanted = effective(config, role).transport
        is_given = role_section(config, role).transport is not None
        why, todo = f"worker.transports names {', '.join(listened)} alone", f"Add {wanted!r} to it, or leave it out"
        if wanted == AUTO:
            why += f", and auto takes none but {', '.join(_AUTOMATIC)}"
            todo = f"Use --transport {listened[0]}, or leave worker.transports out"
        name = _name("transport", role if is_given else None)
        raise ConfigError(f"{name} is {wanted!r}, and no worker would listen on that", why=why, todo=todo)


def divide_cores(
    config: ClusterConfig, counts: Mapping[RoleName, int], cores: int, free_bytes: int = 0
) -> dict[RoleName, WorkerSection]:
    """Return the settings of every role's workers. `threads`: cores divided by all ranks of all workers, at least 1.
    `memory_bytes`: `free_bytes` divided by all workers, where they are on this machine; 0 = each computes it.
    `transports`: where none are given, those that workers of this cluster push over, if "auto" would leave some out."""
    sections = {role: effective(config, role) for role in counts}
    ranks = sum(count * sections[role].tp for role, count in counts.items())
    share = max(1, cores // max(1, ranks))
    pushed = set().union(*(_pushed_over(config, role) for role, count in counts.items() if count))
    listened = config.worker.transports
    if not listened and not pushed.issubset(_AUTOMATIC):
        listened = tuple(name for name in TRANSPORTS if name in pushed)
    is_here = config.launcher is LauncherName.LOCAL
    memory = free_bytes // max(1, sum(counts.values())) if is_here else 0
    return {
        role: dataclasses.replace(
            s, threads=s.threads or share, transports=listened, memory_bytes=s.memory_bytes or memory
        )
        for role, s in sections.items()
    }


def _name(field: str, role: RoleName | None) -> str:
    """Return how `field` is given for all workers (None), or for those of `role` alone."""
    return name_of(f"{role or 'worker'}.{field}")


def _pushed_over(config: ClusterConfig, role: RoleName) -> set[str]:
    """Return the transports of which workers of `role` would take one."""
    wanted = effective(config, role).transport
    return set(_AUTOMATIC) if wanted == AUTO else {wanted}


def _given(section: RoleSection) -> dict[str, Any]:
    """Return the fields that the role overrides."""
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if value is not None}


def _check_values(values: Mapping[str, Any], role: RoleName | None) -> None:
    for field, value in values.items():
        allowed = _CHOICES.get(field)
        if allowed is not None and value not in allowed:
            raise ConfigError(f"{_name(field, role)} is {value!r}", todo=f"Use one of {', '.join(allowed)}")
