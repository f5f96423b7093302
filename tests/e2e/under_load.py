"""A cluster that is changed while clients keep asking: load with known right answers, and `clusterctl`."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tests.chaos.survivors import Bodies, Client, check, undisturbed
from tests.integration.router.transcript import Transcript
from tests.unit.clusterctl.document_check import checked
from tools.running_cluster import Cluster, is_alive, is_free
from tools.waiting import wait_for

SETTINGS = """
[pools]
prefill = 1
decode = 1
[worker]
engine = "sim"
threads = 1
kv_memory_bytes = 33554432
[worker.sim]
prefill_tokens_per_s = 4000.0
decode_step_s = 0.01
"""
_PATIENCE_S = 60.0


class ConstantLoad:
    """So many clients ask all the time, each one request after another, until the block ends.

    `failures` names every answer that is not the undisturbed one to the token.
    """

    def __init__(self, cluster: Cluster, bodies: Bodies, lanes: int = 3) -> None:
        self._cluster, self.bodies = cluster, bodies
        self._right: Mapping[str, Transcript] = undisturbed(cluster, bodies)
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.answers = 0
        self._counting = threading.Lock()
        self._lanes = [threading.Thread(target=self._ask, args=(lane,), daemon=True) for lane in range(lanes)]

    def __enter__(self) -> ConstantLoad:
        for lane in self._lanes:
            lane.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for lane in self._lanes:
            lane.join()

    def wait_more(self, answers: int) -> None:
        """Wait until so many more requests were answered."""
        goal = self.answers + answers
        wait_for(lambda: self.answers >= goal or self.failures, _PATIENCE_S, f"{answers} more answers")

    def _ask(self, lane: int) -> None:
        for kind in itertools.islice(itertools.cycle(self.bodies), lane, None):
            if self._stop.is_set():
                return
            try:
                check({kind: Client(self._cluster, self.bodies[kind])}, self._right)
            except AssertionError as error:
                self.failures.append(f"{kind}: {error}"[:2000])
            with self._counting:
                self.answers += 1


def changed(cluster: Cluster, *arguments: str) -> dict[str, Any]:
    """Run a command that changes the cluster and waits for it; return its document, which fits the schema of a
    Change."""
    code, out, error = cluster.clusterctl(*arguments, "--yes", "-o", "json")
    assert code == 0, (arguments, code, error, cluster.logs())
    return checked(out, "Change")


def roles(cluster: Cluster) -> Counter[str]:
    """Registered workers by role."""
    return Counter(row["role"] for row in cluster.status()["workers"] if row["is_registered"] and "role" in row)


def wait_ended(pids: Mapping[str, list[int]], stayed: Mapping[str, list[int]]) -> None:
    """No process of a worker that left is there any more."""
    kept = {pid for group in stayed.values() for pid in group}
    gone = [pid for group in pids.values() for pid in group if pid not in kept]
    wait_for(lambda: not any(map(is_alive, gone)), _PATIENCE_S, "nobody who left is still there")


def wait_balanced(cluster: Cluster, workers: int) -> None:
    """Nothing is in flight and every ledger agrees."""
    wait_for(lambda: is_free(cluster, workers), _PATIENCE_S, "everything is free")
