"""`clusterctl slo list | set`: the SLO classes of a cluster, through its admin port."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record
from tandem.clusterctl.page import say

app = command_app(help="What requests are promised.")


@app.command("list", epilog=examples("slo list", "slo list -o yaml"))
@flagged
def list_classes(where: Where, output: Output) -> None:
    """Show the SLO classes in force."""
    with where.client() as admin:
        output.show("SloClasses", admin.slo(), _show)


@app.command("set", epilog=examples("slo set chat --ttft 0.8 --itl 0.05"))
@flagged
def set_class(
    where: Where,
    output: Output,
    wanted: Annotated[str, typer.Argument(metavar="CLASS", help="Its name; one that is not there is added.")],
    ttft: Annotated[float | None, typer.Option(help="Seconds to the first token; 0 = not promised.")] = None,
    itl: Annotated[float | None, typer.Option(help="Seconds between two tokens; 0 = not promised.")] = None,
) -> None:
    """Change what a class promises while requests run; what is not given stays. After a restart the configured classes
    are back."""
    given = {key: seconds for key, seconds in (("ttft_s", ttft), ("itl_s", itl)) if seconds is not None}
    with where.client() as admin:
        known = next((row for row in admin.slo()["classes"] if row["slo"] == wanted), {"slo": wanted})
        output.show("SloClasses", admin.set_slo({**known, **given}), _show)


def _show(found: Record, console: Console) -> None:
    for row in found["classes"]:
        promises = [f"{label} {row[key]:g} s" for key, label in (("ttft_s", "TTFT"), ("itl_s", "ITL")) if row[key]]
        is_default = " (of requests that name none)" if row["slo"] == found["default_slo"] else ""
        say(console, f"{row['slo']}{is_default}: {', '.join(promises) or 'nothing promised'}")
    if not found["classes"]:
        say(console, "there are no SLO classes")
