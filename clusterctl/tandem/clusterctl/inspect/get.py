"""`clusterctl get pools | workers`: desired beside observed state, in rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.operate.wait import state_of
from tandem.clusterctl.output import Output, Record

if TYPE_CHECKING:
    from rich.console import Console

app = command_app(help="List pools or workers.")


@app.command(epilog=examples("get pools", "get pools -o json"))
@flagged
def pools(where: Where, output: Output) -> None:
    """List pools: how many workers are wanted, and how many are ready."""
    with where.client() as admin:
        wanted, status = admin.desired()["desired"], admin.status()
    rows = [
        {**pool, "ready": sum(row["pool"] == pool["name"] and row["state"] == "ready" for row in members)}
        for members in [workers_of(wanted, status)]
        for pool in wanted["pools"]
    ]
    found = {"version": wanted["version"], "max_ranks": wanted["max_ranks"], "items": rows}
    output.show("PoolList", found, _show_pools)


@app.command(epilog=examples("get workers", "get workers -o yaml"))
@flagged
def workers(where: Where, output: Output) -> None:
    """List workers: those that are wanted, and those that are there."""
    with where.client() as admin:
        wanted, status = admin.desired()["desired"], admin.status()
    output.show("WorkerList", {"version": wanted["version"], "items": workers_of(wanted, status)}, _show_workers)


def workers_of(wanted: Record, status: Record) -> list[dict[str, Any]]:
    """Return a row for every worker, by name: its desired state and its reported one."""
    seen = {row["worker"]: row for row in status["workers"]}
    members = {member["worker_id"]: member for member in wanted["members"]}
    return [_row(name, members.get(name), seen.get(name)) for name in sorted({*seen, *members})]


def _row(name: str, member: Record | None, seen: Record | None) -> dict[str, Any]:
    known: Record = seen or {}
    return {
        "worker": name,
        "pool": member["pool"] if member else "",
        "is_wanted": member is not None,
        "wanted_role": member["role"] if member else "",
        "role": known.get("role", ""),
        "state": state_of(seen),
        "is_cordoned": bool(member and member["is_cordoned"]),
        "restart_generation": member["restart_generation"] if member else 0,
        "in_flight": int(known.get("in_flight") or 0),
        "incarnation": known.get("incarnation", ""),
        "address": known.get("address", ""),
        "pid": known.get("pid", 0),
    }


def _show_pools(found: Record, console: Console) -> None:
    from tandem.clusterctl import rich_output

    columns, figures = ("POOL", "MODEL", "ROLE"), ("WANTED", "READY", "TP")
    table = rich_output.table(*columns, *figures, "HARDWARE", right=figures, fixed=columns)
    for row in found["items"]:
        counts = (str(row["count"]), str(row["ready"]), str(row["tp"]))
        table.add_row(row["name"], row["model"], row["role"], *counts, row["hardware"])
    console.print(table)


def _show_workers(found: Record, console: Console) -> None:
    from tandem.clusterctl import rich_output

    columns = ("WORKER", "POOL", "ROLE", "STATE", "WANTED AS")
    table = rich_output.table(*columns, "IN FLIGHT", "ADDRESS", "PID", right=("IN FLIGHT",), fixed=columns)
    for row in found["items"]:
        texts = (row["worker"], row["pool"] or "–", row["role"] or "–", row["state"], _wish(row))
        table.add_row(*texts, str(row["in_flight"]), row["address"] or "–", str(row["pid"] or "–"))
    console.print(table)


def _wish(row: Record) -> str:
    words: Sequence[str] = [row["wanted_role"] or "nothing", *(["cordoned"] if row["is_cordoned"] else [])]
    return ", ".join(words)
