"""kill -9 of any process of a worker without a spare: clients get an error, nothing hangs, it comes back and serves."""

import os
import signal
import time

import pytest

from tandem.core.lease_timing import LEASE_S
from tests.chaos.survivors import HEAR_OF_IT_S, Client, is_serving, long_answer
from tests.cluster_fixture import cluster_fixture
from tools.running_cluster import Cluster, is_alive, is_free, kill
from tools.waiting import wait_for

REST_ENDS_S = 20.0
"""The kernel ends it at once; what takes time is to give its memory back, on a loaded machine some seconds."""


cluster = cluster_fixture(
    "--prefill",
    "1",
    "--decode",
    "1",
    "--disaggregation",
    "always",
    "--threads",
    "1",
    config="[router]\nworker_wait_s = 0\n",
)
"""No request waits for a lost worker, so that clients get its error."""


@pytest.mark.drawn(2)
@pytest.mark.parametrize("part", [0, 1], ids=["host", "rank"])
@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
def test_kill_while_a_request_is_there(cluster: Cluster, worker: str, part: int) -> None:
    wait_for(lambda: is_serving(cluster), 60, "the cluster serves")
    router_pid = cluster.status()["router"]["pid"]
    pids = cluster.pids()[worker]
    streams = [Client(cluster, long_answer(100, 3000 if worker == "decode-0" else 300)) for _ in range(3)]
    if worker == "decode-0":
        wait_for(lambda: all(s.events > 3 for s in streams), 30, "tokens flow")
    else:
        streams += [Client(cluster, long_answer(3000 + k, 50)) for k in range(3)]
        wait_for(lambda: _in_flight(cluster, worker) > 0, 30, "a prompt is being computed")
    killed_s = time.monotonic()
    kill(pids[part])
    wait_for(lambda: not any(is_alive(pid) for pid in pids), REST_ENDS_S, "the rest of the worker is gone")
    affected = streams if worker == "decode-0" else streams[3:]
    for stream in affected:
        stream.join(HEAR_OF_IT_S + 1)
        assert not stream.is_alive()
    heard = [stream.transcript() for stream in affected]
    for stream, got in zip(affected, heard, strict=True):
        assert got.dones or (got.errors and stream.ended_s - killed_s < HEAR_OF_IT_S)
    if worker == "decode-0":
        assert all(got.errors and not got.dones for got in heard)
        assert {error["code"] for got in heard for error in got.errors} == {"worker_lost"}
    else:
        assert any(got.errors for got in heard)
    wait_for(lambda: is_serving(cluster), 60, "the restarted worker serves")
    assert cluster.status()["router"]["pid"] == router_pid
    assert cluster.pids()[worker] != pids
    for stream in streams:
        stream.join(60)
        assert not stream.is_alive()
    wait_for(lambda: is_free(cluster, workers=2), what="nothing in flight, nothing held")


@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
def test_a_worker_that_is_stopped_and_wakes_up(cluster: Cluster, worker: str) -> None:
    """SIGSTOP of all of it: clients get an error; after SIGCONT it has a new incarnation, and serves."""
    wait_for(lambda: is_serving(cluster), 60, "the cluster serves")
    wait_for(lambda: is_free(cluster, workers=2), what="nothing in flight")
    before = {w["worker"]: w["incarnation"] for w in cluster.status()["workers"]}
    pids = cluster.pids()[worker]
    streams = [Client(cluster, long_answer(100, 3000)) for _ in range(3)] if worker == "decode-0" else []
    if streams:
        wait_for(lambda: all(s.events > 3 for s in streams), 30, "tokens flow")
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        if not streams:
            streams = [Client(cluster, long_answer(200, 20))]
        for stream in streams:
            stream.join(HEAR_OF_IT_S + 5)
            assert not stream.is_alive()
            (error,) = stream.transcript().errors
            print(f"heard of it after {stream.ended_s - stopped_s:.1f} s: {error['code']}")
        wait_for(lambda: time.monotonic() - stopped_s > LEASE_S + 0.5, 10, "its lease lapsed by any clock")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: is_serving(cluster), 60, "the worker that woke up serves")
    after = {w["worker"]: w["incarnation"] for w in cluster.status()["workers"]}
    assert cluster.pids()[worker] == pids
    assert after[worker] != before[worker]
    wait_for(lambda: is_free(cluster, workers=2), what="nothing in flight, nothing held")


def _in_flight(cluster: Cluster, worker: str) -> int:
    return sum(w["in_flight"] for w in cluster.status()["workers"] if w["worker"] == worker)
