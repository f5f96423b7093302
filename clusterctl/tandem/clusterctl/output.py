"""Output of commands: tables as text, documents for programs, files. Data goes to stdout, all else to stderr.

A document has `apiVersion` and `kind`; streams have one document a line (NDJSON).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tandem.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

API_VERSION: Final = "tandem/v1"
_PICTURES = (".svg", ".png", ".pdf")
Record = Mapping[str, Any]
View = Callable[[Record, "Console"], None]


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The flags of every command with output."""

    output: Annotated[
        Format, typer.Option("--output", "-o", help="table or wide to read, json or yaml for programs.")
    ] = Format.TABLE
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False

    @property
    def format(self) -> Format:
        return Format.JSON if self.as_json else self.output

    @property
    def is_document(self) -> bool:
        """True if the output is for programs."""
        return self.format in (Format.JSON, Format.YAML)

    def show(self, kind: str, found: Record, view: View, *, wide: View | None = None) -> None:
        """Print `found` as a document of that kind, or as `view` shows it; `wide` is the view of -o wide."""
        if self.format is Format.JSON:
            print(json.dumps(document(kind, found), indent=2))
        elif self.format is Format.YAML:
            print(as_yaml(document(kind, found)), end="")
        else:
            from tandem.clusterctl.rich_output import console

            chosen = wide if wide is not None and self.format is Format.WIDE else view
            chosen(found, console())

    def stream(self, kind: str, found: Record, line: Callable[[Record], str]) -> None:
        """Print one record of many, now: a document on a line, a YAML document, or `line` of it."""
        if self.format is Format.JSON:
            print(json.dumps(document(kind, found)), flush=True)
        elif self.format is Format.YAML:
            print(f"---\n{as_yaml(document(kind, found))}", end="", flush=True)
        else:
            print(line(found), flush=True)


def document(kind: str, found: Record) -> dict[str, Any]:
    """Return the document: `found` below its version and kind."""
    return {"apiVersion": API_VERSION, "kind": kind, **found}


def as_yaml(found: Record) -> str:
    """Format as YAML with the keys in their order."""
    import yaml

    text: str = yaml.safe_dump(dict(found), sort_keys=False, allow_unicode=True)
    return text


def note(text: str) -> None:
    """Print a line that is no data: progress, a warning, the next step."""
    print(text, file=sys.stderr, flush=True)


def ms(seconds: float | None) -> str:
    """Format a duration in milliseconds; a dash if it is not known."""
    return "–" if seconds is None else f"{seconds * 1000:.1f} ms"


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr for long work, if that is a terminal. Yields a function to be called with (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def check_file(flag: str, path: Path) -> None:
    """Raise ConfigError if an output file cannot be written there; called before the work begins."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} is {path}", why="there is no such folder", todo="Make it")
    if path.is_dir():
        raise ConfigError(f"{flag} is {path}", why="that is a folder", todo="Name a file")


def check_picture(flag: str, path: Path) -> None:
    """Run `check_file`; ConfigError too for an unknown picture format, or without a plotting library."""
    if path.suffix not in _PICTURES:
        raise ConfigError(f"{flag} is {path.name!r}", todo=f"Use a name that ends in {', '.join(_PICTURES)}")
    check_file(flag, path)
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "pictures cannot be drawn", why="matplotlib is not installed", todo="pip install 'tandem-serve[cluster]'"
        )
