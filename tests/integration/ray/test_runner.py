"""A worker's life in an agent, without Ray: where it is forked, what keeps it from starting, when it is an orphan."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.controlplane.model_catalog import BUNDLED, bundled_model
from tandem.controlplane.ray.messages import Order, PlacedOrder, to_json
from tandem.controlplane.ray.placement import ORPHAN_S
from tests.unit.controlplane.ray.orders_rig import ORDER
from tools.fake_gpus import FakeGpus
from tools.running_cluster import is_alive
from tools.waiting import wait_for

from .runner_program import IP

HERE = Path(__file__).resolve().parent
PATIENCE_S = 60.0


class RunnerProcess:
    """`runner_program.py`, controlled from here. A call that hangs ends the program, and with it the test."""

    def __init__(self, folder: Path, path: str, orphan_s: float) -> None:
        variables = {**os.environ, "PATH": path, "TANDEM_STATE_DIR": str(folder / "state")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.ray.runner_program", str(orphan_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            cwd=HERE.parents[2],
            text=True,
        )
        self.reports: list[dict[str, Any]] = []

    def tell(self, *words: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        late = threading.Timer(PATIENCE_S, self.process.kill)
        late.start()
        try:
            self.process.stdin.write(json.dumps(words) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        finally:
            late.cancel()
        assert answer, f"it does not answer to {words}"
        return json.loads(answer)

    def begin(self, charge: PlacedOrder, *, reports: int = 0) -> None:
        """In a thread that is gone when this returns; not before so many reports were made."""
        self.tell("begin", to_json(charge), reports)

    def next(self) -> dict[str, Any]:
        """The next report that it makes."""
        heard = self.tell("listen", len(self.reports), 20.0)
        assert heard, "it reports nothing"
        self.reports.append(json.loads(heard[0]))
        return self.reports[-1]

    def ready(self) -> dict[str, Any]:
        """Return the worker's own description, after nothing but the report that it loads."""
        assert self.next() == {"progress": "loading weights"}
        return dict(self.next()["ready"])

    def await_looks(self, count: int) -> None:
        """Wait until it has looked at its clock so many times more."""
        before = self.tell("looks")
        wait_for(lambda: self.tell("looks") >= before + count)


@pytest.fixture
def gpus(tmp_path: Path) -> FakeGpus:
    return FakeGpus(tmp_path / "bin")


@pytest.fixture
def runner(tmp_path: Path, gpus: FakeGpus) -> Iterator[RunnerProcess]:
    runner = RunnerProcess(tmp_path, gpus.path, ORPHAN_S)
    try:
        yield runner
    finally:
        runner.process.kill()
        runner.process.communicate()


def charge(*, model_dir: str = "/tmp", redis_url: str = "redis://127.0.0.1:1") -> PlacedOrder:
    """One of this machine's controller."""
    config = dataclasses.replace(ORDER.config, model_dir=model_dir, redis_url=redis_url)
    order = Order(config=config, threads=1, arguments=(str(HERE / "placed_worker.py"),))
    return PlacedOrder(order=order, controller_ip=IP)


def test_a_worker_outlives_the_call_that_asked_for_it(runner: RunnerProcess) -> None:
    """The kernel ends it with the thread that forked it, and each call has a thread of its own."""
    runner.begin(charge(), reports=2)
    details = runner.ready()
    assert is_alive(details["pid"])
    assert details["agent"] == runner.process.pid
    runner.tell("stop", 20.0)
    assert runner.next()["exited"].startswith("exit code 0")


def test_a_worker_dies_with_its_agent(runner: RunnerProcess) -> None:
    runner.begin(charge())
    details = runner.ready()
    runner.process.kill()
    wait_for(lambda: not is_alive(details["pid"]))


def test_an_orphan_ends_after_ten_minutes_and_not_before(runner: RunnerProcess) -> None:
    runner.begin(charge())
    details = runner.ready()
    runner.tell("advance", 599.0)
    runner.await_looks(3)
    assert is_alive(details["pid"])
    assert runner.tell("listen", 2, 0.0) == []  # a controller is there again
    runner.tell("advance", 599.0)
    runner.await_looks(3)
    assert is_alive(details["pid"])
    runner.tell("advance", 2.0)
    runner.tell("wait")
    assert not is_alive(details["pid"])
    assert runner.next()["exited"].startswith("exit code 0"), "it was asked, not killed"


def test_an_agent_that_nobody_gives_a_worker_is_over_after_ten_minutes(runner: RunnerProcess) -> None:
    runner.tell("advance", 599.0)
    runner.await_looks(3)
    assert runner.tell("listen", 0, 0.0) == []
    runner.tell("advance", 601.0)
    runner.tell("wait")
    assert runner.next() == {"exited": "it was stopped before it began"}


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://127.0.0.1:6379/0", "127.0.0.1"),
        ("redis://:password@127.8.0.1:6379", "127.8.0.1"),
        ("redis://localhost", "localhost"),
        ("redis://[::1]:6379", "::1"),
        ("unix:///run/redis.sock", "a socket"),
    ],
)
def test_a_redis_of_another_machine_alone_is_refused(runner: RunnerProcess, url: str, where: str) -> None:
    runner.begin(dataclasses.replace(charge(redis_url=url), controller_ip="10.0.0.1"))
    why = f"10.0.0.2 cannot reach the cluster's Redis: it listens on {where} of 10.0.0.1 alone"
    todo = "Start the cluster with --redis URL, which all machines reach"
    assert runner.next() == {"exited": f"{why}. {todo}."}


def test_a_redis_that_all_machines_reach_is_not(runner: RunnerProcess) -> None:
    runner.begin(dataclasses.replace(charge(redis_url="redis://10.0.0.1:6379"), controller_ip="10.0.0.1"))
    assert runner.ready()


def test_a_model_that_is_not_here_is_refused(runner: RunnerProcess) -> None:
    runner.begin(charge(model_dir="/no/such/folder"))
    why = "the model is not on 10.0.0.2: there is no /no/such/folder"
    assert runner.next() == {"exited": f"{why}. Put it there, or use a path that all machines share."}


def test_the_bundled_model_is_found_wherever_it_is(runner: RunnerProcess) -> None:
    runner.begin(charge(model_dir=f"/no/such/folder/{BUNDLED}"))
    assert runner.ready()["model_dir"] == str(bundled_model())


def held(gpus: FakeGpus, wait_s: float) -> tuple[PlacedOrder, str]:
    """A charge for a GPU that another process holds, and the message about it."""
    holds = gpus.hold(1, 61440, 7)
    return dataclasses.replace(charge(), gpus=("0", "1"), gpu_wait_s=wait_s), f"on {IP}, {holds}"


def test_gpus_that_somebody_holds_are_waited_for(runner: RunnerProcess, gpus: FakeGpus) -> None:
    which, holds = held(gpus, 60.0)
    runner.begin(which)
    assert runner.next() == {"progress": f"waiting for a place: {holds}"}
    gpus.give_back()
    assert runner.ready()["gpus"] == "0,1"


def test_gpus_that_are_never_given_back_are_no_place(runner: RunnerProcess, gpus: FakeGpus) -> None:
    which, holds = held(gpus, 0.0)
    runner.begin(which)
    assert runner.next() == {"exited": f"it got no place within 0 s: {holds}", "is_unplaced": True}


def test_who_waits_for_gpus_is_stopped_at_once(runner: RunnerProcess, gpus: FakeGpus) -> None:
    which, _ = held(gpus, 600.0)
    runner.begin(which)
    assert "progress" in runner.next()
    runner.tell("stop", 600.0)
    assert runner.next() == {"exited": "it was stopped before it began."}
