"""kill -9 of real worker processes that compute the bundled model in deterministic fp32: no client notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos import survivors
from tests.chaos.survivors import Client, check, in_flight, wait_whole
from tests.e2e.cluster import Cluster, kill, running, wait_for

MAX_TOKENS, PROMPT_TOKENS = 40, 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = ("--prefill", "2", "--decode", "2", "--disaggregation", "always", "--threads", "1")
    with running(*flags, "--deterministic", "--dtype", "float32") as cluster:
        yield cluster


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_killed(cluster: Cluster, role: str) -> None:
    """Whoever got a request of that role first. What is right is asked for afterwards: nothing is known beforehand."""
    wait_whole(cluster, 4)
    pids = cluster.pids()
    bodies = survivors.asks(MAX_TOKENS, PROMPT_TOKENS, salt=len(role))
    again = cluster.metric("tandem_reattempts_total")
    clients = {kind: Client(cluster, body) for kind, body in bodies.items()}

    def busy() -> str:
        return next((worker for worker in pids if worker.startswith(role) and in_flight(cluster, worker)), "")

    if role == "decode":
        wait_for(lambda: all(client.events > 3 for client in clients.values()), 60, "tokens flow")
    kill(pids[wait_for(busy, 30, "a worker has a request")][0])
    for client in clients.values():
        client.transcript()
    assert cluster.metric("tandem_reattempts_total") > again, "somebody was hit"
    wait_whole(cluster, 4)
    check(clients, survivors.undisturbed(cluster, bodies))
