"""Real child processes: their output is reported, their ends are noticed, and they leave nothing behind."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest

from tandem.controlplane.child_process import ChildProcess
from tandem.controlplane.environment import Environment
from tandem.controlplane.launcher import WorkerExited, WorkerProgress, WorkerReady, WorkerReport, WorkerSpec
from tandem.controlplane.local import LocalLauncher
from tandem.controlplane.state_dir import HeldState
from tandem.core.config import WorkerConfig, WorkerSection
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName

from .conftest import FAKE_WORKER

W = WorkerId("prefill-0")
pytestmark = pytest.mark.usefixtures("no_process_left")


def _spec() -> WorkerSpec:
    config = WorkerConfig(
        cluster="test", worker_id=W, role=RoleName.PREFILL, pool="prefill", model="m", model_dir="/m", revision="",
        dtype="auto", max_model_len=0, redis_url="unix:///none", secret_file="s", runtime_dir="/tmp",
        settings=WorkerSection(device="cpu"),
    )  # fmt: skip
    return WorkerSpec(config=config, threads=3)


async def _next(launcher: LocalLauncher) -> WorkerReport:
    return await asyncio.wait_for(anext(aiter(launcher.watch())), 60)


async def _ready(launcher: LocalLauncher) -> WorkerReady:
    await launcher.start_worker(_spec())
    assert await _next(launcher) == WorkerProgress(W, "loading weights")
    ready = await _next(launcher)
    assert isinstance(ready, WorkerReady)
    return ready


async def test_a_worker_is_out_of_the_terminals_reach_and_in_its_launchers_session(
    held: HeldState, environment: Environment
) -> None:
    """Ctrl-C is for the launcher. A session of its own would have the scheduler weigh workers instead of threads."""
    async with LocalLauncher(held, environment, command=FAKE_WORKER) as launcher:
        pid = (await _ready(launcher)).details["pid"]
        assert os.getpgid(pid) != os.getpgid(0)
        assert os.getsid(pid) == os.getsid(0)


async def test_reports_progress_then_ready_then_the_orderly_end(held: HeldState, environment: Environment) -> None:
    async with LocalLauncher(held, environment, command=FAKE_WORKER) as launcher:
        ready = await _ready(launcher)
        assert ready.details["omp"] == "3"
        assert psutil.pid_exists(ready.details["pid"])
        await launcher.stop(W, grace_s=10)
        exited = await _next(launcher)
        assert isinstance(exited, WorkerExited)
        assert "exit code 0" in exited.reason
        assert not psutil.pid_exists(ready.details["pid"])
    log = held.state.log_file(W).read_text()
    assert "this line is no JSON" in log


async def test_a_fatal_line_is_the_reason(held: HeldState, environment: Environment) -> None:
    command = (*FAKE_WORKER, "--fatal", "the model\nis broken")
    async with LocalLauncher(held, environment, command=command) as launcher:
        await launcher.start_worker(_spec())
        assert await _next(launcher) == WorkerExited(W, "the model is broken")


async def test_without_a_fatal_line_the_log_speaks(held: HeldState, environment: Environment) -> None:
    async with LocalLauncher(held, environment, command=(*FAKE_WORKER, "--crash")) as launcher:
        await launcher.start_worker(_spec())
        exited = await _next(launcher)
        assert isinstance(exited, WorkerExited)
        assert "exit code 1" in exited.reason
        assert "something about a missing library" in exited.reason


async def test_a_program_that_does_not_exist_is_an_exit(held: HeldState, environment: Environment) -> None:
    async with LocalLauncher(held, environment, command=("/no/such/program",)) as launcher:
        await launcher.start_worker(_spec())
        exited = await _next(launcher)
        assert isinstance(exited, WorkerExited)
        assert "No such file" in exited.reason


async def test_what_keeps_a_process_from_starting_is_an_exit(
    held: HeldState, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalLauncher(held, environment, command=FAKE_WORKER) as launcher:
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/no/such/python")
            await launcher.start_worker(_spec())
        shutil.rmtree(held.state.config_dir)
        await launcher.start_worker(_spec())
        for what in ("/no/such/python", str(held.state.config_dir)):
            exited = await _next(launcher)
            assert isinstance(exited, WorkerExited)
            assert "it could not be started: " in exited.reason
            assert what in exited.reason


def test_a_process_that_cannot_be_watched_does_not_run_on(held: HeldState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors ran out after it was started: it would have no owner."""
    seen: list[int] = []

    def refuse(pid: int) -> int:
        seen.append(pid)
        raise OSError(errno.EMFILE, "too many open files")

    async def run() -> None:
        monkeypatch.setattr(os, "pidfd_open", refuse)
        sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
        with pytest.raises(OSError, match="too many open files"):
            ChildProcess.start(sleeper, variables=dict(os.environ), log_file=held.state.log_file("sleeper"))

    asyncio.run(run())
    assert [psutil.pid_exists(pid) for pid in seen] == [False]


async def test_a_worker_whose_output_cannot_be_read_is_ended(
    held: HeldState, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no room for watching it")

    async with LocalLauncher(held, environment, command=FAKE_WORKER) as launcher:
        monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", refuse)
        await launcher.start_worker(_spec())
        exited = await _next(launcher)
        assert isinstance(exited, WorkerExited)
        assert "its output cannot be read: " in exited.reason


def test_when_the_leader_dies_its_group_dies(
    held: HeldState, environment: Environment, until: Callable[[Callable[[], object]], None]
) -> None:
    async def run() -> int:
        async with LocalLauncher(held, environment, command=(*FAKE_WORKER, "--child")) as launcher:
            ready = await _ready(launcher)
            os.kill(ready.details["pid"], signal.SIGKILL)
            exited = await _next(launcher)
            assert isinstance(exited, WorkerExited)
            assert "signal 9" in exited.reason
            return int(ready.details["child"])

    child = asyncio.run(run())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("hurried", [False, True])
async def test_a_stubborn_worker_is_killed(held: HeldState, environment: Environment, hurried: bool) -> None:
    hurry = asyncio.Event()
    command = (*FAKE_WORKER, "--stubborn", "--child")
    async with LocalLauncher(held, environment, command=command, hurry=hurry) as launcher:
        await _ready(launcher)
        stop = asyncio.create_task(launcher.stop(W, grace_s=600 if hurried else 0.2))
        hurry.set() if hurried else None
        await asyncio.wait_for(stop, 60)
        exited = await _next(launcher)
        assert isinstance(exited, WorkerExited)
        assert "signal 9" in exited.reason


async def test_leaving_the_launcher_leaves_nothing(held: HeldState, environment: Environment) -> None:
    async with LocalLauncher(held, environment, command=(*FAKE_WORKER, "--stubborn", "--child")) as launcher:
        await _ready(launcher)


PARENT = """
import asyncio, os, sys
from pathlib import Path
from tandem.controlplane.child_process import ChildProcess

async def main():
    sleeper = [sys.executable, "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()"]
    child = ChildProcess.start(sleeper, variables=dict(os.environ), log_file=Path(sys.argv[1]))
    async for line in child.lines():
        print(line, flush=True)

asyncio.run(main())
"""


def test_children_die_with_a_parent_that_is_killed(
    held: HeldState, until: Callable[[Callable[[], object]], None]
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(held.state.log_file("sleeper"))], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


BUSY = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("busy", flush=True)
signal.sigwait([signal.SIGUSR1])
print(*(sys.stdin.readline().split()[0] for _ in range(2000)))
"""


async def test_what_a_busy_child_does_not_read_yet_is_kept(held: HeldState) -> None:
    """More than a pipe holds; each line may be an order."""
    orders = [f"{number} {'x' * 100}" for number in range(2000)]
    child = ChildProcess.start(
        [sys.executable, "-c", BUSY],
        variables=dict(os.environ),
        log_file=held.state.log_file("busy"),
        takes_input=True,
    )
    lines = aiter(child.lines())
    try:
        assert await asyncio.wait_for(anext(lines), 60) == "busy"
        for order in orders:
            child.write(order)
        os.kill(child.pid, signal.SIGUSR1)
        assert (await asyncio.wait_for(anext(lines), 60)).split() == [order.split()[0] for order in orders]
        assert await asyncio.wait_for(child.wait(), 60) == 0
        with pytest.raises(BrokenPipeError):
            child.write("too late")
    finally:
        child.kill()
        await child.wait()


def test_an_endless_line_is_dropped(held: HeldState) -> None:
    code = "print('x' * 1_000_000); print('after')"

    async def run() -> list[str]:
        child = ChildProcess.start(
            [sys.executable, "-c", code], variables=dict(os.environ), log_file=held.state.log_file("long")
        )
        lines = [line async for line in child.lines() if "after" in line]
        assert await asyncio.wait_for(child.wait(), 60) == 0
        return lines

    assert asyncio.run(run()) == ["after"]
