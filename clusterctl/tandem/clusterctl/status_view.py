"""A cluster's status for people: single values as lines, every list of records as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def show(status: Mapping[str, Any], console: Console) -> None:
    """Print all that `status` holds, in its order; keys that only newer clusters know are shown too."""
    plain = {key: value for key, value in status.items() if not _is_records(value)}
    width = max((len(_title(key)) for key in plain), default=0)
    for key, value in plain.items():
        console.print(f"{_title(key):<{width}}  {_text(value)}", markup=False, highlight=False, soft_wrap=True)
    for key, value in status.items():
        if _is_records(value):
            console.print(_table(_title(key), value))


def _is_records(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _table(title: str, records: Sequence[Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for record in records for key in record))
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        values = [record.get(column) for record in records]
        is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        table.add_column(_title(column), justify="right" if is_number else "left", overflow="fold")
    for record in records:
        table.add_row(*(_text(record.get(column)) for column in columns))
    return table


def _title(key: str) -> str:
    return key.replace("_", " ")


def _text(value: object) -> str:
    if value is None or value == "" or value == [] or value == {}:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1_000 else f"{value:.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{_title(str(key))} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value)
    return str(value)
