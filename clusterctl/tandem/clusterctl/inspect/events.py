"""`clusterctl events`: the cluster's actions, with reasons."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record
from tandem.core.errors import UnavailableError

_POLL_S = 0.5
_QUIET_S = 30.0
_PAGE = 500

app = command_app()


@app.command(epilog=examples("events", "events -f", "events --last 200 -o json"))
@flagged
def events(
    where: Where,
    output: Output,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new events.")] = False,
    last: Annotated[int, typer.Option(help="Number of past events.", min=1, max=_PAGE)] = 50,
) -> None:
    """Show what the cluster did and why, oldest first; programs get one document a line."""
    with where.client() as admin:
        found = admin.events(count=last)
        heard_s = time.monotonic()
        while True:
            for row in found["events"]:
                output.stream("Event", as_document(row), line_of)
            if not follow:
                return
            time.sleep(0 if len(found["events"]) == _PAGE else _POLL_S)
            try:
                found, heard_s = admin.events(after=found["next"], count=_PAGE), time.monotonic()
            except UnavailableError:  # the router may be starting again
                if time.monotonic() - heard_s > _QUIET_S:
                    raise
                found = {**found, "events": []}


def as_document(row: Record) -> dict[str, Any]:
    """Return an event as a document; `kind` is the document's."""
    return {"place": row["place"], "time_s": row["time_s"], "event": row["kind"], "subject": row["subject"],
            "reason": row["reason"]}  # fmt: skip


def line_of(row: Record) -> str:
    """Format an event as a line."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["time_s"]))
    return f"{stamp}  {row['subject']:<12} {str(row['event']).replace('_', ' '):<16} {row['reason']}"
