"""kill -9 of real worker processes that compute the bundled model in deterministic fp32: no client notices."""

import pytest

from tests.chaos.strikes import Cell, strike_until_hit
from tests.chaos.survivors import asked_calmly
from tests.cluster_fixture import cluster_fixture
from tools.running_cluster import Cluster

MAX_TOKENS, PROMPT_TOKENS = 40, 300
EXACT = ("--threads", "1", "--deterministic", "--dtype", "float32")


cluster = cluster_fixture("--prefill", "2", "--decode", "2", "--disaggregation", "always", *EXACT)


calm = cluster_fixture("--mixed", "1", *EXACT)
"""One worker that is not disturbed: its answers are right."""


@pytest.mark.drawn(1)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_killed(cluster: Cluster, calm: Cluster, role: str) -> None:
    bodies, right = asked_calmly(calm, MAX_TOKENS, PROMPT_TOKENS, salt=len(role))
    strike_until_hit(cluster, Cell(role, role, "kill host"), bodies, right)
