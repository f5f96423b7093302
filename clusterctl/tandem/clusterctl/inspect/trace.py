"""`clusterctl trace REQUEST`: the phases of one request, on one time line."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from tandem.clusterctl import rich_output
from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record, ms
from tandem.clusterctl.rich_output import say

_BAR = 48
"""Width of the whole request in characters."""

app = command_app()


@app.command(epilog=examples("trace cmpl-0123abcd", "trace cmpl-0123abcd -o wide", "trace cmpl-0123abcd -o json"))
@flagged
def trace(
    where: Where,
    output: Output,
    request: Annotated[str, typer.Argument(help="Id of the answer; the request may still run.", metavar="REQUEST")],
) -> None:
    """Show one request on one time line: waiting, prefill, transfer, decode. The router knows those that run and the
    last 2,048 that ended."""
    with where.client() as admin:
        output.show("Trace", admin.trace(request), show, wide=show_all)


def show(found: Record, console: Console) -> None:
    """Print the time line."""
    cached = f" ({found['cached_tokens']} cached)" if found["cached_tokens"] else ""
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found["began_at_s"]))
    outcome = str(found["outcome"]) if found["is_over"] else f"runs ({found['outcome']})"
    say(console, f"request   {found['request']}: {outcome}")
    say(console, f"began     {began}, router {found['router']}, took {ms(found['duration_s'])}")
    say(console, f"tokens    {found['prompt_tokens']} in{cached}, {found['output_tokens']} out")
    if found.get("constraint"):
        say(console, f"follows   {found['constraint']['kind']}, of {found['constraint']['param']}")
    say(console, f"planned   {found['reason']}; attempts: {found['attempts']}")
    if found["error"]:
        say(console, f"error     {found['error']}")
    table = rich_output.table(
        "SPAN", "WHERE", "FROM", "TOOK", "", right=("FROM", "TOOK"), fixed=("SPAN", "WHERE", "", "FROM")
    )
    for span in found["spans"]:
        took_s = span["end_s"] - span["start_s"]
        again = f" (attempt {span['attempt']})" if span["attempt"] > 1 else ""
        where = f"{span['worker'] or 'router'}{again}"
        table.add_row(span["span"], where, ms(span["start_s"]), ms(took_s), _bar(span, found["duration_s"]))
    console.print(table)


def show_all(found: Record, console: Console) -> None:
    """Print the time line, every moment, and the parts of the hand-off."""
    show(found, console)
    table = rich_output.table("AT", "ATTEMPT", "WHAT", "PREFILL", "DECODE", "WHY", right=("AT", "ATTEMPT"))
    for moment in found["moments"]:
        workers = (moment["prefill"] or "–", moment["decode"] or "–")
        table.add_row(ms(moment["at_s"]), str(moment["attempt"]), moment["what"], *workers, moment["why"])
    console.print(table)
    if found["handoff"]:
        parts = ", ".join(f"{name.removesuffix('_s')} {ms(seconds)}" for name, seconds in found["handoff"].items())
        say(console, f"hand-off  {parts}")


def _bar(span: Record, whole_s: float) -> str:
    """Return the position of the span in the whole; at least one character."""
    scale = _BAR / whole_s if whole_s > 0 else 0.0
    start: int = min(_BAR - 1, int(span["start_s"] * scale))
    end: int = max(start + 1, min(_BAR, round(span["end_s"] * scale)))
    return " " * start + "█" * (end - start)
