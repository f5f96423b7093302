"""`clusterctl kv audit` on a whole cluster: clean under load, and the worker that stands still is named."""

import json
import os
import signal
import threading
from typing import Any

from tools.running_cluster import Cluster, running
from tools.waiting import wait_for


def audit(cluster: Cluster, *flags: str) -> tuple[int, dict[str, Any]]:
    """(exit code, the audit)."""
    code, out, error = cluster.clusterctl("kv", "audit", "--json", *flags, by_endpoint=True)
    assert out, error
    return code, json.loads(out)


def test_the_audit_of_a_cluster() -> None:
    flags = ("--prefill", "1", "--decode", "1", "--disaggregation", "always", "--dtype", "float32")
    with running(*flags) as cluster:
        is_over = threading.Event()
        answers: list[int] = []

        def load(number: int) -> None:
            body = {"model": "tandem-tiny", "prompt": f"{number} " * 80, "max_tokens": 60, "temperature": 0}
            while not is_over.is_set():
                answers.append(cluster.post("/v1/completions", body)[0])

        threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                code, found = audit(cluster)
                assert (code, found["unexplained"], found["unanswered"]) == (0, [], [])
                assert {worker["role"] for worker in found["workers"]} == {"prefill", "decode"}
        finally:
            is_over.set()
            for thread in threads:
                thread.join(60)
        assert answers
        assert set(answers) == {200}

        decode = next(w for w in cluster.status()["workers"] if w["role"] == "decode")
        (rank,) = decode["rank_pids"]
        os.kill(rank, signal.SIGSTOP)
        code, found = audit(cluster, "--wait", "0")  # asked before its host ends it
        assert code == 1
        assert [missing["worker"] for missing in found["unanswered"]] == [decode["worker"]]
        before = [decode["pid"], rank]
        wait_for(lambda: cluster.pids().get(decode["worker"], before) != before, what="it was started again")
        wait_for(lambda: cluster.get("/readyz")[0] == 200, what="the worker is back")
        assert audit(cluster)[0] == 0
