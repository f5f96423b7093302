"""Defaults are filled in and mistakes found before any process runs."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tandem.cluster.bundled import bundled_model
from tandem.cluster.environment import Environment
from tandem.cluster.resolve import check_ports, resolve, resolve_ports
from tandem.core.config import (
    ClusterConfig,
    Disaggregation,
    ModelSection,
    PoolSection,
    RedisSection,
    RouterSection,
    WorkerSection,
)
from tandem.core.errors import ConfigError, ModelError, StartupError

ENVIRONMENT = Environment(state_root=Path("/none"), socket_root=Path("/tmp"), cores=8, variables={"A": "b"})


def _counts(config: ClusterConfig) -> dict[str, int]:
    return {pool.name: pool.count for pool in resolve(config, ENVIRONMENT).pools}


def test_defaults_are_the_bundled_model_and_one_pair() -> None:
    resolved = resolve(ClusterConfig(), ENVIRONMENT)
    assert resolved.model.path == bundled_model()
    assert resolved.served_names == ("tandem-tiny",)
    assert _counts(ClusterConfig()) == {"prefill": 1, "decode": 1}
    assert resolved.worker.threads == 4
    assert (resolved.router.port, resolved.router.grpc_port, resolved.router.admin_port) == (8000, 8001, 8002)


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (3, 2), (8, 1), (20, 1)])
def test_cores_are_shared(workers: int, threads: int) -> None:
    resolved = resolve(ClusterConfig(pools=PoolSection(mixed=workers)), ENVIRONMENT)
    assert resolved.worker.threads == threads
    variables = ENVIRONMENT.for_child(threads=resolved.worker.threads)
    assert variables["OMP_NUM_THREADS"] == str(threads)
    assert (variables["OMP_WAIT_POLICY"], variables["A"]) == ("passive", "b")


def test_given_counts_and_threads_stand() -> None:
    config = ClusterConfig(pools=PoolSection(mixed=2), worker=WorkerSection(threads=5))
    assert _counts(config) == {"mixed": 2}
    assert resolve(config, ENVIRONMENT).worker.threads == 5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0, -1, -1), (0, 0, 0)),
        ((9000, -1, -1), (9000, 9001, 9002)),
        ((9000, 0, -1), (9000, 0, 0)),
        ((5, 7, 9), (5, 7, 9)),
    ],
)
def test_ports_follow_each_other(given: tuple[int, int, int], expected: tuple[int, int, int]) -> None:
    section = resolve_ports(RouterSection(port=given[0], grpc_port=given[1], admin_port=given[2]))
    assert (section.port, section.grpc_port, section.admin_port) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ClusterConfig(pools=PoolSection(prefill=1)), "1 prefill and 0 decode workers cannot serve"),
        (ClusterConfig(pools=PoolSection(prefill=-1)), "--prefill is -1"),
        (ClusterConfig(router=RouterSection(port=70000)), "--port is 70000"),
        (ClusterConfig(router=RouterSection(port=5, grpc_port=5)), "ports are the same"),
        (ClusterConfig(router=RouterSection(host="0.0.0.0")), "no keys yet"),
        (ClusterConfig(router=RouterSection(host="example.org")), "no keys yet"),
        (ClusterConfig(model=ModelSection(dtype="int3")), "--dtype is 'int3'.*bfloat16"),
        (ClusterConfig(model=ModelSection(max_model_len=-1)), "--max-model-len is -1"),
        (ClusterConfig(worker=WorkerSection(device="tpu")), "--device is 'tpu'"),
        (ClusterConfig(worker=WorkerSection(transport="pigeon")), "--transport is 'pigeon'.*shm, grpc"),
        (ClusterConfig(worker=WorkerSection(chunk_tokens=0)), "worker.chunk_tokens is 0"),
        (ClusterConfig(redis=RedisSection(volatile_url="redis://x")), "volatile_url cannot be used yet"),
        (ClusterConfig(worker=WorkerSection(threads=-1)), "--threads is -1"),
        (ClusterConfig(worker=WorkerSection(block_tokens=0)), "--block-tokens is 0"),
        (
            ClusterConfig(pools=PoolSection(mixed=1), router=RouterSection(disaggregation=Disaggregation.ALWAYS)),
            "--disaggregation always cannot work",
        ),
    ],
)
def test_wrong_settings(config: ClusterConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config, ENVIRONMENT)


def test_a_missing_model_folder() -> None:
    with pytest.raises(ModelError, match=r"/no/such/model.*no such folder"):
        resolve(ClusterConfig(model=ModelSection(path="/no/such/model")), ENVIRONMENT)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(ClusterConfig(model=ModelSection(path=str(tmp_path))), ENVIRONMENT)


def test_an_unsupported_architecture_is_found_early(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        resolve(ClusterConfig(model=ModelSection(path=str(tmp_path))), ENVIRONMENT)


def test_missing_weights_are_found_early(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((bundled_model() / "config.json").read_text())
    with pytest.raises(ModelError, match="no safetensors weights"):
        resolve(ClusterConfig(model=ModelSection(path=str(tmp_path))), ENVIRONMENT)


def test_a_taken_port_is_named_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is taken.*--grpc-port"):
            check_ports(RouterSection(port=0, grpc_port=port, admin_port=0))
    check_ports(RouterSection(port=port, grpc_port=0, admin_port=0))
