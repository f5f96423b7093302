"""The fault matrix: who is struck × how × when, in a cluster of two workers of each role; a cell asks for every kind of
answer at once, and strikes a worker that has some of them in the phase that the cell names."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tests.chaos.survivors import Client, wait_whole
from tests.e2e.cluster import Cluster, wait_for

WORKERS = 4
CAUSES = ("lost", "transfer", "refused", "broken", "stalled")
HOWS = ("kill host", "kill rank", "stop all", "stop host", "stop rank")
MOMENTS = {
    "prefill": ("prefill", "transfer", "decode"),
    "decode": ("prefill", "transfer", "decode", "end"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """`role`: of the worker that is struck. `moment`: what goes on there with some request."""

    role: str
    moment: str
    how: str

    def __str__(self) -> str:
        return f"{self.role} worker, {self.how}, {self.moment}"


CELLS = [Cell(role, moment, how) for role, moments in MOMENTS.items() for moment in moments for how in HOWS]


@dataclass(slots=True)
class Struck:
    """What was hit: the requests of the worker by their phase, and attempts after failures by cause."""

    worker: str
    phases: dict[str, int]
    reattempts: dict[str, int]
    clients: dict[str, Client]


def strike(cluster: Cluster, cell: Cell, bodies: Mapping[str, Mapping[str, Any]]) -> Struck:
    """Ask for everything, strike, and wait for all answers; who was stopped is woken up after that."""
    wait_whole(cluster, WORKERS)
    pids, before = cluster.pids(), _reattempts(cluster)
    clients = {kind: Client(cluster, body) for kind, body in bodies.items()}
    worker, phases = wait_for(lambda: _victim(cluster, cell, bodies), 60, f"some request is at: {cell}")
    with _struck(pids[worker], cell.how):
        for client in clients.values():
            client.transcript()
    reattempts = {cause: count - before[cause] for cause, count in _reattempts(cluster).items()}
    return Struck(worker, phases, {cause: count for cause, count in reattempts.items() if count}, clients)


@contextmanager
def _struck(pids: Sequence[int], how: str) -> Iterator[None]:
    """The host comes first in `pids`."""
    verb, whom = how.split()
    hit = {"all": pids, "host": pids[:1], "rank": pids[1:2]}[whom]
    for pid in hit:
        os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
    try:
        yield
    finally:
        if verb == "stop":
            for pid in hit:
                with suppress(ProcessLookupError):  # its host ends a rank that stands still
                    os.kill(pid, signal.SIGCONT)


def _victim(cluster: Cluster, cell: Cell, bodies: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, int]] | None:
    """A worker at the cell's moment, and its requests by phase; None = not yet."""
    requests = cluster.admin("/admin/v1/requests")["requests"]
    blocks = {w["worker"]: w.get("blocks", ()) for w in cluster.status()["workers"]}
    most = max(body["max_tokens"] for body in bodies.values())
    for worker in sorted(name for name in blocks if name.startswith(cell.role)):
        mine = [request for request in requests if request[cell.role] == worker]
        if cell.moment == "prefill":
            is_due = any(not r["output_tokens"] and r["phase"] in ("queued", "prefill") for r in mine)
        elif cell.moment == "transfer":
            kind = "pushing" if cell.role == "prefill" else "reserved"
            is_due = bool(mine) and any(group[kind] for group in blocks[worker])
        elif cell.moment == "decode":
            is_due = any(r["phase"] == "decode" and r["output_tokens"] > 3 for r in mine)
        else:
            is_due = any(r["output_tokens"] >= most * 0.8 for r in mine)
        if is_due:
            return worker, dict(Counter(r["phase"] for r in mine))
    return None


def _reattempts(cluster: Cluster) -> dict[str, int]:
    return {cause: int(cluster.metric("tandem_reattempts_total", cause=cause)) for cause in CAUSES}
