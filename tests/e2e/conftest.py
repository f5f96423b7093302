"""One disaggregated cluster for all end-to-end tests that only read from it."""

from collections.abc import Iterator

import pytest

from tools.running_cluster import Cluster, running


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with running("--prefill", "1", "--decode", "1", "--disaggregation", "always", "--dtype", "float32") as cluster:
        yield cluster
