"""Merges the worker rows of one router's processes into one row for each worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem.router.admin.status import absent_state
from tandem.router.dispatch.circuit_breaker import BreakerState

Row = Mapping[str, Any]


def workers_of(pages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The workers of several processes' statuses, by name.

    A worker's own reports are taken from a process that is connected to it. Requests that processes have there are
    added; of per-process findings, connection and breaker, those of the process that is worst off are taken.
    """
    by_worker: dict[str, list[Row]] = {}
    for page in pages:
        for row in page["workers"]:
            by_worker.setdefault(row["worker"], []).append(row)
    return [_together(rows) for _, rows in sorted(by_worker.items())]


def _together(rows: Sequence[Row]) -> dict[str, Any]:
    heard = max(rows, key=lambda row: (row["is_connected"], "role" in row))
    worst = min(rows, key=lambda row: (row["is_connected"], row["state"] == "ready", not row["trouble"]))
    is_registered = any(row["is_registered"] for row in rows)
    return {
        **heard,
        "is_connected": worst["is_connected"],
        "is_registered": is_registered,
        "state": worst["state"] if worst["is_connected"] else absent_state(is_registered=is_registered),
        "trouble": next((row["trouble"] for row in (worst, *rows) if row["trouble"]), ""),
        "router_in_flight": sum(row["router_in_flight"] for row in rows),
        "breaker": max((row["breaker"] for row in rows), key=lambda name: BreakerState[name.upper()]),
    }
