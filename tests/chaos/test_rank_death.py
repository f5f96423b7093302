"""kill -9 and SIGSTOP of one tensor-parallel rank: the worker ends whole with the reason, comes back, and serves."""

import os
import signal
import time

import pytest

from tandem.core.lease_timing import LEASE_S
from tests.chaos.survivors import HEAR_OF_IT_S, Client, is_serving, long_answer
from tests.cluster_fixture import cluster_fixture
from tools.running_cluster import Cluster, is_alive, is_free
from tools.waiting import wait_for

WORKER_ENDS_S = 20.0
"""A loaded machine takes some seconds to end three processes; how long it takes by itself is printed."""


cluster = cluster_fixture(
    "--prefill",
    "1",
    "--decode",
    "1",
    "--disaggregation",
    "always",
    "--threads",
    "1",
    "--tp",
    "2",
    config="[router]\nworker_wait_s = 0\n",
)
"""No request waits for a lost worker, so that clients get its error."""


@pytest.mark.drawn(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
def test_the_second_rank_is_lost(cluster: Cluster, worker: str, number: signal.Signals) -> None:
    wait_for(lambda: is_serving(cluster), 60, "the cluster serves")
    pids = cluster.pids()[worker]
    assert len(pids) == 3, "a host and two ranks"
    output = len(cluster.output)
    streams = [Client(cluster, long_answer(100, 3000)) for _ in range(2)] if worker == "decode-0" else []
    wait_for(lambda: all(s.events > 3 for s in streams), 30, "tokens flow")
    struck_s = time.monotonic()
    os.kill(pids[2], number)
    wait_for(lambda: not any(is_alive(pid) for pid in pids), WORKER_ENDS_S, "host and ranks are gone")
    print(f"{worker}: all of it gone {time.monotonic() - struck_s:.2f} s after {number.name}")
    for stream in streams:
        stream.join(HEAR_OF_IT_S + 5)
        assert not stream.is_alive()
        assert stream.transcript().errors
    wait_for(lambda: is_serving(cluster), 60, "the restarted worker serves")
    after = cluster.pids()[worker]
    assert len(after) == 3
    assert not set(after) & set(pids)
    reason = "rank 1 was killed by signal 9" if number is signal.SIGKILL else "rank 1 has stopped"
    assert reason in cluster.output[output:]
    wait_for(lambda: is_free(cluster, workers=2), what="nothing in flight, nothing held")


def test_a_group_that_is_stopped_whole_and_wakes_up(cluster: Cluster) -> None:
    """Host and ranks together, as when a machine is suspended: no rank counts as lost, but the lease lapsed."""
    wait_for(lambda: is_serving(cluster), 60, "the cluster serves")
    before = {w["worker"]: w["incarnation"] for w in cluster.status()["workers"]}
    pids = cluster.pids()["decode-0"]
    stream = Client(cluster, long_answer(100, 3000))
    wait_for(lambda: stream.events > 3, 30, "tokens flow")
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        wait_for(lambda: time.monotonic() - stopped_s > LEASE_S + 1.5, 10, "its lease lapsed by any clock")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    stream.join(HEAR_OF_IT_S + 5)
    assert stream.transcript().errors
    wait_for(lambda: is_serving(cluster), 60, "the worker that woke up serves")
    after = {w["worker"]: w["incarnation"] for w in cluster.status()["workers"]}
    assert cluster.pids()["decode-0"] == pids
    assert after["decode-0"] != before["decode-0"]
    wait_for(lambda: is_free(cluster, workers=2), what="nothing in flight, nothing held")
