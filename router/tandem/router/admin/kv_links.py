"""KV links of the cluster, as plain JSON values for operators."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tandem.router.workers.table import WorkerTable


def net(table: WorkerTable) -> dict[str, Any]:
    """`measured`: every measurement or failure between two hosts, `is_used` if some link goes that way; `links`: those
    in use; `workers`: the host of each."""
    links = [
        {"worker": link.worker, **asdict(used)}
        for link in sorted(table.links, key=lambda link: link.worker)
        for used in link.used_links
    ]
    used_routes = {(used["from_host"], used["to_host"], used["transport"]) for used in links}
    rows = sorted(table.speeds.rows, key=lambda row: (row.route, row.failure, row.peer))
    measured = [{**asdict(row), "is_used": row.route in used_routes and not row.failure} for row in rows]
    workers = [
        {"worker": link.worker, "role": link.facts.role.value, "host": link.facts.host}
        for link in sorted(table.links, key=lambda link: link.worker)
        if link.facts is not None
    ]
    return {"workers": workers, "measured": measured, "links": links}
