"""kill -9 of Redis: running answers end as usual, new ones are served, and all parts recover."""

from __future__ import annotations

import psutil

from tests.chaos.survivors import Client, is_serving, long_answer
from tools.running_cluster import is_alive, kill, running
from tools.waiting import wait_for


def test_redis_dies() -> None:
    with running("--prefill", "1", "--decode", "1", "--disaggregation", "always", "--threads", "1") as cluster:
        before = {w["worker"]: w["incarnation"] for w in cluster.status()["workers"]}
        (redis,) = [c.pid for c in psutil.Process(cluster.process.pid).children() if "redis" in c.name()]
        streams = [Client(cluster, long_answer(100, 400)) for _ in range(3)]
        wait_for(lambda: all(s.events > 3 for s in streams), 30, "tokens flow")
        kill(redis)
        wait_for(lambda: not is_alive(redis), what="Redis is gone")
        assert is_serving(cluster)
        for stream in streams:
            got = stream.transcript()
            assert (got.dones, got.errors) == (1, [])
        wait_for(lambda: _is_registered(cluster.status()), what="every worker is in the registry again")
        assert is_serving(cluster)
        assert {w["worker"]: w["incarnation"] for w in cluster.status()["workers"]} == before


def _is_registered(status: dict[str, object]) -> bool:
    workers = status["workers"]
    assert isinstance(workers, list)
    return len(workers) == 2 and not status["registry_trouble"] and all(w["is_registered"] for w in workers)
