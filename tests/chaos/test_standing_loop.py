"""An event loop that stands for seconds while its process lives costs no stream; one that stands for longer, and a
process that is stopped, costs all of its own."""

import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis

from tandem.core.lease_timing import LEASE_S, STAND_S
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys, Member
from tests.chaos import survivors
from tests.chaos.standing_hook.sitecustomize import STANDS, STANDS_LOCKED
from tests.chaos.survivors import Client, wait_whole
from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

pytestmark = pytest.mark.exec_start
CONFIG = """
[pools]
prefill = 1
decode = 1
[worker]
engine = "sim"
threads = 1
[worker.sim]
prefill_tokens_per_s = 1500.0
decode_step_s = 0.02
[router]
disaggregation = "always"
worker_wait_s = 30.0
"""
WORKERS = 2
SHORT, LONG = STANDS
(LOCKED,) = STANDS_LOCKED
SECONDS = STANDS | STANDS_LOCKED
STOPPED_S = 3.0
HOOK = Path(__file__).with_name("standing_hook")


class Scene:
    """A cluster with processes that stand still on request, and its Redis."""

    def __init__(self, cluster: Cluster, server: PrivateRedis) -> None:
        self.cluster = cluster
        self._redis: Any = redis.Redis.from_url(server.url)
        self._keys = Keys(cluster.status()["cluster"])

    def pid(self, process: str) -> int:
        status = self.cluster.status()
        if process == "router":
            return int(status["router"]["pid"])
        return next(int(row["pid"]) for row in status["workers"] if row["worker"] == process)

    def incarnations(self) -> dict[str, str]:
        return {row["worker"]: row["incarnation"] for row in self.cluster.status()["workers"]}

    def beats(self) -> int:
        """Return the number of the router's beats; -1 = it has no lease."""
        return int(self._redis.hget(self._keys.lease(Member.ROUTER, "router-0"), "beat") or -1)

    def told(self, event: str) -> list[tuple[float, str]]:
        """Return the times at which processes logged this event, in seconds since the epoch, and their lines."""
        found = []
        for log in self.cluster.folder.glob("*/logs/*.log"):
            for line in log.read_text(errors="replace").splitlines():
                if match := re.match(rf"(\S+)Z \w+ +\S+ {event}\b", line):
                    found.append((datetime.fromisoformat(match[1]).replace(tzinfo=UTC).timestamp(), line))
        return sorted(found)

    def ends(self) -> list[str]:
        """Ends of streams, of all processes."""
        events = ("worker lost", "router gone", "peer channel ended", "registered again")
        return [line for event in events for _, line in self.told(event)]

    def ask(self, max_tokens: int) -> dict[str, Client]:
        bodies = survivors.asks(max_tokens=max_tokens, prompt_tokens=100)
        return {kind: Client(self.cluster, body) for kind, body in bodies.items()}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("standing")
    with pytest.MonkeyPatch.context() as patch, PrivateRedis.start(folder / "redis", "secret") as server:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HOOK), os.environ.get("PYTHONPATH", "")]))
        with running("--redis", server.url, config=CONFIG) as cluster:
            yield Scene(cluster, server)


@pytest.mark.parametrize(
    ("process", "how"),
    [("router", SHORT), ("router", LOCKED), ("decode-0", SHORT), ("prefill-0", SHORT)],
    ids=["router", "router, lock held", "decode worker", "prefill worker"],
)
def test_a_loop_that_stands_for_a_while_loses_no_stream(scene: Scene, process: str, how: int) -> None:
    wait_whole(scene.cluster, WORKERS)
    right = {kind: client.transcript() for kind, client in scene.ask(300).items()}
    before, ends, stood = scene.incarnations(), scene.ends(), len(scene.told("the event loop stood"))
    attempts, pid = scene.cluster.metric("tandem_reattempts_total"), scene.pid(process)
    clients = scene.ask(300)
    wait_for(lambda: all(client.events > 3 for kind, client in clients.items() if kind != "whole"), what="all stream")
    beats, over_s = scene.beats(), time.monotonic() + SECONDS[how]
    os.kill(pid, how)
    if how != LOCKED:
        wait_for(lambda: scene.beats() >= beats + SECONDS[how], SECONDS[how], "the router holds its lease meanwhile")
    wait_for(lambda: time.monotonic() > over_s, what="it goes on")
    survivors.check(clients, right)
    assert scene.cluster.metric("tandem_reattempts_total") == attempts
    assert scene.ends() == ends
    assert scene.incarnations() == before
    assert scene.pid(process) == pid
    assert len(scene.told("the event loop stood")) == stood + 1


def test_a_router_whose_loop_stands_for_too_long_is_given_up(scene: Scene) -> None:
    wait_whole(scene.cluster, WORKERS)
    before, gone = scene.incarnations(), len(scene.told("router gone"))
    clients = scene.ask(900)  # longer than STAND_S, and short enough for a slow machine
    wait_for(lambda: all(client.events > 3 for kind, client in clients.items() if kind != "whole"), what="all stream")
    pid = scene.pid("router")
    began_s = time.time()
    os.kill(pid, LONG)
    wait_for(lambda: len(scene.told("router gone")) == gone + WORKERS, what="both workers ended its stream")
    assert scene.told("router gone")[gone][0] - began_s > STAND_S - 1
    wait_for(lambda: scene.beats() < 0, what="its lease is over")
    wait_for(lambda: scene.beats() > 0, what="it goes on and registers")
    for client in clients.values():
        assert client.transcript().errors == [], "attempts that were lost were made again"
    wait_whole(scene.cluster, WORKERS)
    assert (scene.incarnations(), scene.pid("router")) == (before, pid)


def test_a_worker_whose_loop_stands_for_too_long_is_somebody_else(scene: Scene) -> None:
    wait_whole(scene.cluster, WORKERS)
    before, lost = scene.incarnations(), len(scene.told("worker lost"))
    pid, began_s = scene.pid("decode-0"), time.time()
    os.kill(pid, LONG)
    wait_for(lambda: len(scene.told("worker lost")) > lost, what="the router gave it up")
    assert scene.told("worker lost")[lost][0] - began_s > STAND_S - 1
    wait_for(lambda: scene.incarnations().get("decode-0", before["decode-0"]) != before["decode-0"], what="it is back")
    wait_whole(scene.cluster, WORKERS)
    assert scene.pid("decode-0") == pid
    assert scene.incarnations()["prefill-0"] == before["prefill-0"]


def test_a_router_that_is_stopped_is_known_within_three_seconds(scene: Scene) -> None:
    wait_whole(scene.cluster, WORKERS)
    gone, pid = len(scene.told("router gone")), scene.pid("router")
    began_s = time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: len(scene.told("router gone")) == gone + WORKERS, what="both workers ended its stream")
    finally:
        os.kill(pid, signal.SIGCONT)
    took_s = [at_s - began_s for at_s, _ in scene.told("router gone")[gone:]]
    print(f"known after {took_s} s")
    assert LEASE_S - 1 < min(took_s) <= max(took_s) <= STOPPED_S
    wait_whole(scene.cluster, WORKERS)


def test_a_worker_host_that_is_stopped_is_known_within_three_seconds(scene: Scene) -> None:
    wait_whole(scene.cluster, WORKERS)
    lost, pid = len(scene.told("worker lost")), scene.pid("decode-0")
    began_s = time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: len(scene.told("worker lost")) > lost, what="the router gave it up")
    finally:
        os.kill(pid, signal.SIGCONT)
    took_s = scene.told("worker lost")[lost][0] - began_s
    print(f"known after {took_s} s")
    assert LEASE_S - 1 < took_s <= STOPPED_S
    wait_whole(scene.cluster, WORKERS)
