"""kill -9 of real worker processes that compute the bundled model in deterministic fp32: no client notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.strikes import Cell, strike_until_hit
from tests.chaos.survivors import asked_calmly
from tools.running_cluster import Cluster, running

MAX_TOKENS, PROMPT_TOKENS = 40, 300
EXACT = ("--threads", "1", "--deterministic", "--dtype", "float32")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running("--prefill", "2", "--decode", "2", "--disaggregation", "always", *EXACT) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def calm() -> Iterator[Cluster]:
    """One worker that is not disturbed: its answers are right."""
    with running("--mixed", "1", *EXACT) as cluster:
        yield cluster


@pytest.mark.drawn(1)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_killed(cluster: Cluster, calm: Cluster, role: str) -> None:
    bodies, right = asked_calmly(calm, MAX_TOKENS, PROMPT_TOKENS, salt=len(role))
    strike_until_hit(cluster, Cell(role, role, "kill host"), bodies, right)
