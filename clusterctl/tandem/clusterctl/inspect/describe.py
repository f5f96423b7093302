"""`clusterctl describe WORKER`: the state of one worker, and its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.inspect.events import as_document, line_of
from tandem.clusterctl.inspect.get import workers_of
from tandem.clusterctl.output import Output, Record
from tandem.clusterctl.suggestions import did_you_mean
from tandem.core.errors import NotFoundError

if TYPE_CHECKING:
    from rich.console import Console

_LOOKED_AT, _SHOWN = 500, 20

app = command_app()


@app.command(epilog=examples("describe decode-0", "describe decode-0 -o json"))
@flagged
def describe(
    where: Where,
    output: Output,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Such as decode-0.")],
) -> None:
    """Show the state of a worker, and its events. Ends with 3 if there is none of that name."""
    with where.client() as admin:
        wanted, status = admin.desired()["desired"], admin.status()
        happened = admin.events(count=_LOOKED_AT)["events"]
    rows = {row["worker"]: row for row in workers_of(wanted, status)}
    if worker not in rows:
        names = ", ".join(list(rows)[:8])
        raise NotFoundError(
            f"there is no worker {worker[:80]!r}", todo=did_you_mean(worker, rows) or f"there are {names}"
        )
    said: Record | None = next((row for row in status["workers"] if row["worker"] == worker), None)
    mine = [as_document(event) for event in happened if event["subject"] == worker][-_SHOWN:]
    output.show("Worker", {**rows[worker], "said": said, "events": mine}, _show)


def _show(found: Record, console: Console) -> None:
    from tandem.clusterctl.rich_output import say

    facts = {**(found["said"] or {}), **found}
    for name, value in facts.items():
        if name not in ("said", "events", "blocks", "counters"):
            say(console, f"{name:<28} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    for event in found["events"]:
        say(console, line_of(event))
