"""`clusterctl version`: of this program, and of the cluster if one answers."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record
from tandem.core.errors import TandemError
from tandem.core.version import release

if TYPE_CHECKING:
    from rich.console import Console

app = command_app()


@app.command(epilog=examples("version", "version --client -o json"))
@flagged
def version(
    where: Where,
    output: Output,
    client: Annotated[bool, typer.Option("--client", help="Show only the version of this program.")] = False,
) -> None:
    """Show the version of this program and of the cluster, if one runs here."""
    found: dict[str, Any] = {"client": release(), "python": platform.python_version(), "cluster": None}
    if not client:
        try:
            with where.client() as admin:
                found["cluster"] = str(admin.status().get("version") or "") or None
        except TandemError:
            if where.endpoint:  # one that was named is expected to be there
                raise
    output.show("Version", found, _show)


def _show(found: Record, console: Console) -> None:
    from tandem.clusterctl.rich_output import say

    say(console, f"clusterctl {found['client']} (Python {found['python']})")
    say(console, f"cluster    {found['cluster'] or 'none is running here'}")
