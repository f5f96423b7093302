"""`clusterctl status`: running workers and their health."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.inspect import status_view
from tandem.clusterctl.inspect.histograms import Scrape
from tandem.clusterctl.inspect.status_summary import overview, pool_of
from tandem.clusterctl.output import Output, Record
from tandem.clusterctl.unscheduled import EVENTS, Unplaced
from tandem.core.errors import TandemError

if TYPE_CHECKING:
    from tandem.clusterctl.admin_client import AdminClient

app = command_app()


@app.command(epilog=examples("status", "status -o json", "status --endpoint http://10.0.0.7:8002 --admin-key-file key"))
@flagged
def status(
    where: Where,
    output: Output,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="End with 7 unless the cluster is healthy.")] = False,
) -> None:
    """Show the health of a cluster, its pools and every worker, and what to do about problems."""
    with where.client() as admin:
        found = look(admin)
    output.show("Status", found, status_view.show, wide=status_view.show_wide)
    if exit_code and found["health"] != "ok":
        raise typer.Exit(Exit.UNHEALTHY)


def look(admin: AdminClient) -> dict[str, Any]:
    """Return the admin port's status with its summary, of all requests since the router started."""
    found = admin.status()
    desired = _desired(admin)
    missing = _unplaced(admin, desired, found)
    whole = found | overview(found, Scrape.parse(admin.metrics()), missing)
    return whole | {"pools": with_wanted(whole["pools"], desired)}


def with_wanted(pools: Sequence[Record], desired: Record) -> list[dict[str, Any]]:
    """Return the rows with the desired number of workers, and rows for pools of which no worker is there."""
    wanted = Counter[tuple[str, str]]()
    for pool in desired.get("pools") or []:
        wanted[pool["model"], pool["role"]] += pool["count"]
    if not wanted:
        return [dict(pool) for pool in pools]
    there = {(pool["model"], pool["role"]) for pool in pools}
    missing = [
        pool_of(model, role, []) for (model, role), count in wanted.items() if count and (model, role) not in there
    ]
    rows = sorted([*pools, *missing], key=lambda pool: (pool["model"], pool["role"]))
    return [{**pool, "wanted": wanted[pool["model"], pool["role"]]} for pool in rows]


def _unplaced(admin: AdminClient, desired: Record, status: Record) -> list[str]:
    """Return the members of the cluster that wait for a machine with room, one line each."""
    there = {str(worker.get("worker")) for worker in status.get("workers") or [] if worker.get("is_connected")}
    absent = [name for one in desired.get("members") or [] if (name := str(one["worker_id"])) not in there]
    if not absent:
        return []
    unplaced = Unplaced()
    try:
        unplaced.hear(admin.events(count=EVENTS)["events"])
    except TandemError:  # Redis is unreachable, or this cluster keeps no events
        return []
    now_s = time.time()
    return [
        f"{name} {why}, for {max(0.0, now_s - unplaced.since_s(name)):.0f} s"
        for name in absent
        if (why := unplaced.why(name))
    ]


def _desired(admin: AdminClient) -> Record:
    try:
        return dict(admin.desired()["desired"])
    except TandemError:  # no desired state is stored, or the cluster stops
        return {}
