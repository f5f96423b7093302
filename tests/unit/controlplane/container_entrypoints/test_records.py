"""A router and a worker of a pod start with the settings that `up` would have made of the same configuration."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.controlplane.container_entrypoints.records import (
    PodIdentity,
    WorkerPodRecord,
    check_worker,
    router_config,
    with_password,
    worker_config,
)
from tandem.core.config import ClusterConfig, ModelSection, RedisSection, RoleSection, RouterSection, WorkerSection
from tandem.core.errors import ConfigError, ModelError
from tandem.core.state_enums import RoleName

CONFIG = ClusterConfig(
    name="serving",
    redis=RedisSection(url="redis://store:6379/0"),
    router=RouterSection(host="0.0.0.0", port=8000),
    worker=WorkerSection(engine="sim"),
)
SEAT = WorkerPodRecord(pool="decode", role=RoleName.DECODE, host="10.1.2.3", cpus=6)


@pytest.fixture
def pod(tmp_path: Path) -> PodIdentity:
    return PodIdentity(name="pod-a", folder=tmp_path, secret_file=tmp_path / "secret", redis_password="p/w@rd")


def test_a_worker_is_its_pod(pod: PodIdentity) -> None:
    found = worker_config(CONFIG, pod, replace(SEAT, revision="r7"))
    assert (found.cluster, found.worker_id, found.pool, found.role) == ("serving", "pod-a", "decode", "decode")
    assert (found.host, found.port, found.revision) == ("10.1.2.3", 7000, "r7")
    assert (found.model, found.commit, Path(found.runtime_dir)) == ("tandem-tiny", "", pod.folder)
    assert found.redis_url == "redis://:p%2Fw%40rd@store:6379/0"


def test_cores_are_shared_by_the_ranks_of_this_worker_alone() -> None:
    config = replace(CONFIG, worker=WorkerSection(engine="sim", tp=2), decode=RoleSection(tp=4))
    assert check_worker(config, SEAT).threads == 1
    assert check_worker(config, replace(SEAT, role=RoleName.PREFILL)).threads == 3
    assert check_worker(replace(CONFIG, worker=WorkerSection(threads=5)), SEAT).threads == 5


def test_a_router_knows_the_model_without_its_weights(pod: PodIdentity) -> None:
    config = replace(CONFIG, worker=WorkerSection(), model=ModelSection(served_names=("tiny",)))
    found = router_config(config, pod, pod.folder / "admin.key")
    assert (found.router_id, found.settings.grpc_port, found.settings.admin_port) == ("pod-a", 8001, 8002)
    assert [model.served_names for model in found.models] == [("tiny",)]
    assert Path(found.ready_file).parent == pod.folder


def test_a_model_that_is_not_there_is_named(pod: PodIdentity) -> None:
    config = replace(CONFIG, model=ModelSection(path="/models/absent"))
    with pytest.raises(ModelError, match="/models/absent"):
        worker_config(config, pod, SEAT)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (replace(CONFIG, redis=RedisSection()), "redis.url is empty"),
        (replace(CONFIG, worker=WorkerSection(chunk_tokens=0)), "worker.chunk_tokens is 0"),
        (replace(CONFIG, worker=WorkerSection(transport="pigeon")), "--transport is 'pigeon'"),
    ],
)
def test_what_nobody_could_be_started_with_is_named(config: ClusterConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_worker(config, SEAT)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://store:6379/0", "redis://:s%20%3A%40@store:6379/0"),
        ("rediss://me@store:6380/2?ssl_ca_certs=/ca.crt", "rediss://me:s%20%3A%40@store:6380/2?ssl_ca_certs=/ca.crt"),
    ],
)
def test_the_password_is_put_into_the_url(url: str, expected: str) -> None:
    assert with_password(url, "s :@") == expected
    assert with_password(url, "") == url


def test_two_passwords_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="two passwords"):
        with_password("redis://:one@store:6379/0", "two")
