"""Flags that are spelled once, as fields of a dataclass: those that every command on a running cluster has."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import typer

from tandem.clusterctl.admin_client import AdminClient
from tandem.core.config import DEFAULT_CLUSTER

P = ParamSpec("P")
Flags = TypeVar("Flags")

AsJson = Annotated[bool, typer.Option("--json", help="Everything, as JSON.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which cluster, and how to reach it."""

    name: Annotated[str, typer.Option(help="Which cluster, if several run here.")] = DEFAULT_CLUSTER
    state_dir: Annotated[str, typer.Option(help="Where clusters keep their state [env: TANDEM_STATE_DIR].")] = ""
    endpoint: Annotated[str, typer.Option(help="Admin port of a cluster elsewhere, like http://127.0.0.1:8002.")] = ""
    admin_key_file: Annotated[str, typer.Option(help="File with the admin key.")] = ""

    def client(self) -> AdminClient:
        """Its admin port, to be closed by the caller; UnavailableError or ConfigError when it cannot be found."""
        return AdminClient.find(
            endpoint=self.endpoint, admin_key_file=self.admin_key_file, name=self.name, state_dir=self.state_dir
        )


def on_cluster(command: Callable[Concatenate[Where, P], None]) -> Callable[..., None]:
    """A command on a running cluster: it takes a `Where`, people give the flags of one."""
    return taking(Where, command)


def taking(flags: type[Any], command: Callable[Concatenate[Flags, P], None]) -> Callable[..., None]:
    """`command` with the fields of the dataclass `flags`, which is its first parameter, as parameters of its own.

    Each field has its `typer.Option` in an `Annotated` type. What it returns has the signature that typer reads.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    types = get_type_hints(flags, include_extras=True)
    fields = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
        )
        for field in dataclasses.fields(flags)
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = flags(**{field.name: given.pop(field.name) for field in fields})
        command(made, **given)  # type: ignore[call-arg]

    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    run.__signature__ = inspect.Signature([*keyword, *fields])  # type: ignore[attr-defined]
    return run
