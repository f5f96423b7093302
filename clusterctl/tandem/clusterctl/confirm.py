"""Consent to a change: shown without effect (`--dry-run`), asked for on a terminal, or given beforehand (`--yes`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from tandem.clusterctl.output import note
from tandem.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The flag of every command that changes or starts something."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent(DryRun):
    """The flags of every command that disrupts or removes a part of a running cluster."""

    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed where no terminal is.")] = False

    def ask(self, lines: Sequence[str]) -> None:
        """Show the difference and return once the user agrees, at once with `--yes`.
        Exits with 1 if refused. Raises ConfigError without a terminal."""
        self.check()
        if self.yes:
            return
        for line in lines:
            note(line)
        if not _is_agreed():
            note("nothing was changed")
            raise typer.Exit(1)

    def check(self) -> None:
        """Raise ConfigError if `ask` could not prompt."""
        if not self.yes and (sys.stdin is None or not sys.stdin.isatty()):  # None: it is closed
            raise ConfigError(
                "this changes the cluster and nobody can be asked",
                why="the standard input is no terminal",
                todo="look at it with --dry-run, then give --yes",
            )


def _is_agreed() -> bool:
    """Read the user's reply; EOFError at the end of input. Not `typer.confirm`: it writes a blank to the standard
    output."""
    while True:
        print("Do that? [y/N]: ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            line = "?"
        if not line:
            raise EOFError
        answer = line.strip().lower()
        if answer in ("", "n", "no"):
            return False
        if answer in ("y", "yes"):
            return True
        note("say y or n")
