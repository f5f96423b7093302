"""`clusterctl down`: the end of a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.core.errors import DeadlineError

app = command_app()


@app.command(epilog=examples("down", "down --name trial --timeout 120"))
@flagged
def down(
    where: Where,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until everything is gone.")] = 60.0,
) -> None:
    """Stop a cluster and wait until it is gone."""
    with where.client() as admin:
        admin.down()
        if not admin.wait_gone(timeout):
            raise DeadlineError(
                f"the cluster at {admin.endpoint} still runs after {timeout:g} s", todo="Look into its logs"
            )
    print("stopped")
