"""kill -9 and SIGSTOP of real worker processes with a spare of that role: no client notices. Answers by arithmetic."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import survivors
from tests.chaos.survivors import Client, check, in_flight, stopped, wait_whole
from tests.e2e.cluster import Cluster, kill, running, wait_for
from tests.integration.router.transcript import Transcript

CONFIG = """
[pools]
prefill = 2
decode = 2
[worker]
engine = "sim"
threads = 1
[worker.sim]
prefill_tokens_per_s = 1500.0
decode_step_s = 0.02
[router]
disaggregation = "always"
worker_wait_s = 30.0
"""
MAX_TOKENS, PROMPT_TOKENS = 60, 600


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Every answer has to cross, so that only a spare of the struck role can help."""
    path: Path = tmp_path_factory.mktemp("survival") / "cluster.toml"
    path.write_text(CONFIG)
    with running("--config", str(path)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def bodies(cluster: Cluster) -> dict[str, dict[str, Any]]:
    every = survivors.asks(MAX_TOKENS, PROMPT_TOKENS)
    greedy = survivors.undisturbed(cluster, {"greedy": every["greedy"]})["greedy"]
    return {**every, "stop": survivors.with_stop(every["greedy"], greedy)}


@pytest.fixture(scope="module")
def right(cluster: Cluster, bodies: dict[str, dict[str, Any]]) -> dict[str, Transcript]:
    return survivors.undisturbed(cluster, bodies)


@pytest.mark.parametrize("how", ["kill host", "kill rank", "stop"])
@pytest.mark.parametrize(
    ("worker", "phase"), [("prefill-0", "prefill"), ("decode-0", "prefill"), ("decode-0", "decode")]
)
def test_a_worker_is_struck(
    cluster: Cluster,
    bodies: dict[str, dict[str, Any]],
    right: dict[str, Transcript],
    worker: str,
    phase: str,
    how: str,
) -> None:
    wait_whole(cluster, 4)
    pids = cluster.pids()[worker]
    again = cluster.metric("tandem_reattempts_total")
    fresh = survivors.asks(MAX_TOKENS, PROMPT_TOKENS, salt=zlib.crc32(f"{worker} {phase} {how}".encode()) % 1000)
    clients = {kind: Client(cluster, body) for kind, body in bodies.items()}
    more = {kind: Client(cluster, body) for kind, body in fresh.items()}
    if phase == "prefill":
        wait_for(lambda: in_flight(cluster, worker) > 0, 30, "a prompt is being computed")
    else:
        wait_for(lambda: all(client.events > 5 for client in clients.values()), 60, "tokens flow")
    if how == "stop":
        with stopped(pids):
            check(clients, right)
            answers = {kind: client.transcript() for kind, client in more.items()}
    else:
        kill(pids[how == "kill rank"])
        check(clients, right)
        answers = {kind: client.transcript() for kind, client in more.items()}
    assert cluster.metric("tandem_reattempts_total") > again, "somebody was hit"
    wait_whole(cluster, 4)
    assert answers == survivors.undisturbed(cluster, fresh)


def test_the_only_other_one_dies_too(cluster: Cluster, bodies: dict[str, dict[str, Any]], right: Any) -> None:
    """Both decode workers, one after the other, while answers run: they wait for the first that comes back."""
    wait_whole(cluster, 4)
    pids = cluster.pids()
    clients = {kind: Client(cluster, body) for kind, body in bodies.items()}
    wait_for(lambda: all(client.events > 5 for client in clients.values()), 60, "tokens flow")
    kill(pids["decode-0"][0])
    kill(pids["decode-1"][0])
    check(clients, right)
