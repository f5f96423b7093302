"""Faults that operators make, planted one by one in the real thing: `clusterctl doctor` names each, and its fix."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tandem.clusterctl.doctor.cluster_checks import contested
from tandem.controlplane.state_dir import StateDir
from tandem.core.cpu_level import CpuLevel
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.ids import WorkerId, new_incarnation
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.member_lease import WorkerLease
from tandem.statestore.keys import Keys, Member
from tandem.statestore.records import WorkerRecord
from tandem.statestore.stores.events import ClusterEventStore
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness, builder
from tests.integration.router.scripted_worker import Script
from tests.plugins import forked_starts
from tests.unit.kernels.levels import needs

PLAIN = {"PATH": os.environ["PATH"], **forked_starts.fixed(dict(os.environ))}
Found = Mapping[str, list[tuple[str, str, str]]]


def doctor(
    tmp_path: Path,
    *flags: str,
    before: str = "",
    variables: Mapping[str, str] | None = None,
    wraps: tuple[str, ...] = (),
) -> tuple[int, Found]:
    """(exit code, check → verdict, what, fix) of the real program, run in a shell after the commands `before`."""
    command = [
        sys.executable,
        "-m",
        "tandem.clusterctl",
        "doctor",
        "-o",
        "json",
        "--state-dir",
        str(tmp_path / "state"),
    ]
    shell = f'{before}\nexec "$0" "$@"'
    given = {**PLAIN, "HOME": str(tmp_path), **(variables or {})}
    called = [*wraps, "/bin/bash", "-ec", shell, *command, *flags] if before else [*wraps, *command, *flags]
    done = subprocess.run(called, env=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    found: dict[str, list[tuple[str, str, str]]] = {}
    for one in json.loads(done.stdout)["findings"]:
        found.setdefault(one["check"], []).append((one["verdict"], one["what"], one["fix"]))
    return done.returncode, found


def only(found: Found, check: str, verdict: str = "error") -> tuple[str, str]:
    """(what, fix) of a check's only finding, which has that verdict and names a remedy."""
    ((got, what, fix),) = found[check]
    assert (got, bool(fix)) == (verdict, True), what
    return what, fix


# ---- this machine --------------------------------------------------------------------------------------------------


def test_too_few_files(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, before="ulimit -n 512")
    what, fix = only(found, "open-files")
    assert code == 7
    assert "512 files" in what
    assert "ulimit -n" in fix
    assert only(doctor(tmp_path, before="ulimit -n 2048")[1], "open-files", "warning")


def test_a_full_disk_and_too_little_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    mounts = f"mount -t tmpfs -o size=1m none {tmp_path}/state\nmount -t tmpfs -o size=8m none /dev/shm"
    code, found = doctor(tmp_path, before=mounts, wraps=("unshare", "-rm"))
    assert code == 7
    assert only(found, "disk")[0].startswith("1 MiB are free")
    assert only(found, "shared-memory")[0] == "/dev/shm holds 8 MiB"


def test_no_compiler(tmp_path: Path) -> None:
    _, found = doctor(tmp_path, variables={"PATH": str(tmp_path)})
    assert "none of cc, gcc, clang is on PATH" in only(found, "compiler", "warning")[0]
    _, found = doctor(tmp_path, variables={"TANDEM_NATIVE": "0"})
    assert "TANDEM_NATIVE=0" in only(found, "compiler", "warning")[0]


@needs(CpuLevel.AVX2)
def test_products_on_this_cpu(tmp_path: Path) -> None:
    _, found = doctor(tmp_path, variables={"TANDEM_CPU_LEVEL": "avx2"})
    ((verdict, what, _),) = found["cpu"]
    assert verdict == "ok"
    assert what.startswith("matrix products: AVX2, bfloat16 is widened to float32")
    _, found = doctor(tmp_path, variables={"TANDEM_CPU_LEVEL": "none"})
    assert "no AVX2" in only(found, "cpu", "warning")[0]
    code, found = doctor(tmp_path, variables={"TANDEM_CPU_LEVEL": "sse9"})
    assert code == 7
    assert "'sse9'" in only(found, "cpu")[0]


@pytest.mark.parametrize(
    ("variables", "has_token", "message"),
    [
        ({}, True, "RAY_AUTH_MODE is not set"),
        ({"RAY_AUTH_MODE": "disabled"}, True, "RAY_AUTH_MODE is disabled"),
        ({"RAY_AUTH_MODE": "token"}, False, "there is no token"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/no/such/token"}, True, "no file is there"),
    ],
)
def test_ray_is_told_two_things(tmp_path: Path, variables: dict[str, str], has_token: bool, message: str) -> None:
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("x")
    code, found = doctor(tmp_path, variables=variables)
    assert code == 7
    assert message in only(found, "ray-auth")[0]


def test_ray_is_told_one_thing(tmp_path: Path) -> None:
    _, found = doctor(tmp_path, variables={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"})
    assert found["ray-auth"][0][0] == "ok"
    assert doctor(tmp_path)[1]["ray-auth"][0][0] == "skipped"


# ---- its GPUs ------------------------------------------------------------------------------------------------------


def gpus(tmp_path: Path, says: str = "", status: int = 0) -> dict[str, str]:
    """Variables that provide an `nvidia-smi` which reports computing processes, in its documented form."""
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "said").write_text(says)
    smi = programs / "nvidia-smi"
    wanted = "--query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits"
    smi.write_text(f'#!/bin/sh\n[ "$*" = "{wanted}" ] || exit 9\ncat {programs}/said\nexit {status}\n')
    smi.chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}"}


@contextmanager
def process(*arguments: str) -> Iterator[int]:
    """One that goes on until the end of the block, with these arguments behind its own."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, *arguments], **pipes) as running:
        assert running.stdout is not None
        assert running.stdin is not None
        assert running.stdout.readline()  # it is the expected process
        yield running.pid
        running.stdin.close()


def test_gpu_memory_that_is_held_by_no_worker(tmp_path: Path) -> None:
    rank = ("-m", "tandem.worker.rank", "--rank=0")
    with process(*rank, f"--parent={os.getpid()}") as ours, process(*rank, "--parent=1") as left, process() as other:
        says = f"GPU-aaaa, {ours}, 60000\nGPU-aaaa, {left}, 61440\nGPU-bbbb, {other}, [N/A]\nGPU-bbbb, 4194305, 512\n"
        code, found = doctor(tmp_path, variables=gpus(tmp_path, says))
        assert code == 7
        (one, leak, kill), (two, stranger, end), (three, unseen, reset) = found["gpu-memory"]
        assert (one, leak) == (
            "error", f"process {left} was a rank of a worker that is gone, and holds 61440 MiB of GPU-aaaa"
        )  # fmt: skip
        assert kill.startswith(f"`kill -9 {left}`")
        assert (two, f"process {other} (python" in stranger, "holds memory of GPU-bbbb" in stranger) == (
            "warning", True, True
        )  # fmt: skip
        assert "CUDA_VISIBLE_DEVICES" in end
        assert (three, unseen.startswith("process 4194305 holds 512 MiB of GPU-bbbb")) == ("warning", True)
        assert "--gpu-reset" in reset
        _, found = doctor(tmp_path, variables=gpus(tmp_path, f"GPU-aaaa, {ours}, 60000\n"))
        assert [verdict for verdict, _, _ in found["gpu-memory"]] == ["ok"]


def test_a_driver_that_fails(tmp_path: Path) -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch"
    code, found = doctor(tmp_path, variables=gpus(tmp_path, said, status=18))
    assert code == 7
    assert said in only(found, "gpu-memory")[0]


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    _, found = doctor(tmp_path, variables={"PATH": str(tmp_path), "NCCL_SOCKET_IFNAME": "nosuch"})
    assert (found["gpu-memory"][0][0], found["nccl"][0][0]) == ("skipped", "skipped")


@pytest.mark.parametrize(
    ("variables", "verdict", "message"),
    [
        ({"NCCL_SOCKET_IFNAME": "nosuch,other"}, "error", "no interface is left by that"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "error", "(lo"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, "warning", "lo reaches no other machine"),
        ({"NCCL_P2P_DISABLE": "1"}, "warning", "NCCL_P2P_DISABLE=1: the 2 ranks of a worker"),
        ({"NCCL_P2P_LEVEL": "loc"}, "warning", "NCCL_P2P_LEVEL=LOC"),
        ({"NCCL_SHM_DISABLE": "1"}, "warning", "NCCL_SHM_DISABLE=1"),
    ],
)
def test_nccl_that_is_told_what_is_not_so(
    tmp_path: Path, variables: dict[str, str], verdict: str, message: str
) -> None:
    (tmp_path / "c.toml").write_text("[decode]\ntp = 2\n")
    mount = "mount -t tmpfs -o size=2g none /dev/shm"
    asked: Any = {"before": mount, "wraps": ("unshare", "-rm")}
    _, found = doctor(
        tmp_path, "--config", str(tmp_path / "c.toml"), variables={**gpus(tmp_path), **variables}, **asked
    )
    what, fix = only(found, "nccl", verdict)
    assert message in what
    assert "unset" in fix
    _, found = doctor(tmp_path, "--config", str(tmp_path / "c.toml"), variables=gpus(tmp_path), **asked)
    assert [verdict for verdict, _, _ in found["nccl"]] == ["ok"]


def test_nccl_between_workers_of_one_rank_each(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[worker]\ntransport = "nccl"\n')
    variables = {**gpus(tmp_path), "NCCL_SOCKET_IFNAME": "nosuch", "NCCL_P2P_DISABLE": "1"}
    code, found = doctor(tmp_path, "--config", str(tmp_path / "c.toml"), variables=variables)
    assert code == 7
    assert only(found, "nccl")[0].startswith("NCCL_SOCKET_IFNAME is nosuch")


def test_too_little_shared_memory_for_several_ranks(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[worker]\ntp = 2\n")
    asked: Any = {"before": "mount -t tmpfs -o size=64m none /dev/shm", "wraps": ("unshare", "-rm")}
    _, found = doctor(tmp_path, "--config", str(tmp_path / "c.toml"), variables=gpus(tmp_path), **asked)
    what, fix = only(found, "nccl", "warning")
    assert what == "/dev/shm holds 64 MiB, and NCCL between 2 ranks may want 1.0 GiB"
    assert "--shm-size=1g" in fix
    assert found["shared-memory"][0][0] == "ok"
    for other in ("[worker]\ntp = 1\n", '[worker]\ntp = 2\ndevice = "cpu"\n', '[worker]\ntp = 2\nengine = "sim"\n'):
        (tmp_path / "c.toml").write_text(other)
        _, found = doctor(tmp_path, "--config", str(tmp_path / "c.toml"), variables=gpus(tmp_path), **asked)
        assert found["nccl"][0][0] == "skipped", other


# ---- what it is started with ---------------------------------------------------------------------------------------


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "c.toml").write_text(f"[router]\nport = 0\nadmin_port = {port}\n")
        code, found = doctor(tmp_path, "--config", str(tmp_path / "c.toml"))
    assert code == 7
    what, fix = only(found, "ports")
    assert f"port {port} on 127.0.0.1 is taken" in what
    assert "--admin-port" in fix


def test_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[router]\nprot = 1\n")
    code, found = doctor(tmp_path, "--config", str(tmp_path / "c.toml"))
    assert code == 7
    what, fix = only(found, "configuration")
    assert "unknown key 'prot'" in what
    assert "'port'" in fix


def test_a_model_that_wants_a_token(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[model]\npath = "meta-llama/Llama-3.1-8B"\n')
    code, found = doctor(tmp_path, "--config", str(tmp_path / "c.toml"))
    assert code == 7
    assert "HF_TOKEN" in only(found, "hub-token")[1]
    _, found = doctor(tmp_path, "--config", str(tmp_path / "c.toml"), variables={"HF_TOKEN": "x"})
    assert found["hub-token"][0][0] == "ok"


def test_keys_that_others_can_read_or_nobody(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state", "tandem")
    with state.hold() as held:
        held.draw_secrets()
    assert {verdict for verdict, _, _ in doctor(tmp_path)[1]["secrets"]} == {"ok"}
    state.admin_key_file.chmod(0o644)
    state.secret_file.unlink()
    state.secret_file.mkdir()
    code, found = doctor(tmp_path)
    assert code == 7
    (_, open_file, fix), (_, unreadable, _) = found["secrets"]
    assert f"others may read {state.admin_key_file} (mode 0644)" in open_file
    assert fix == f"`chmod 600 {state.admin_key_file}`"
    assert f"{state.secret_file} cannot be read" in unreadable


# ---- Redis ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[PrivateRedis]:
    with PrivateRedis.start(tmp_path / "redis", "geheim") as server:
        yield server


def told(server: PrivateRedis, tell: Callable[[Redis], Awaitable[object]]) -> None:
    """Do something with a real server."""

    async def run() -> None:
        client = await connect(server.url)
        try:
            await tell(client)
        finally:
            await client.aclose()

    asyncio.run(run())


def test_a_redis_that_forgets(tmp_path: Path, redis: PrivateRedis) -> None:
    code, found = doctor(tmp_path, "--redis", redis.url)
    every = ("redis-server", "redis", "redis-eviction", "redis-persistence", "redis-clock")
    assert {check: found[check][0][0] for check in every} == dict.fromkeys(every, "ok")
    assert "it has no maxmemory" in only(found, "redis-memory", "warning")[0]

    async def spoil(client: Any) -> None:
        await client.config_set("maxmemory-policy", "allkeys-lru")
        await client.config_set("appendonly", "no")
        await client.config_set("maxmemory", (await client.info("memory"))["used_memory"])

    told(redis, spoil)
    code, found = doctor(tmp_path, "--redis", redis.url)
    assert code == 7
    assert "maxmemory-policy is allkeys-lru" in only(found, "redis-eviction")[0]
    assert "are used, 100%" in only(found, "redis-memory", "warning")[0]
    assert "appendonly is no" in only(found, "redis-persistence")[0]
    assert "geheim" not in str(found)


def test_a_redis_that_does_not_answer(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, "--redis", "redis://127.0.0.1:1")
    assert code == 7
    assert "cannot reach Redis at redis://127.0.0.1:1" in only(found, "redis")[0]
    assert found["registry"][0][0] == "skipped"


def test_a_registry_that_names_the_dead(tmp_path: Path, redis: PrivateRedis) -> None:
    record = WorkerRecord(
        worker=WorkerId("decode-0"), incarnation=new_incarnation(), role="decode", address="127.0.0.1:1", model="m",
        fingerprint="f",
    )  # fmt: skip

    async def register(client: Any) -> None:
        await WorkerLease(client, Keys("tandem"), lease_s=300.0).register(record)
        await client.sadd(Keys("tandem").members(Member.WORKER), "prefill-7")
        gone = replace(record, worker=WorkerId("mixed-0"))
        lease = WorkerLease(client, Keys("tandem"), lease_s=300.0)
        await lease.register(gone)
        await lease.deregister()

    told(redis, register)
    code, found = doctor(tmp_path, "--redis", redis.url)
    assert code == 7
    (one, what, _), (other, silent, _) = found["registry"]
    assert (one, "no process listens at its address 127.0.0.1:1" in what) == ("error", True)
    assert (other, "prefill-7 is listed and holds no lease" in silent) == ("warning", True)


# ---- a running cluster ---------------------------------------------------------------------------------------------


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    with builder(tmp_path) as make:
        yield make


def asked(house: RouterHarness, tmp_path: Path) -> tuple[int, Found]:
    (tmp_path / "key").write_text(ADMIN_KEY)
    return doctor(tmp_path, "--endpoint", house.admin_url, "--admin-key-file", str(tmp_path / "key"))


def test_a_worker_with_another_clock_and_one_of_another_release(tmp_path: Path, build: Build) -> None:
    house = build(start=False)
    house.workers["decode-0"].script = Script(clock_ahead_s=90.0)
    house.workers["prefill-0"].script = Script(version="0.0.1")
    house.start()
    house.wait_ready()
    _, found = asked(house, tmp_path)
    what, fix = only(found, "clocks", "warning")
    assert what.startswith("the clock of decode-0 is ")
    assert "ahead of the router's" in what
    assert "NTP" in fix
    assert "0.0.1: prefill-0" in only(found, "versions", "warning")[0]
    assert found["cluster"][0][0] == "ok"
    assert found["pairs"][0][0] == "ok"


def test_workers_whose_kv_does_not_fit(tmp_path: Path, build: Build) -> None:
    house = build(start=False, prefill=1, decode=2)
    house.workers["decode-1"].fingerprint = "e" * 32
    house.start()
    house.wait(lambda: bool(house.router.table.refused_pairs()))
    code, found = asked(house, tmp_path)
    assert code == 7
    assert "decode-1" in only(found, "pairs")[0]


def test_a_cluster_without_workers(tmp_path: Path, build: Build) -> None:
    house = build(prefill=0, decode=0)
    code, found = asked(house, tmp_path)
    assert code == 7
    assert any("it does not serve: " in what for _, what, _ in found["cluster"])


def test_two_autoscalers(tmp_path: Path, redis: PrivateRedis, build: Build) -> None:
    """The planner flips, an operator flips back: once is an operator, twice is a loop. A start of `up` is not
    counted."""
    house = build(redis_url=redis.url)

    def happened(rounds: int) -> list[ClusterEvent]:
        told = [(EventKind.CLUSTER_STARTED, "`up`"), (EventKind.DESIRED_CHANGED, "version 1: prefill 1, decode 3")]
        for turn in range(rounds):
            told += [
                (EventKind.DESIRED_CHANGED, f"version {2 * turn + 2}: prefill 2, decode 2"),
                (EventKind.PLAN_ACTED, f"1P:3D → 2P:2D, because so; version {2 * turn + 2}: decode-2 flip"),
                (EventKind.DESIRED_CHANGED, f"version {2 * turn + 3}: prefill 1, decode 3"),
            ]
        return [ClusterEvent(time_s=1.0, kind=kind, subject="x", reason=reason) for kind, reason in told]

    async def tell(server: Redis, events: list[ClusterEvent]) -> None:
        await server.delete(Keys(house.config.cluster).cluster_events)
        await ClusterEventStore(server, Keys(house.config.cluster)).append(events)

    told(redis, lambda server: tell(server, happened(1)))
    assert asked(house, tmp_path)[1]["autoscalers"][0][0] == "ok"
    started_anew = [happened(1)[-3], happened(1)[-2], happened(1)[0], happened(1)[-1]]
    told(redis, lambda server: tell(server, [*happened(1), *started_anew]))
    assert asked(house, tmp_path)[1]["autoscalers"][0][0] == "ok"
    kept = [*happened(1)[:-1], happened(1)[0], happened(1)[-3]]  # and then a drain, which changes no count
    drained = replace(kept[-1], reason="version 3: prefill 2, decode 2")
    assert contested([asdict(one) for one in [*kept, drained]]) == 0
    told(redis, lambda server: tell(server, happened(2)))
    what, fix = only(asked(house, tmp_path)[1], "autoscalers", "warning")
    assert what.startswith("2 of the planner's latest changes were undone")
    assert "advise" in fix


def test_a_cluster_that_was_named_has_to_answer(tmp_path: Path, build: Build) -> None:
    house = build()
    (tmp_path / "key").write_text("x" * 32)
    code, found = doctor(tmp_path, "--endpoint", house.admin_url, "--admin-key-file", str(tmp_path / "key"))
    what, fix = only(found, "cluster")
    assert code == 7
    assert "refuses the admin key" in what
    assert "--admin-key-file" in fix
    code, found = doctor(tmp_path, "--endpoint", "http://127.0.0.1:1", "--admin-key-file", str(tmp_path / "key"))
    what, fix = only(found, "cluster")
    assert code == 7
    assert "no cluster answers at http://127.0.0.1:1" in what
    assert "--endpoint" in fix


def test_a_cluster_that_runs_here_has_to_answer_and_its_files_to_be_right(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state", "tandem")
    with state.hold():
        state.config_dir.mkdir(parents=True, exist_ok=True)
        (state.config_dir / "router-0.json").write_text("{")
        code, found = doctor(tmp_path)
    assert code == 7
    assert "router-0.json" in only(found, "redis")[0]
    assert "is still starting" in only(found, "cluster")[0]
    assert found["configuration"][0][0] == "ok"


def test_no_cluster_is_nothing_wrong(tmp_path: Path) -> None:
    _, found = doctor(tmp_path)
    ((verdict, what, _),) = found["cluster"]
    assert (verdict, what) == ("skipped", "no cluster 'tandem' is running here")
