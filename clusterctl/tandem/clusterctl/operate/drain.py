"""`clusterctl drain`: takes a worker out of service without stopping it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.operate.apply import ApplyOptions, carry_out
from tandem.clusterctl.output import Output

app = command_app()


@app.command(epilog=examples("drain prefill-1", "drain prefill-1 --deadline 10 --yes", "drain prefill-1 --undo"))
@flagged
def drain(
    where: Where,
    manner: ApplyOptions,
    output: Output,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Such as prefill-1.")],
    deadline: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which requests that still run move to other workers; without it, what this worker was "
            "drained with before, else 60.",
            min=0,
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Give it work again, as `uncordon` does.")] = False,
) -> None:
    """Give a worker no new work and wait until it has none. It keeps running until `uncordon` or `scale`."""
    wish: dict[str, Any] = {"verb": "uncordon" if undo else "drain", "worker": worker}
    if deadline is not None:
        wish["deadline_s"] = deadline
    with where.client() as admin:
        carry_out(admin, wish, manner, output)
