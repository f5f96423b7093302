"""Flags shared by commands, as fields of a dataclass: those that every command on a running cluster has."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tandem.core.config import DEFAULT_CLUSTER
from tandem.core.errors import ConfigError

if TYPE_CHECKING:
    from tandem.clusterctl.admin_client import AdminClient

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
Name = Annotated[str, typer.Option(help="Name of the cluster, if several run here.")]
StateFolder = Annotated[str, typer.Option(help="Where clusters keep their state [env: TANDEM_STATE_DIR].")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Flags that choose a cluster, and how to reach it."""

    name: Name = DEFAULT_CLUSTER
    state_dir: StateFolder = ""
    endpoint: Annotated[str, typer.Option(help="Admin port of a cluster elsewhere, like http://127.0.0.1:8002.")] = ""
    admin_key_file: Annotated[str, typer.Option(help="File with the admin key.")] = ""

    def can_run(self) -> bool:
        """False if no `up` of that name runs on this machine; for a remote cluster only a request can show it."""
        from tandem.clusterctl.paths import find_state

        return bool(self.endpoint) or find_state(self.name, self.state_dir).is_held()

    def client(self) -> AdminClient:
        """Return a client of its admin port, to be closed by the caller; UnavailableError or ConfigError when not
        found."""
        from tandem.clusterctl.admin_client import AdminClient

        return AdminClient.find(
            endpoint=self.endpoint, admin_key_file=self.admin_key_file, name=self.name, state_dir=self.state_dir
        )


def flagged(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the fields of each of its dataclass parameters as parameters of its own.

    So a command takes a `Where` and an `Output`, and users give the flags of both. Each field has its `typer.Option`
    in an `Annotated` type. The returned function has the signature that typer reads: first the other parameters.
    """
    own: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[Any], list[inspect.Parameter]]] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind: type[Any] = parameter.annotation
        if dataclasses.is_dataclass(kind):
            groups[name] = (kind, _fields(kind))
        else:
            own.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields})
            for name, (kind, fields) in groups.items()
        }
        command(**made, **given)

    spelled = [field for _, fields in groups.values() for field in fields]
    run.__signature__ = inspect.Signature([*own, *spelled])  # type: ignore[attr-defined]
    return run


def _fields(flags: type[Any]) -> list[inspect.Parameter]:
    """The fields of a dataclass of flags, as parameters."""
    types = get_type_hints(flags, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, kind, default=field.default, annotation=types[field.name])
        for field in dataclasses.fields(flags)
    ]


def check_positive(flag: str, value: float, unit: str = "") -> None:
    """Raise ConfigError unless the value of a flag is above 0."""
    if not value > 0:
        raise ConfigError(f"{flag} is {value:g}", todo=f"Use more than 0 {unit}".rstrip())


def duration_s(text: str) -> int | None:
    """Parse `30d`, `12h`, `45m` or `90s` to seconds; None if it is none of them."""
    match = _DURATION.fullmatch(text)
    return int(match[1]) * _UNITS_S[match[2]] if match is not None else None
