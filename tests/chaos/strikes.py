"""The fault matrix: target × kind × time, in a cluster of two workers of each role; a cell asks for every kind of
answer at once, and strikes a worker that has some of them in the phase that the cell names."""

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from tests.chaos.survivors import Client, check, wait_whole
from tests.integration.router.transcript import Transcript
from tools.running_cluster import Cluster
from tools.waiting import wait_for

WORKERS = 4
_NAP_S, _TRIES = 1.0, 20
_STRIKES = 4
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
    """The requests of the struck worker by their phase, and attempts after failures by cause."""

    worker: str
    phases: dict[str, int]
    reattempts: dict[str, int]
    clients: dict[str, Client]


def strike(cluster: Cluster, cell: Cell, bodies: Mapping[str, Mapping[str, Any]]) -> Struck:
    """Ask for everything, strike, and wait for all answers; a stopped worker is woken up after that."""
    wait_whole(cluster, WORKERS)
    pids, before = cluster.pids(), _reattempts(cluster)
    clients = {kind: Client(cluster, body) for kind, body in bodies.items()}
    hit: list[int] = []
    try:
        with ExitStack() as naps:
            worker, phases = _find(cluster, cell, bodies, pids, naps, hit)
            hit += _hit(pids[worker], cell.how)
            _signal(hit, signal.SIGKILL if cell.how.startswith("kill") else signal.SIGSTOP)
        for client in clients.values():
            client.transcript()
    finally:
        if cell.how.startswith("stop"):
            _signal(hit, signal.SIGCONT)
    reattempts = {cause: count - before[cause] for cause, count in _reattempts(cluster).items()}
    return Struck(worker, phases, {cause: count for cause, count in reattempts.items() if count}, clients)


def strike_until_hit(
    cluster: Cluster, cell: Cell, bodies: Mapping[str, Mapping[str, Any]], right: Mapping[str, Transcript]
) -> Struck:
    """Run `strike`, with all answers right each time, until it hit a request: the phase in which a worker was seen may
    be over before the signal comes."""
    for _ in range(_STRIKES):
        struck = strike(cluster, cell, bodies)
        check(struck.clients, right)
        if struck.reattempts:
            return struck
    raise AssertionError(f"nobody was hit in {_STRIKES} strikes: {cell}")


def _find(
    cluster: Cluster,
    cell: Cell,
    bodies: Mapping[str, Mapping[str, Any]],
    pids: Mapping[str, Sequence[int]],
    naps: ExitStack,
    hit: Sequence[int],
) -> tuple[str, dict[str, int]]:
    """A worker at the cell's moment, and its requests by phase.

    A transfer takes a millisecond. So that it lasts, the ranks of decode workers sleep for a while, far shorter than a
    lease, once a prompt is computed; they wake up with `naps`, but for those that are `hit` until then.
    """
    what = f"some request is at: {cell}"
    if cell.moment != "transfer":
        found: tuple[str, dict[str, int]] | None = wait_for(lambda: _victim(cluster, cell, bodies), 60, what)
        assert found is not None
        return found
    ranks = [pid for worker, (_, *ranks) in pids.items() if worker.startswith("decode") for pid in ranks]
    for _ in range(_TRIES):
        wait_for(lambda: _is_prefilling(cluster), 60, what)
        with ExitStack() as nap:
            nap.callback(lambda: _signal([pid for pid in ranks if pid not in hit], signal.SIGCONT))
            _signal(ranks, signal.SIGSTOP)
            began_s = time.monotonic()
            while time.monotonic() - began_s < _NAP_S:
                found = _victim(cluster, cell, bodies)
                if found:
                    naps.push(nap.pop_all())
                    return found
    raise AssertionError(f"never: {what}")


def _hit(pids: Sequence[int], how: str) -> Sequence[int]:
    """The host comes first in `pids`."""
    return {"all": pids, "host": pids[:1], "rank": pids[1:2]}[how.split()[1]]


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # its host ends a rank that stands still
            os.kill(pid, number)


def _is_prefilling(cluster: Cluster) -> bool:
    requests = cluster.admin("/admin/v1/requests")["requests"]
    return any(request["phase"] == "prefill" and request["decode"] for request in requests)


def _victim(cluster: Cluster, cell: Cell, bodies: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, int]] | None:
    """A worker at the cell's moment, and its requests by phase; None = not yet."""
    requests = cluster.admin("/admin/v1/requests")["requests"]
    workers = [w["worker"] for w in cluster.status()["workers"]]
    most = max(body["max_tokens"] for body in bodies.values())
    for worker in sorted(name for name in workers if name.startswith(cell.role)):
        mine = [request for request in requests if request[cell.role] == worker]
        if cell.moment == "prefill":
            is_due = any(not r["output_tokens"] and r["phase"] in ("queued", "prefill") for r in mine)
        elif cell.moment == "transfer":
            is_due = any(r["phase"] == "transfer" for r in mine)
        elif cell.moment == "decode":
            is_due = any(r["phase"] == "decode" and r["output_tokens"] > 3 for r in mine)
        else:
            is_due = any(r["output_tokens"] >= most * 0.8 for r in mine)
        if is_due:
            return worker, dict(Counter(r["phase"] for r in mine))
    return None


def _reattempts(cluster: Cluster) -> dict[str, int]:
    return {cause: int(cluster.metric("tandem_reattempts_total", cause=cause)) for cause in CAUSES}
