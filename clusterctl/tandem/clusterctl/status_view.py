"""A cluster's status for people: what matters of it on one screen. All of it is in `status -o json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

Record = Mapping[str, Any]


def show(status: Record, console: Console) -> None:
    """Print `status` as the admin port gives it; what a younger or older router does not say is a dash."""
    for name, value in _summary(status).items():
        console.print(f"{name:<15} {value}", markup=False, highlight=False, soft_wrap=True)
    console.print(_workers(status.get("workers") or []))
    for pair in status.get("refused_pairs") or []:
        text = f"never paired: {pair.get('prefill')} and {pair.get('decode')}: {pair.get('why')}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _summary(status: Record) -> dict[str, str]:
    router: Record = status.get("router") or {}
    host = router.get("host", "–")
    ready = "yes" if status.get("is_ready") else f"no, missing: {_list(status.get('missing'))}"
    lines = {
        "cluster": f"{_text(status.get('cluster'))} (Tandem {_text(status.get('version'))})",
        "model": f"{_text(status.get('model'))}, served as {_list(status.get('served_names'))}",
        "ready": ready,
        "disaggregation": _text(status.get("disaggregation")),
        "router": f"{_text(router.get('id'))}, {_text(router.get('in_flight'))} in flight",
        "HTTP": f"{host}:{_text(router.get('http'))}",
        "gRPC": f"{host}:{_text(router.get('grpc'))}",
    }
    if status.get("registry_trouble"):
        lines["registry"] = _text(status["registry_trouble"])
    return lines


def _workers(workers: list[Record]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("WORKER", "ROLE", "STATE", "ADDRESS", "PID"):
        table.add_column(column, no_wrap=column != "STATE")
    for column in ("RUNNING", "QUEUED", "KV IN USE", "CACHED", "BLOCKS"):
        table.add_column(column, justify="right")
    for worker in workers:
        groups = worker.get("blocks") or []
        total, free, cached = (sum(int(group.get(key, 0)) for group in groups) for key in ("total", "free", "cached"))
        table.add_row(
            _text(worker.get("worker")),
            _text(worker.get("role")),
            _state(worker),
            _text(worker.get("address")),
            _text(worker.get("pid")),
            _text(worker.get("running_requests")),
            _text(worker.get("queued_requests")),
            str(total - free - cached),
            str(cached),
            str(total),
        )
    return table


def _state(worker: Record) -> str:
    if worker.get("trouble"):
        return str(worker["trouble"])
    if not worker.get("is_registered", True):
        return "lapsed"
    return "up" if worker.get("is_connected", True) else "connecting"


def _list(values: object) -> str:
    return ", ".join(map(str, values)) if isinstance(values, list) and values else "–"


def _text(value: object) -> str:
    return "–" if value is None or value == "" else str(value)
