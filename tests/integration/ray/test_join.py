"""`clusterctl join`: a machine that joins gets workers that wait for its class; leaving or dying, it leaves nothing."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.controlplane.launcher import WorkerExited, WorkerProgress, WorkerReady
from tools.running_cluster import is_alive
from tools.waiting import wait_for, wait_for_async

from .conftest import Head
from .test_ray_launcher import P, Scene, _next, _until, scene, spec

__all__ = ["scene"]


class Joined:
    """`clusterctl join` in a process of its own."""

    def __init__(self, head: Head, folder: Path, *flags: str) -> None:
        self._out = folder / "join.out"
        command = [sys.executable, "-m", "tandem.clusterctl", "join", head.address, *flags]
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        self._seen: set[int] = set()

    @property
    def said(self) -> str:
        return self._out.read_text()

    def look(self) -> None:
        self._seen |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}

    def left(self) -> list[str]:
        """Return the processes below it that still run."""
        assert self._seen
        return [_named(pid) for pid in self._seen if is_alive(pid)]


def _named(pid: int) -> str:
    try:
        return f"{pid} {psutil.Process(pid).cmdline()}"
    except psutil.NoSuchProcess:
        return f"{pid}"


@contextlib.contextmanager
def joined(head: Head, folder: Path) -> Iterator[Joined]:
    node = Joined(head, folder, "--token-file", head.token_file, "--hardware", "h100", "--cpus", "2", "--gpus", "0")
    try:
        wait_for(lambda: "joined" in node.said or node.process.poll() is not None, 60)
        assert f"joined {head.address} as " in node.said, node.said
        assert "2 CPU of class h100" in node.said
        yield node
    finally:
        node.process.kill()
        node.process.wait()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_who_waits_for_its_class_gets_it_and_loses_it_when_it_leaves(
    scene: Scene, head: Head, tmp_path: Path, number: signal.Signals
) -> None:
    async with scene.launcher(place_timeout_s=300.0) as launcher:  # the node may take a minute to join
        await launcher.start_worker(spec(hardware="h100"))
        waiting = await _next(launcher)
        assert isinstance(waiting, WorkerProgress)
        assert "no node of class h100" in waiting.text
        with joined(head, tmp_path) as node:
            ready = await _until(launcher, WorkerReady)
            node.look()
            assert ready.details["pid"] in node._seen
            node.process.send_signal(number)
            exited = await _until(launcher, WorkerExited)
            assert exited.worker_id == P
            await wait_for_async(lambda: node.process.poll() is not None)
            assert (node.process.returncode == 0) == (number is signal.SIGINT), node.said
            try:
                await wait_for_async(lambda: not node.left())
            except AssertionError as error:
                raise AssertionError(f"these are left: {node.left()}") from error


def _fails(head: Head, folder: Path, *flags: str) -> tuple[int, str]:
    node = Joined(head, folder, *flags)
    return node.process.wait(timeout=90), node.said


def test_a_wrong_token_is_told(head: Head, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.token"
    wrong.write_text("0" * 64)
    code, said = _fails(head, tmp_path, "--token-file", str(wrong))
    assert code == 1
    assert "oken" in said.splitlines()[-1]


def test_an_address_where_nobody_is_is_told_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tandem.clusterctl", "join", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "no cluster answers at 127.0.0.1:1" in done.stderr
