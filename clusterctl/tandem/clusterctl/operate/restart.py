"""`clusterctl restart`: stops a worker and starts it anew."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.operate.apply import ApplyOptions, carry_out
from tandem.clusterctl.output import Output

app = command_app()


@app.command(epilog=examples("restart prefill-1", "restart prefill-1 --yes --timeout 60"))
@flagged
def restart(
    where: Where,
    manner: ApplyOptions,
    output: Output,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Such as prefill-1.")],
) -> None:
    """Drain a worker, stop it and start it anew. Each call is one restart; a call that fails with 5 was none."""
    with where.client() as admin:
        carry_out(admin, {"verb": "restart", "worker": worker}, manner, output)
