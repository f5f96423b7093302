"""`clusterctl down`: stops a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.confirm import Consent, EffectKind, show_done
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record
from tandem.core.errors import DeadlineError

app = command_app()


@app.command(epilog=examples("down", "down --name trial --timeout 120 --yes", "down --dry-run"))
@flagged
def down(
    where: Where,
    consent: Consent,
    output: Output,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until everything is gone.")] = 60.0,
) -> None:
    """Stop a cluster and wait until it is gone. Ends with 0 as well where none of this name runs here."""
    if not where.can_run():
        nothing = f"no cluster {where.name!r} is running here"
        if consent.agreed([], output, nothing):
            show_done([], output, nothing)
        return
    with where.client() as admin:
        deeds = _deeds(admin.status())
        if not consent.agreed(deeds, output):
            return
        admin.down()
        if not admin.wait_gone(timeout):
            raise DeadlineError(
                f"the cluster at {admin.endpoint} still runs after {timeout:g} s", todo="Look into its logs"
            )
    show_done(deeds, output, "stopped")


def _deeds(status: Record) -> list[EffectKind]:
    """Return the end of the cluster and of each of its workers."""
    router, admission = status.get("router", {}), status.get("admission", {})
    busy = f"{router.get('in_flight', 0)} requests in flight, {admission.get('waiting', 0)} waiting"
    workers = [EffectKind(deed="stop", subject=row["worker"], detail=row.get("role", "")) for row in status["workers"]]
    return [EffectKind(deed="stop", subject=f"cluster {status['cluster']}", detail=busy), *workers]
