"""`clusterctl up --launcher ray`: the same answers as ever from workers that Ray placed; a dead one is replaced."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from tokenizers import Tokenizer

from tandem.engine.sim.arithmetic import expected_tokens
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, is_alive, running
from tools.waiting import wait_for

PROMPT = [(7 * k) % 3000 + 600 for k in range(150)]
ORACLE = expected_tokens(PROMPT, 30, 4096, eos_token_ids=(1,))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Run a cluster; after its stop, no process that was ever below it may run."""
    flags = ("--launcher", "ray", "--ray-port", "0", "--ray-cpus", "4", "--engine", "sim", "--threads", "1")
    with running(*flags, "--disaggregation", "always", "--model", str(MODEL)) as cluster:
        yield cluster
        seen = {child.pid for child in psutil.Process(cluster.process.pid).children(recursive=True)}
        assert len(seen) > 10
    wait_for(lambda: not [pid for pid in seen if is_alive(pid)])


def _ask(cluster: Cluster) -> None:
    answer = cluster.complete(PROMPT, 30)
    assert answer["choices"][0]["text"] == Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(ORACLE)


def test_the_answer_is_exact_and_its_kv_crossed(cluster: Cluster) -> None:
    _ask(cluster)
    wait_for(
        lambda: cluster.metric("tandem_kv_transfer_blocks_total", direction="received") > 0
    )  # the report comes in a while
    assert "prefill-0   it has a place on " in cluster.output


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_a_worker_that_is_killed_is_placed_anew_and_leaves_nothing(cluster: Cluster, worker: str) -> None:
    wait_for(lambda: len(cluster.pids()) == 2)
    before = cluster.pids()[worker]
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: cluster.pids().get(worker, before)[0] != before[0])
    wait_for(lambda: not [pid for pid in before if is_alive(pid)])
    wait_for(lambda: cluster.get("/readyz")[0] == 200)
    _ask(cluster)
