"""A worker that hangs for good: events report it, it is started anew, and the planner goes on planning."""

import json
import os
import signal

from tests.e2e.under_load import SETTINGS
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, is_alive, running
from tools.waiting import wait_for

PATIENCE_S = 60.0
PLANNER = """
[planner]
mode = "advise"
interval_s = 0.5
"""


def told(cluster: Cluster, worker: str) -> list[str]:
    """Kinds of all events of a worker, oldest first."""
    code, out, error = cluster.clusterctl("events", "--last", "500", "-o", "json")
    assert code == 0, error
    return [row["event"] for row in map(json.loads, out.splitlines()) if row["subject"] == worker]


def unsettled(cluster: Cluster) -> str | None:
    """Return the reason why the planner waits; None before its first report."""
    word = cluster.admin("/admin/v1/plan")["plan"]
    return None if word is None else str(word["unsettled"])


def test_a_stopped_worker_is_told_of_killed_and_started_anew() -> None:
    with running("--model", str(MODEL), config="replace_silent_s = 1.0\n" + SETTINGS + PLANNER) as cluster:
        wait_for(lambda: unsettled(cluster) == "", PATIENCE_S, "the planner sees all workers")
        first = cluster.pids()
        for pid in first["decode-0"]:
            os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: unsettled(cluster) == "decode-0 is not there yet", PATIENCE_S, "the planner misses it")
        wait_for(lambda: not any(map(is_alive, first["decode-0"])), PATIENCE_S, "it was killed")
        hung = first["decode-0"]
        wait_for(lambda: cluster.pids().get("decode-0", hung) != hung, PATIENCE_S, "it is back")
        assert cluster.pids()["prefill-0"] == first["prefill-0"]
        wait_for(lambda: unsettled(cluster) == "", PATIENCE_S, "the planner sees all workers again")
        kinds = told(cluster, "decode-0")
        assert kinds[-6:] == ["silent", "stopping", "exited", "restart_planned", "started", "ready"], kinds
        cluster.complete("a b c", 4)
