"""Every command of `clusterctl` that does something, by the words that lead to it."""

from collections.abc import Iterator
from typing import Any

import typer.main

from tandem.clusterctl import main as program


def _leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
        return
    for name, inner in below.items():
        yield from _leaves(inner, (*path, name))


ALL: dict[tuple[str, ...], Any] = dict(_leaves(typer.main.get_command(program.app)))


def flags_of(words: tuple[str, ...]) -> set[str]:
    """All its flags, as they are spelled."""
    return {flag for parameter in ALL[words].params for flag in (*parameter.opts, *parameter.secondary_opts)}
