"""Running houses for the tests of the router."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.core.config import StoreSection
from tandem.prefixindex.private_redis import PrivateRedis
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


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateRedis]:
    """A real server."""
    with PrivateRedis.start(tmp_path_factory.mktemp("redis"), "a secret") as server:
        yield server


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory, redis: PrivateRedis) -> Iterator[House]:
    """A house with one pair with which clients can leave responses, files and batches."""
    store = StoreSection(dir=str(tmp_path_factory.mktemp("files")), max_file_bytes=1_000_000, max_batch_requests=200)
    with builder(tmp_path_factory.mktemp("router")) as make:
        house = make(redis_url=redis.url, store=store)
        house.wait_ready()
        yield house
