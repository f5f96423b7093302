"""A fixture for the one cluster of a test module."""

from collections.abc import Callable, Iterator

import pytest

from tools.running_cluster import Cluster, running


def cluster_fixture(*flags: str, config: str = "") -> Callable[[], Iterator[Cluster]]:
    """Return a fixture of the module's scope: `clusterctl up` with these flags, and this TOML as its configuration."""

    def cluster() -> Iterator[Cluster]:
        with running(*flags, config=config) as found:
            yield found

    return pytest.fixture(scope="module")(cluster)
