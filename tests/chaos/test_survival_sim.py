"""kill -9 and SIGSTOP of real worker processes with a spare of that role: no client notices. Answers by arithmetic.

The rest of the matrix, and the model: `make proof NAME=survival`.
"""

import pytest

from tests.chaos import strikes
from tests.chaos.strikes import Cell, strike, strike_until_hit
from tests.chaos.survivors import Client, asked_calmly, check, wait_whole
from tests.cluster_fixture import cluster_fixture
from tools.running_cluster import Cluster, kill
from tools.waiting import wait_for

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
CALM = """
[pools]
mixed = 1
[worker]
engine = "sim"
threads = 1
"""
CELLS = [
    Cell("prefill", "prefill", "kill host"), Cell("prefill", "transfer", "kill rank"),
    Cell("prefill", "prefill", "stop all"), Cell("prefill", "decode", "kill host"),
    Cell("decode", "prefill", "kill rank"), Cell("decode", "transfer", "kill host"),
    Cell("decode", "decode", "kill host"), Cell("decode", "decode", "stop rank"),
    Cell("decode", "end", "stop all"),
]  # fmt: skip
MAX_TOKENS, PROMPT_TOKENS = 60, 600


cluster = cluster_fixture(config=CONFIG)
"""Every answer has to cross, so that only a spare of the struck role can help."""


calm = cluster_fixture(config=CALM)
"""One worker that is not disturbed: its answers are right."""


@pytest.mark.drawn(5)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_worker_is_struck(cluster: Cluster, calm: Cluster, cell: Cell) -> None:
    bodies, right = asked_calmly(calm, MAX_TOKENS, PROMPT_TOKENS, salt=strikes.CELLS.index(cell))
    if (cell.role, cell.moment) == ("prefill", "decode"):  # its request is over there, so the strike hits none
        check(strike(cluster, cell, bodies).clients, right)
    else:
        strike_until_hit(cluster, cell, bodies, right)


def test_the_only_other_one_dies_too(cluster: Cluster, calm: Cluster) -> None:
    """Both decode workers, one after the other, while answers run: they wait for the first that comes back."""
    bodies, right = asked_calmly(calm, MAX_TOKENS, PROMPT_TOKENS, salt=99)
    wait_whole(cluster, strikes.WORKERS)
    pids = cluster.pids()
    clients = {kind: Client(cluster, body) for kind, body in bodies.items()}
    streams = [clients[kind] for kind, body in bodies.items() if body.get("stream")]
    wait_for(lambda: all(client.events > 5 for client in streams), 60, "tokens flow")
    kill(pids["decode-0"][0])
    kill(pids["decode-1"][0])
    check(clients, right)
