"""`clusterctl flip`: changes a worker's role; it keeps its weights, prefix cache and links."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.operate.apply import ApplyOptions, carry_out
from tandem.clusterctl.output import Output
from tandem.core.lifecycle import RoleName

app = command_app()


@app.command(epilog=examples("flip decode-2 --to prefill", "flip decode-2 --to prefill --dry-run"))
@flagged
def flip(
    where: Where,
    manner: ApplyOptions,
    output: Output,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Such as decode-2.")],
    to: Annotated[RoleName, typer.Option("--to", help="The role that it takes.")],
) -> None:
    """Give a worker another role. It is drained first and keeps its weights and prefix cache; if that fails it goes
    back to its old role."""
    with where.client() as admin:
        carry_out(admin, {"verb": "flip", "worker": worker, "role": to.value}, manner, output)
