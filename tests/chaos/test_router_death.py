"""kill -9 of the router while answers run in every phase: nothing is left of them on any worker, clients come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import survivors
from tests.chaos.survivors import Client, check, wait_whole
from tools.running_cluster import Cluster, kill, running
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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    path = tmp_path / "cluster.toml"
    path.write_text(CONFIG)
    with running("--config", str(path)) as cluster:
        yield cluster


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
