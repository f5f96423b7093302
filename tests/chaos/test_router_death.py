"""Test kill -9 of the router, and of Redis."""

import psutil

from tests.chaos import survivors
from tests.chaos.survivors import Client, check, is_serving, long_answer, wait_whole
from tests.cluster_fixture import cluster_fixture
from tools.running_cluster import Cluster, is_alive, kill, running
from tools.waiting import wait_for

CONFIG = """
[pools]
prefill = 1
decode = 2
[worker]
engine = "sim"
threads = 1
[worker.sim]
prefill_tokens_per_s = 1500.0
decode_step_s = 0.02
[router]
disaggregation = "always"
"""
WORKERS = 3


cluster = cluster_fixture(config=CONFIG)


def test_the_router_is_killed(cluster: Cluster) -> None:
    wait_whole(cluster, WORKERS)
    before = {w["worker"]: w["incarnation"] for w in cluster.status()["workers"]}
    bodies = survivors.asks(max_tokens=400, prompt_tokens=500)
    clients = {kind: Client(cluster, body) for kind, body in bodies.items()}

    def phases() -> set[str]:
        return {request["phase"] for request in cluster.admin("/admin/v1/requests")["requests"]}

    wait_for(lambda: {"prefill", "decode"} <= phases(), 30, "some compute their prompt, some their answer")
    kill(cluster.status()["router"]["pid"])
    for kind, client in clients.items():
        transcript = client.transcript()
        assert transcript.dones == 0, kind
    wait_for(lambda: _is_back(cluster), 60, "another router answers")
    wait_whole(cluster, WORKERS)
    assert {w["worker"]: w["incarnation"] for w in cluster.status()["workers"]} == before
    again = survivors.asks(max_tokens=20, prompt_tokens=500)
    check({kind: Client(cluster, body) for kind, body in again.items()}, survivors.undisturbed(cluster, again))


def _is_back(cluster: Cluster) -> bool:
    try:
        return cluster.get("/readyz")[0] == 200 and bool(cluster.status()["workers"])
    except OSError:
        return False


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
