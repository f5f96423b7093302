"""Text lines and tables, used by the views."""

from __future__ import annotations

import sys
from collections.abc import Collection

from rich.console import Console, RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

_FILE_WIDTH = 200
"""Columns where the output is no terminal."""


def console() -> Console:
    """Return a console on the standard output."""
    return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)


def table(*columns: str, right: Collection[str] = (), fixed: Collection[str] = ()) -> Table:
    """Return an empty table without lines; columns in `right` are flush right, those in `fixed` never broken into
    lines."""
    made = _PlainTable(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=column in fixed)
    return made


class _PlainTable(Table):
    """Shows texts as they are: rich would take text in brackets for markup."""

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        shown = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*shown, style=style, end_section=end_section)


def say(target: Console, text: str) -> None:
    """Print a line as it is, however long."""
    target.print(text, markup=False, highlight=False, soft_wrap=True)
