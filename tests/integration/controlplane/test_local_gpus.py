"""A worker starts on a GPU of this machine once no other process holds it. The output of `nvidia-smi` is made up."""

import asyncio
import importlib.metadata
import os
import signal

import pytest

from tandem.controlplane import gpu_free_check
from tandem.controlplane.environment import Environment
from tandem.controlplane.launcher import WorkerExited, WorkerProgress, WorkerReady, WorkerReport, WorkerSpec
from tandem.controlplane.local import LocalLauncher, gpus_of
from tandem.controlplane.state_dir import HeldState
from tandem.core.config import WorkerConfig, WorkerSection
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName
from tools.fake_gpus import FakeGpus
from tools.waiting import wait_for_async

from .conftest import FAKE_WORKER

P, D = WorkerId("prefill-0"), WorkerId("decode-0")


def spec(worker_id: WorkerId = P, *, device: str = "cuda", engine: str = "model", tp: int = 1) -> WorkerSpec:
    config = WorkerConfig(
        cluster="test", worker_id=worker_id, role=RoleName.PREFILL, pool="prefill", model="m", model_dir="/m",
        revision="", dtype="auto", max_model_len=0, redis_url="unix:///none", secret_file="s", runtime_dir="/tmp",
        settings=WorkerSection(device=device, engine=engine, tp=tp),
    )  # fmt: skip
    return WorkerSpec(config=config)


@pytest.fixture
def gpus(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    gpus = FakeGpus(tmp_path_factory.mktemp("gpus") / "bin")
    monkeypatch.setenv("PATH", gpus.path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_free_check, "LOOK_EVERY_S", 0.01)
    return gpus


@pytest.fixture
def launcher(gpus: FakeGpus, held: HeldState, environment: Environment) -> LocalLauncher:
    return LocalLauncher(held, environment, command=FAKE_WORKER)


@pytest.fixture
def hasty(gpus: FakeGpus, held: HeldState, environment: Environment) -> LocalLauncher:
    """A launcher that waits for no other process."""
    return LocalLauncher(held, environment, command=FAKE_WORKER, gpu_wait_s=0.0)


async def _next(launcher: LocalLauncher) -> WorkerReport:
    return await asyncio.wait_for(anext(aiter(launcher.watch())), 60)


async def _is_ready(launcher: LocalLauncher, worker_id: WorkerId = P) -> int:
    """Wait until it is ready, with no other report before; return its process."""
    assert await _next(launcher) == WorkerProgress(worker_id, "loading weights")
    ready = await _next(launcher)
    assert isinstance(ready, WorkerReady)
    return int(ready.details["pid"])


async def test_a_screen_is_not_waited_for(launcher: LocalLauncher, gpus: FakeGpus) -> None:
    gpus.show(0, 20000)
    async with launcher:
        await launcher.start_worker(spec())
        await _is_ready(launcher)


async def test_what_somebody_holds_is_waited_for(launcher: LocalLauncher, gpus: FakeGpus) -> None:
    holds = gpus.hold(0, 61440, 7)
    async with launcher:
        await launcher.start_worker(spec())
        assert await _next(launcher) == WorkerProgress(P, f"waiting for a place: {holds}")
        assert [one.worker_id for one in await launcher.running()] == [P]
        asked = gpus.asked
        await wait_for_async(lambda: gpus.asked > asked + 4)
        gpus.give_back()
        await _is_ready(launcher)


async def test_what_is_never_given_back_is_no_place_and_it_can_be_tried_again(
    hasty: LocalLauncher, gpus: FakeGpus
) -> None:
    holds = gpus.hold(1, 9000, 8)
    async with hasty:
        await hasty.start_worker(spec(tp=2))
        expected = WorkerExited(P, f"it got no place within 0 s: {holds}", is_unplaced=True)
        assert await _next(hasty) == expected
        assert await hasty.running() == []
        gpus.give_back()
        await hasty.start_worker(spec(tp=2))
        await _is_ready(hasty)


async def test_who_waits_is_stopped_at_once(launcher: LocalLauncher, gpus: FakeGpus) -> None:
    gpus.hold(0, 61440, 7)
    async with launcher:
        for is_waiting in (False, True):
            await launcher.start_worker(spec())
            if is_waiting:
                assert isinstance(await _next(launcher), WorkerProgress)
            await asyncio.wait_for(launcher.stop(P, grace_s=600), 20)
            assert await _next(launcher) == WorkerExited(P, "it was stopped before it had a place")
            assert await launcher.running() == []


async def test_leaving_the_launcher_starts_nobody(launcher: LocalLauncher, gpus: FakeGpus) -> None:
    gpus.hold(0, 61440, 7)
    async with launcher:
        await launcher.start_worker(spec())
        assert isinstance(await _next(launcher), WorkerProgress)
    assert await launcher.running() == []
    assert isinstance(await _next(launcher), WorkerExited)


async def test_workers_of_one_cluster_share_a_gpu(hasty: LocalLauncher, gpus: FakeGpus) -> None:
    async with hasty:
        await hasty.start_worker(spec(P))
        pid = await _is_ready(hasty, P)
        holds = gpus.hold(0, 40000, pid)
        await hasty.start_worker(spec(D))
        await _is_ready(hasty, D)
        await hasty.stop(D, grace_s=20)
        assert isinstance(await _next(hasty), WorkerExited)
        os.kill(pid, signal.SIGKILL)
        assert isinstance(await _next(hasty), WorkerExited)
        await hasty.start_worker(spec(P))
        exited = await _next(hasty)
        assert exited == WorkerExited(P, f"it got no place within 0 s: {holds}", is_unplaced=True), "a leftover"


async def test_workers_on_cpus_do_not_ask(hasty: LocalLauncher, gpus: FakeGpus) -> None:
    gpus.hold(0, 61440, 7)
    async with hasty:
        await hasty.start_worker(spec(device="cpu"))
        await _is_ready(hasty)
    assert gpus.asked == 0


async def test_a_machine_without_nvidia_smi_stands_in_nobodys_way(
    hasty: LocalLauncher, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.hold(0, 61440, 7)
    monkeypatch.setenv("PATH", "/nowhere")
    async with hasty:
        await hasty.start_worker(spec())
        await _is_ready(hasty)


@pytest.mark.parametrize(
    ("which", "seen", "torch", "expected"),
    [
        (spec(device="cpu"), None, "2.11.0", ()),
        (spec(device="cuda"), None, "2.11.0", ("0",)),
        (spec(device="cuda", tp=2), None, "2.11.0", ("0", "1")),
        (spec(device="cuda", tp=2), "3, GPU-aaaa,5", "2.11.0", ("3", "GPU-aaaa")),
        (spec(device="cuda"), "", "2.11.0", ()),
        (spec(device="cuda"), "-1", "2.11.0", ()),
        (spec(device="auto"), None, "2.11.0", ("0",)),
        (spec(device="auto"), None, "2.11.0+cpu", ()),
        (spec(device="auto"), None, None, ()),
        (spec(device="auto", engine="sim"), None, "2.11.0", ()),
    ],
)
def test_a_worker_computes_on_the_first_gpus_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, which: WorkerSpec, seen: str | None, torch: str | None, expected: tuple[str, ...]
) -> None:
    def version(name: str) -> str:
        assert name == "torch"
        if torch is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return torch

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert gpus_of(which, {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}) == expected
