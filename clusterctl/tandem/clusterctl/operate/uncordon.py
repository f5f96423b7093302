"""`clusterctl uncordon`: returns a drained worker to service."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.operate.apply import ApplyOptions, carry_out
from tandem.clusterctl.output import Output

app = command_app()


@app.command(epilog=examples("uncordon prefill-1"))
@flagged
def uncordon(
    where: Where,
    manner: ApplyOptions,
    output: Output,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Such as prefill-1.")],
) -> None:
    """Give a drained worker work again."""
    with where.client() as admin:
        carry_out(admin, {"verb": "uncordon", "worker": worker}, manner, output)
