"""Consent to a change: shown without effect (`--dry-run`), asked for on a terminal, or given beforehand (`--yes`)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from tandem.clusterctl.output import Output, Record, note
from tandem.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_SIGNS: Final = {"create": "+", "set": "~", "stop": "-", "revoke": "-", "release": "-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectKind:
    """One change outside the desired state; `subject` is its target: a worker, a key, a class."""

    deed: Literal["create", "set", "stop", "revoke", "release"]
    subject: str
    detail: str = ""

    @property
    def line(self) -> str:
        """Return the change as text."""
        return f"{_SIGNS[self.deed]} {self.subject}: {self.deed}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The flag of every command that changes or starts something."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent(DryRun):
    """The flags of every command that disrupts or removes a part of a running cluster."""

    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; required without a terminal.")] = False

    def agreed(self, deeds: Sequence[EffectKind], output: Output, nothing: str = "nothing to change") -> bool:
        """Show the changes with `--dry-run`, or `nothing` if there are none, and return False; else ask for them, if
        there are any, and return True. Raises as `ask`."""
        if self.dry_run:
            lines = [*(deed.line for deed in deeds), "nothing was changed (--dry-run)"] if deeds else [nothing]
            _show(deeds, output, lines, is_dry_run=True)
        elif deeds:
            self.ask([deed.line for deed in deeds])
        return not self.dry_run

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
                "this changes the cluster and cannot be confirmed",
                why="the standard input is not a terminal",
                todo="look at it with --dry-run, then give --yes",
            )


def show_done(deeds: Sequence[EffectKind], output: Output, text: str) -> None:
    """Show the changes made; `text` describes them. No deeds: nothing had to change."""
    _show(deeds, output, [text], is_dry_run=False)


def _show(deeds: Sequence[EffectKind], output: Output, lines: Sequence[str], *, is_dry_run: bool) -> None:
    def view(found: Record, console: Console) -> None:
        from tandem.clusterctl.rich_output import say

        for line in lines:
            say(console, line)

    rows = [dataclasses.asdict(deed) for deed in deeds]
    output.show("Effect", {"is_dry_run": is_dry_run, "is_changed": bool(rows), "changes": rows}, view)


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
        note("answer y or n")
