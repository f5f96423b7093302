"""How answers are printed: all of one as JSON, or what matters of it as lines and tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

Record = Mapping[str, Any]

_FILE_WIDTH = 200
"""Columns where the output is no terminal."""


def show(found: Record, view: Callable[[Record, Console], None], *, as_json: bool) -> None:
    """Print what an admin port said."""
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        view(found, console())


def console() -> Console:
    """The standard output."""
    return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)


def table(*columns: str, right: Collection[str] = (), fixed: Collection[str] = ()) -> Table:
    """An empty table without lines; columns in `right` are flush right, those in `fixed` never broken into lines."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=column in fixed)
    return made


def say(target: Console, text: str) -> None:
    """Print a line as it is, however long."""
    target.print(text, markup=False, highlight=False, soft_wrap=True)
