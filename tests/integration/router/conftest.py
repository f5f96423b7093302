"""Running houses for the tests of the router."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.router.house import Build, House, builder


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """build(prefill=1, decode=1, mixed=0, mode=…, **settings): a running house, stopped at the end of the test."""
    with builder(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A house with one pair, for tests that leave it as they found it."""
    with builder(tmp_path_factory.mktemp("router")) as make:
        house = make()
        house.wait_ready()
        yield house
