"""Defaults are filled in and mistakes found before any process runs."""

import dataclasses
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.controlplane import resolve as resolving
from tandem.controlplane.environment import Environment
from tandem.controlplane.model_catalog import bundled_model
from tandem.controlplane.resolve import check_ports, log_format, resolve, resolve_ports
from tandem.controlplane.worker_settings import divide_cores
from tandem.core.config import (
    AdmissionSection,
    BudgetSection,
    ClusterConfig,
    Disaggregation,
    FurtherModelSection,
    LauncherName,
    ModelSection,
    PlannerMode,
    PlannerSection,
    PoolSection,
    RedisSection,
    RoleSection,
    RouterSection,
    SimSection,
    SloSection,
    WorkerSection,
)
from tandem.core.config_loader import dump
from tandem.core.errors import ConfigError, ModelError, StartupError
from tandem.core.kv_compatibility import ALWAYS_BYTES_PER_S
from tandem.core.state_enums import RoleName

ENVIRONMENT = Environment(state_root=Path("/none"), socket_root=Path("/tmp"), cores=8, variables={"A": "b"})


def _counts(config: ClusterConfig) -> dict[str, int]:
    return {pool.name: pool.count for pool in resolve(config, ENVIRONMENT).pools}


def test_defaults_are_the_bundled_model_and_one_pair() -> None:
    resolved = resolve(ClusterConfig(), ENVIRONMENT)
    assert resolved.models[0].source.path == bundled_model()
    assert resolved.served_names == ("tandem-tiny",)
    assert _counts(ClusterConfig()) == {"prefill": 1, "decode": 1}
    assert {role: settings.threads for role, settings in resolved.workers.items()} == dict.fromkeys(RoleName, 4)
    assert (resolved.router.port, resolved.router.grpc_port, resolved.router.admin_port) == (8000, 8001, 8002)


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (3, 2), (8, 1), (20, 1)])
def test_cores_are_shared(workers: int, threads: int) -> None:
    resolved = resolve(ClusterConfig(pools=PoolSection(mixed=workers)), ENVIRONMENT)
    assert resolved.workers[RoleName.MIXED].threads == threads
    variables = ENVIRONMENT.for_child(threads=threads)
    assert variables["OMP_NUM_THREADS"] == str(threads)
    assert (variables["OMP_WAIT_POLICY"], variables["A"]) == ("passive", "b")
    assert int(variables["GOMP_SPINCOUNT"]) > 0, "a step has hundreds of parts, and each sleep costs a wake-up"


def test_children_have_large_pages_unless_the_operator_says_otherwise() -> None:
    assert ENVIRONMENT.for_child(threads=1)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    given = dataclasses.replace(ENVIRONMENT, variables={"GLIBC_TUNABLES": "glibc.malloc.check=3"})
    assert given.for_child(threads=1)["GLIBC_TUNABLES"] == "glibc.malloc.check=3"


def test_given_counts_and_threads_stand() -> None:
    config = ClusterConfig(pools=PoolSection(mixed=2), worker=WorkerSection(threads=5))
    assert _counts(config) == {"mixed": 2}
    assert resolve(config, ENVIRONMENT).workers[RoleName.MIXED].threads == 5


def test_roles_differ_where_they_are_told_to_and_share_the_rest() -> None:
    config = ClusterConfig(
        pools=PoolSection(prefill=1, decode=2),
        worker=WorkerSection(block_tokens=32, kv_dtype="float32"),
        prefill=RoleSection(tp=2, kv_memory_bytes=1 << 30),
        decode=RoleSection(block_tokens=8, kv_dtype="bfloat16", transport="grpc", device="cpu"),
    )
    resolved = resolve(config, ENVIRONMENT)
    assert {pool.role: pool.tp for pool in resolved.pools} == {RoleName.PREFILL: 2, RoleName.DECODE: 1}
    workers = resolved.workers
    prefill, decode = workers[RoleName.PREFILL], workers[RoleName.DECODE]
    assert (prefill.tp, prefill.block_tokens, prefill.kv_dtype, prefill.kv_memory_bytes) == (2, 32, "float32", 1 << 30)
    assert (decode.tp, decode.block_tokens, decode.kv_dtype, decode.transport) == (1, 8, "bfloat16", "grpc")
    assert (decode.kv_memory_bytes, decode.device) == (0, "cpu")
    assert prefill.threads == decode.threads == 2  # 8 cores for 2 + 2 ranks
    assert workers[RoleName.MIXED].block_tokens == 32


@pytest.mark.parametrize(("tp", "cores", "threads"), [(1, 8, 4), (2, 8, 2), (4, 8, 1), (4, 2, 1)])
def test_every_rank_is_a_process_that_wants_cores(tp: int, cores: int, threads: int) -> None:
    # Heads of the bundled model are not looked at here: the model decides which sizes fit.
    counts = {RoleName.PREFILL: 1, RoleName.DECODE: 1, RoleName.MIXED: 0}
    workers = divide_cores(ClusterConfig(worker=WorkerSection(tp=tp)), counts, cores)
    assert {settings.threads for settings in workers.values()} == {threads}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ClusterConfig(worker=WorkerSection(tp=3)), r"--tp 3 does not fit the model.*its 8 query heads"),
        (ClusterConfig(decode=RoleSection(tp=16)), r"--decode-tp 16 does not fit the model \(LlamaForCausalLM\)"),
        (
            ClusterConfig(pools=PoolSection(mixed=1), mixed=RoleSection(tp=5)),
            r"mixed.tp 5 does not fit the model.*Use one of 1, 2",
        ),
    ],
)
def test_ranks_that_the_model_cannot_be_split_over(config: ClusterConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config, ENVIRONMENT)
    # Settings of workers that are not wanted are not checked.
    resolve(dataclasses.replace(config, worker=WorkerSection(), pools=PoolSection(mixed=1), mixed=RoleSection()),
            ENVIRONMENT)  # fmt: skip


@pytest.mark.parametrize(
    ("worker", "prefill", "listened"),
    [
        ("auto", None, ()),
        ("tcp", None, ()),
        ("auto", "grpc", ()),
        ("gloo", None, ("gloo",)),
        ("cuda_ipc", None, ("cuda_ipc",)),
        ("auto", "gloo", ("shm", "tcp", "grpc", "gloo")),
        ("gloo", "shm", ("shm", "gloo")),
        ("nccl", "auto", ("shm", "tcp", "grpc", "nccl")),
    ],
)
def test_what_is_pushed_over_by_name_is_listened_on(
    worker: str, prefill: str | None, listened: tuple[str, ...]
) -> None:
    """() = the transports that "auto" takes and that work here. A role without a wanted worker makes no process
    listen."""
    config = ClusterConfig(
        pools=PoolSection(prefill=1, decode=1),
        worker=WorkerSection(transport=worker),
        prefill=RoleSection(transport=prefill),
        mixed=RoleSection(transport="cpu_ipc"),
    )
    workers = resolve(config, ENVIRONMENT).workers
    assert {workers[RoleName.PREFILL].transports, workers[RoleName.DECODE].transports} == {listened}


def test_given_transports_stand() -> None:
    worker = WorkerSection(transport="gloo", transports=("tcp", "gloo"))
    assert resolve(ClusterConfig(worker=worker), ENVIRONMENT).workers[RoleName.DECODE].transports == ("tcp", "gloo")


@pytest.mark.parametrize(
    ("worker", "decode", "message"),
    [
        (WorkerSection(transport="gloo", transports=("shm",)), None,
         r"--transport is 'gloo', and no worker would listen.*names shm alone\. Add 'gloo' to it, or leave it out"),
        (WorkerSection(transports=("shm", "tcp")), "nccl", r"decode.transport is 'nccl', and no.*shm, tcp alone"),
        (WorkerSection(transports=("gloo",)), None,
         r"--transport is 'auto', and no worker.*gloo alone, and auto takes none but shm, tcp, grpc\. "
         r"Use --transport gloo"),
    ],
)  # fmt: skip
def test_a_push_that_nobody_would_listen_for_is_refused(
    worker: WorkerSection, decode: str | None, message: str
) -> None:
    config = ClusterConfig(worker=worker, decode=RoleSection(transport=decode))
    with pytest.raises(ConfigError, match=message):
        resolve(config, ENVIRONMENT)


def test_threads_of_one_role_stand() -> None:
    config = ClusterConfig(pools=PoolSection(prefill=1, decode=1), decode=RoleSection(threads=7))
    workers = resolve(config, ENVIRONMENT).workers
    assert (workers[RoleName.PREFILL].threads, workers[RoleName.DECODE].threads) == (4, 7)


def test_a_codec_for_every_link_is_written_as_a_number() -> None:
    config = ClusterConfig(worker=WorkerSection(wire_codec="int8", wire_codec_below_bytes_per_s=float("inf")))
    settings = resolve(config, ENVIRONMENT).workers[RoleName.PREFILL]
    assert settings.wire_codec_below_bytes_per_s == ALWAYS_BYTES_PER_S
    assert json.loads(dump(settings))["wire_codec_below_bytes_per_s"] == ALWAYS_BYTES_PER_S


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
        (ClusterConfig(model=ModelSection(dtype="int3")), "--dtype is 'int3'.*bfloat16"),
        (ClusterConfig(model=ModelSection(quantize="int3")), "--quantize is 'int3'.*int8, w8a8, int4, w4a16"),
        (
            ClusterConfig(model=ModelSection(quantize_calibration="text", quantize="w8a8")),
            "--quantize-calibration has no use with --quantize w8a8. Leave it out, or use int8, int4 or w4a16",
        ),
        (ClusterConfig(model=ModelSection(max_model_len=-1)), "--max-model-len is -1"),
        (ClusterConfig(worker=WorkerSection(device="tpu")), "--device is 'tpu'"),
        (ClusterConfig(worker=WorkerSection(transport="pigeon")), "--transport is 'pigeon'.*shm, .*grpc"),
        (ClusterConfig(worker=WorkerSection(chunk_tokens=0)), "worker.chunk_tokens is 0. Use 1 or more"),
        (ClusterConfig(worker=WorkerSection(step_watchdog_s=0)), "worker.step_watchdog_s is 0. Use 1 or more"),
        (
            ClusterConfig(router=RouterSection(request_timeout_s=float("nan"))),
            "request_timeout_s is nan.*than 0",
        ),
        (ClusterConfig(router=RouterSection(drain_s=float("inf"))), "router.drain_s is inf"),
        (ClusterConfig(router=RouterSection(slow_reader_backlog_bytes=0)), "router.slow_reader_backlog_bytes is 0"),
        (ClusterConfig(router=RouterSection(processes=300)), "--processes is 300. Use 1 to 256"),
        (ClusterConfig(models=(FurtherModelSection(mixed=-1),)), r"models\[0\].mixed is -1"),
        (ClusterConfig(budget={"*": BudgetSection(tokens_per_minute=-1)}), r"budget.\*.tokens_per_minute is -1"),
        (ClusterConfig(redis=RedisSection(volatile_url="redis://x")), "volatile_url cannot be used yet"),
        (ClusterConfig(worker=WorkerSection(threads=-1)), "--threads is -1"),
        (ClusterConfig(worker=WorkerSection(block_tokens=0)), "--block-tokens is 0"),
        (ClusterConfig(worker=WorkerSection(tp=0)), "--tp is 0. Use 1 or more"),
        (ClusterConfig(worker=WorkerSection(kv_dtype="int8")), "--kv-dtype is 'int8'.*bfloat16"),
        (ClusterConfig(worker=WorkerSection(wire_codec="zip")), "--wire-codec is 'zip'.*none, int8, fp8"),
        (ClusterConfig(worker=WorkerSection(wire_codec_below_bytes_per_s=-1)), "--wire-codec-below is -1"),
        (ClusterConfig(worker=WorkerSection(wire_codec_below_bytes_per_s=float("nan"))), "--wire-codec-below is nan"),
        (ClusterConfig(worker=WorkerSection(transports=("shm", "owl"))), "worker.transports is 'owl'"),
        (ClusterConfig(prefill=RoleSection(tp=-1)), "--prefill-tp is -1"),
        (ClusterConfig(decode=RoleSection(kv_dtype="q")), "--decode-kv-dtype is 'q'"),
        (ClusterConfig(decode=RoleSection(block_tokens=0)), "--decode-block-tokens is 0"),
        (ClusterConfig(decode=RoleSection(kv_memory_bytes=-1)), "--decode-kv-memory is -1. Use 0 or more"),
        (ClusterConfig(mixed=RoleSection(block_tokens=0)), "mixed.block_tokens is 0"),
        (ClusterConfig(prefill=RoleSection(threads=-2)), "prefill.threads is -2"),
        (ClusterConfig(prefill=RoleSection(transport="owl")), "prefill.transport is 'owl'"),
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


def test_a_simulated_engine_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((bundled_model() / "config.json").read_text())
    model, sim = ModelSection(path=str(tmp_path)), SimSection(prefill_tokens_per_s=1000.0)
    resolved = resolve(ClusterConfig(model=model, worker=WorkerSection(engine="sim", sim=sim)), ENVIRONMENT)
    worker = resolved.workers[RoleName.DECODE]
    assert (worker.engine, worker.sim) == ("sim", sim)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_simulated_duration_is_a_time(value: float) -> None:
    worker = WorkerSection(engine="sim", sim=SimSection(decode_step_s=value))
    with pytest.raises(ConfigError, match=r"worker.sim.decode_step_s is (-1|nan|inf)"):
        resolve(ClusterConfig(worker=worker), ENVIRONMENT)


def test_an_engine_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match=r"--engine is 'vllm'.*model, sim"):
        resolve(ClusterConfig(worker=WorkerSection(engine="vllm")), ENVIRONMENT)


@pytest.mark.parametrize(
    ("flag", "section"),
    [
        ("--port", lambda port: RouterSection(port=port, grpc_port=0, admin_port=0)),
        ("--grpc-port", lambda port: RouterSection(port=0, grpc_port=port, admin_port=0)),
        ("--admin-port", lambda port: RouterSection(port=0, grpc_port=0, admin_port=port)),
    ],
)
def test_a_taken_port_is_named_with_what_to_do(flag: str, section: Callable[[int], RouterSection]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is taken.*{flag}"):
            check_ports(section(port))
    check_ports(section(port))


def test_a_default_class_has_to_exist() -> None:
    config = ClusterConfig(admission=AdmissionSection(default_slo="chat"), slo={"bulk": SloSection()})
    with pytest.raises(ConfigError, match="there are these SLO classes: bulk"):
        resolve(config, ENVIRONMENT)


def test_promises_are_not_negative() -> None:
    with pytest.raises(ConfigError, match=r"slo.chat.itl_s is -1"):
        resolve(ClusterConfig(slo={"chat": SloSection(itl_s=-1.0)}), ENVIRONMENT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode": RoleSection(tp=2)}, "it takes all workers to be alike"),
        ({"decode": RoleSection(hardware="big")}, "it takes all workers to be alike"),
        ({"planner": PlannerSection(mode=PlannerMode.ADVISE, budget=1)}, "2 workers are configured"),
    ],
)
def test_the_planner_is_refused_workers_that_it_cannot_plan_for(changes: dict[str, Any], message: str) -> None:
    advised = ClusterConfig(planner=PlannerSection(mode=PlannerMode.ADVISE))
    resolve(advised, ENVIRONMENT)
    with pytest.raises(ConfigError, match=message):
        resolve(dataclasses.replace(advised, **changes), ENVIRONMENT)


@pytest.mark.parametrize(
    ("said", "variables", "found"),
    [
        ("", {}, "text"), ("json", {}, "json"), ("", {"TANDEM_LOG_FORMAT": "json"}, "json"),
        ("text", {"TANDEM_LOG_FORMAT": "json"}, "text"), ("", {"TANDEM_LOG_FORMAT": ""}, "text"),
    ],
)  # fmt: skip
def test_logs_are_as_the_configuration_says_or_the_environment(
    said: str, variables: dict[str, str], found: str
) -> None:
    environment = dataclasses.replace(ENVIRONMENT, variables=variables)
    config = ClusterConfig(log_format=said, worker=WorkerSection(engine="sim"))
    assert log_format(config, environment) == found
    assert resolve(config, environment).config.log_format == found


@pytest.mark.parametrize(("said", "variable"), [("xml", ""), ("", "xml")])
def test_a_format_that_no_log_has_is_refused(said: str, variable: str) -> None:
    environment = dataclasses.replace(ENVIRONMENT, variables={"TANDEM_LOG_FORMAT": variable})
    with pytest.raises(ConfigError, match="is 'xml'"):
        log_format(ClusterConfig(log_format=said), environment)


def test_patience_makes_the_limits_that_people_set_longer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "PATIENCE", 10.0)
    monkeypatch.setattr(resolving, "patient", lambda bound: 10 * bound)
    resolved = resolve(ClusterConfig(patience=10.0, replace_silent_s=0.0), ENVIRONMENT)
    worker, router = resolved.workers[RoleName.PREFILL], resolved.router
    assert (worker.step_slow_s, worker.step_watchdog_s) == (100.0, 600.0)
    assert (router.request_timeout_s, router.stall_s) == (6000.0, 300.0)
    assert resolved.config.replace_silent_s == 0.0, "never is never"
    assert resolve(ClusterConfig(), ENVIRONMENT).router.stall_s == 300.0, "as the environment says"


def test_patience_has_to_reach_every_process() -> None:
    with pytest.raises(ConfigError, match=r"--patience is 10: this process has loaded with 1\. Set TANDEM_PATIENCE=10"):
        resolve(ClusterConfig(patience=10.0), ENVIRONMENT)
    with pytest.raises(
        ConfigError, match=r"--patience is 10: it does not reach Ray's other machines\. Set TANDEM_PATIENCE on every"
    ):
        resolve(ClusterConfig(patience=10.0, launcher=LauncherName.RAY), ENVIRONMENT)
