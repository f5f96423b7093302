"""`clusterctl net`: the speed of every transport between every two hosts, and the links that carry KV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from tandem.clusterctl import rich_output
from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record
from tandem.clusterctl.rich_output import say
from tandem.core.link_speed import rate

USED = "*"

app = command_app()


@app.command(epilog=examples("net", "net -o json"))
@flagged
def net(where: Where, output: Output) -> None:
    """Show the speed of links that carry KV: a matrix of hosts and transports as measured, and the links in use."""
    with where.client() as admin:
        output.show("Net", admin.net(), show)


def show(found: Record, console: Console) -> None:
    """Print hosts × transports, then the links between workers, then warnings."""
    measured, links = found.get("measured") or [], found.get("links") or []
    if not measured and not links:
        say(console, "no link was measured yet: a link is measured when KV first travels over it")
        return
    every = [*measured, *links]
    names = short_names(host for row in every for host in (row["from_host"], row["to_host"]))
    console.print(_matrix(measured, names))
    for row in measured:
        if row["failure"]:
            way = f"{names[row['from_host']]} to {names[row['to_host']]}"
            say(console, f"failed: {row['transport']} from {way}, to {row['peer']}, {_ago(row)}: {row['failure']}")
    say(console, f"{USED} in use")
    say(console, "")
    console.print(_links(links))
    for link in links:
        for why in link["unused"]:
            say(console, f"warning: {_ends(link)} goes over {link['transport']}: {why}")


def short_names(hosts: Iterable[str]) -> dict[str, str]:
    """Return host ids → host names, numbered where several machines or containers have the same one."""
    names: dict[str, str] = {}
    seen: dict[str, int] = {}
    for host in sorted(set(hosts)):
        plain = host.rpartition(":")[2].partition(".")[2] or host or "–"
        seen[plain] = seen.get(plain, 0) + 1
        names[host] = plain if seen[plain] == 1 else f"{plain}#{seen[plain]}"
    return names


def _matrix(measured: Sequence[Record], names: Mapping[str, str]) -> Table:
    transports = list(dict.fromkeys(row["transport"] for row in measured))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in measured:
        pair = cells.setdefault((names[row["from_host"]], names[row["to_host"]]), {})
        if row["failure"]:
            pair.setdefault(row["transport"], "failed")
        else:
            pair[row["transport"]] = _cell(row)
    table = rich_output.table("FROM", "TO", *transports, fixed=("FROM", "TO", *transports))
    for (from_host, to_host), by_transport in sorted(cells.items()):
        table.add_row(from_host, to_host, *(by_transport.get(name, "–") for name in transports))
    return table


def _cell(row: Record) -> str:
    mark = f" {USED}" if row["is_used"] else ""
    return f"{rate(row['bytes_per_s'])}, {row['latency_s'] * 1e6:.0f} µs, {_ago(row)}{mark}"


def _links(links: Sequence[Record]) -> Table:
    columns = ("LINK", "TRANSPORT", "MEASURED", "ACHIEVED", "STALLS")
    table = rich_output.table(*columns, "WHY", fixed=columns)
    for link in links:
        measured, achieved = rate(link["bytes_per_s"]), rate(link["achieved_bytes_per_s"])
        transport = link["transport"] or "dialling"
        table.add_row(_ends(link), transport, measured, achieved, str(link["stalls"]), link["reason"])
    return table


def _ends(link: Record) -> str:
    return f"{link['worker']}.{link['rank']} → {link['peer']}.{link['peer_rank']}"


def _ago(row: Record) -> str:
    seconds = float(row["age_s"])
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
