"""Workers placed by a real Ray: their output is reported, their ends are noticed, and they leave nothing behind."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.controlplane.environment import Environment
from tandem.controlplane.launcher import WorkerExited, WorkerProgress, WorkerReady, WorkerReport, WorkerSpec
from tandem.controlplane.ray.launcher import RayLauncher
from tandem.controlplane.ray.messages import Order
from tandem.controlplane.ray.ray_env import ray_variables
from tandem.controlplane.state_dir import HeldState
from tandem.core.config import WorkerConfig, WorkerSection
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName
from tools.running_cluster import is_alive
from tools.waiting import wait_for

from .conftest import Head

PROGRAM = str(Path(__file__).resolve().parent / "placed_worker.py")
LOST_AGENT = str(Path(__file__).resolve().parent / "lost_agent.py")
P, D = WorkerId("prefill-0"), WorkerId("decode-0")
PATIENCE_S = 90.0


def spec(worker_id: WorkerId = P, *, tp: int = 1, device: str = "cpu", hardware: str = "any") -> WorkerSpec:
    config = WorkerConfig(
        cluster="test", worker_id=worker_id, role=RoleName.PREFILL, pool="prefill", model="m", model_dir="/tmp",
        revision="", dtype="auto", max_model_len=0, redis_url="redis://10.9.9.9:1", secret_file="s", runtime_dir="r",
        settings=WorkerSection(tp=tp, device=device),
    )  # fmt: skip
    return WorkerSpec(config=config, threads=1, hardware=hardware)


class Scene:
    """A launcher over the head; leaving it leaves nothing of its workers."""

    def __init__(self, head: Head, held: HeldState, environment: Environment) -> None:
        self._head, self._held, self._environment = head, held, environment

    @contextlib.asynccontextmanager
    async def launcher(self, *options: str, place_timeout_s: float = 60.0) -> AsyncIterator[RayLauncher]:
        async with RayLauncher(
            self._held,
            self._environment,
            cluster="test",
            address=self._head.address,
            token_file=self._head.token_file,
            place_timeout_s=place_timeout_s,
            arguments=(PROGRAM, *options),
        ) as launcher:
            yield launcher
            self._head.keeper.look()


@pytest.fixture
def scene(head: Head, held: HeldState, environment: Environment) -> Scene:
    return Scene(head, held, environment)


async def _next(launcher: RayLauncher) -> WorkerReport:
    return await asyncio.wait_for(anext(aiter(launcher.watch())), PATIENCE_S)


async def _until(launcher: RayLauncher, kind: type[WorkerReport]) -> Any:
    while not isinstance(report := await _next(launcher), kind):
        assert isinstance(report, WorkerProgress), report
    return report


async def _ready(launcher: RayLauncher, which: WorkerSpec | None = None) -> dict[str, Any]:
    await launcher.start_worker(which or spec())
    return dict((await _until(launcher, WorkerReady)).details)


def _family(details: dict[str, Any]) -> list[int]:
    return [details["pid"], details["child"], details["agent"]]


def _is_there(path: str) -> bool:
    return Path(path).exists()


def _is_gone(details: dict[str, Any]) -> bool:
    return not any(is_alive(pid) for pid in _family(details))


async def test_a_worker_is_placed_with_its_secret_and_its_own_gpus_and_ended_in_order(
    scene: Scene, held: HeldState
) -> None:
    async with scene.launcher() as launcher:
        await launcher.start_worker(spec(tp=2, device="cuda", hardware="small"))
        assert launcher.nodes in (None, {P: ""}), "no place yet"
        placed = await _next(launcher)
        assert isinstance(placed, WorkerProgress)
        assert "it has a place on " in placed.text
        assert await _next(launcher) == WorkerProgress(P, "loading weights")
        ready = await _next(launcher)
        assert isinstance(ready, WorkerReady)
        details = dict(ready.details)
        assert details["secret"] == held.state.secret_file.read_text()
        assert details["modes"] == ["0o600", "0o600", "0o700"]
        assert sorted(details["gpus"].split(",")) == ["0", "1"]
        assert details["ray"] == []
        assert details["threads"] == "1"
        assert details["host"] in placed.text
        assert launcher.nodes == {P: details["host"]}
        assert os.getpgid(details["pid"]) == details["agent"] == os.getpgid(details["child"])
        assert os.getpriority(os.PRIO_PROCESS, details["pid"]) == os.getpriority(os.PRIO_PROCESS, 0)
        await launcher.stop(P, grace_s=20)
        exited = await _next(launcher)
        assert isinstance(exited, WorkerExited)
        assert "exit code 0" in exited.reason
        wait_for(lambda: _is_gone(details))
        assert not _is_there(details["folder"])


async def test_a_dead_worker_takes_its_children_with_it_and_its_place_is_free_again(scene: Scene) -> None:
    async with scene.launcher() as launcher:
        details = await _ready(launcher, spec(tp=4))
        os.kill(details["pid"], signal.SIGKILL)
        exited = await _until(launcher, WorkerExited)
        assert "signal 9" in exited.reason
        assert not exited.is_place_lost
        assert not is_alive(details["child"]), "gone with all its processes, when that is said"
        wait_for(lambda: _is_gone(details))
        assert (await _ready(launcher, spec(tp=4)))["pid"] != details["pid"]


async def test_a_dead_agent_is_noticed_and_its_worker_dies_with_it(scene: Scene) -> None:
    async with scene.launcher() as launcher:
        details = await _ready(launcher)
        os.kill(details["agent"], signal.SIGKILL)
        exited = await _until(launcher, WorkerExited)
        assert "its agent died" in exited.reason
        assert exited.is_place_lost
        wait_for(lambda: _is_gone(details))
        wait_for(lambda: not _is_there(details["folder"]), what="the keeper of its machine removes its folder")


async def test_a_place_that_cannot_be_had_says_what_is_missing(scene: Scene) -> None:
    async with scene.launcher(place_timeout_s=0.5) as launcher:  # over at the first look, and yet it has a reason
        for asked, missing in (
            (spec(tp=8), "needs 8 CPU on one node: "),
            (spec(hardware="h100"), "no node of class h100 (there are: small on "),
        ):
            await launcher.start_worker(asked)
            waiting = await _next(launcher)
            assert isinstance(waiting, WorkerProgress)
            assert waiting.text.startswith(f"waiting for a place: {missing}")
            exited = await _until(launcher, WorkerExited)
            assert exited.reason.startswith(f"it got no place within 0.5 s: {missing}")
            assert exited.is_unplaced
    async with scene.launcher() as launcher:
        await _ready(launcher, spec(tp=4))  # what was asked for in vain holds nothing


def test_a_gpu_that_somebody_holds_is_no_place_and_what_waited_for_it_is_given_back(scene: Scene, head: Head) -> None:
    async def run() -> None:
        async with scene.launcher(place_timeout_s=5) as launcher:  # Ray may take a while to give one
            holds = head.gpus.hold(1, 61440, 7)
            await launcher.start_worker(spec(tp=2, device="cuda"))
            placed = await _next(launcher)
            assert isinstance(placed, WorkerProgress)
            ip = placed.text.removeprefix("it has a place on ").partition(",")[0]
            assert await _next(launcher) == WorkerProgress(P, f"waiting for a place: on {ip}, {holds}")
            reason = f"it got no place within 5 s: on {ip}, {holds}"
            assert await _next(launcher) == WorkerExited(P, reason, is_unplaced=True)
        head.gpus.give_back()
        async with scene.launcher() as launcher:
            assert sorted((await _ready(launcher, spec(tp=2, device="cuda")))["gpus"].split(",")) == ["0", "1"]

    try:
        asyncio.run(run())
    finally:
        head.gpus.give_back()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("how", ["find", "clear"])
def test_a_place_whose_agent_does_not_answer_is_removed(
    head: Head, held: HeldState, number: signal.Signals, how: str
) -> None:
    order = held.write_config("order", Order(config=spec().config, threads=4))  # all CPUs: the next one needs them, too
    done = subprocess.run(
        [sys.executable, LOST_AGENT, head.address, str(order), str(int(number)), how],
        env=ray_variables(os.environ, head.token_file),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # Ray prints lines, too
    assert said == {"pid": said["pid"], "found": False, "groups": []}
    wait_for(lambda: not is_alive(said["pid"]))


async def test_one_that_waits_for_a_place_is_stopped_at_once(scene: Scene) -> None:
    async with scene.launcher() as launcher:
        await launcher.start_worker(spec(tp=8))
        await _next(launcher)
        await launcher.stop(P, grace_s=600)
        assert await _until(launcher, WorkerExited) == WorkerExited(P, "it was stopped before it had a place")


async def test_a_stubborn_worker_is_killed(scene: Scene) -> None:
    async with scene.launcher("--stubborn") as launcher:
        details = await _ready(launcher)
        await launcher.stop(P, grace_s=0.2)
        assert "signal 9" in (await _until(launcher, WorkerExited)).reason
        wait_for(lambda: _is_gone(details))


async def test_a_fatal_line_is_the_reason(scene: Scene) -> None:
    async with scene.launcher("--fatal", "the model\nis broken") as launcher:
        await launcher.start_worker(spec())
        assert await _until(launcher, WorkerExited) == WorkerExited(P, "the model is broken")


async def test_workers_outlive_the_driver_and_are_found_again(scene: Scene) -> None:
    async with scene.launcher() as launcher:
        details = await _ready(launcher)
        driver = next(
            child for child in psutil.Process().children() if "tandem.controlplane.ray.driver" in child.cmdline()
        )
        driver.kill()
        await launcher.start_worker(spec(D))  # while no launcher listens
        other = await _until(launcher, WorkerReady)
        assert other.worker_id == D
        assert not _is_gone(details)
        await launcher.stop(P, grace_s=20)
        assert "exit code 0" in (await _until(launcher, WorkerExited)).reason
        wait_for(lambda: _is_gone(details))


async def test_a_worker_that_another_controller_left_is_found_and_stopped(scene: Scene) -> None:
    async with scene.launcher() as first:
        details = await _ready(first)
        async with scene.launcher() as second:
            ready = await _until(second, WorkerReady)
            assert ready.details["pid"] == details["pid"]
            (found,) = await second.running()
            assert (found.worker_id, found.role, found.is_ready) == (P, RoleName.PREFILL, True)
            await second.stop(P, grace_s=20)
            # The launcher that learns of the end first removes the place, while the other one still uses it.
            ends = [(await _until(launcher, WorkerExited)).reason for launcher in (first, second)]
            assert any("exit code 0" in reason for reason in ends), ends
            wait_for(lambda: _is_gone(details))


def test_leaving_the_launcher_leaves_nothing(scene: Scene) -> None:
    async def run() -> dict[str, Any]:
        async with scene.launcher("--stubborn") as launcher:
            return await _ready(launcher)

    details = asyncio.run(run())
    wait_for(lambda: _is_gone(details))


async def test_a_wrong_token_is_an_exit_that_says_so(scene: Scene, held: HeldState, environment: Environment) -> None:
    wrong = held.state.path / "wrong.token"
    wrong.write_text("0" * 64)
    async with RayLauncher(
        held, environment, cluster="test", address=scene._head.address, token_file=str(wrong), place_timeout_s=5
    ) as launcher:
        await launcher.start_worker(spec())
        exited = await _until(launcher, WorkerExited)
        assert scene._head.address in exited.reason
        assert "oken" in exited.reason
