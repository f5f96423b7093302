"""One Helm for all tests of the chart."""

from collections.abc import Iterator

import pytest

from tests.integration.deploy.rendering import GOOD, Helm, Release


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    found = Helm()
    yield found
    found.close()


@pytest.fixture(params=GOOD, ids=lambda path: str(path.stem))
def release(request: pytest.FixtureRequest, helm: Helm) -> Release:
    """The chart with each of its own value files."""
    return helm.render(request.param.read_text())
