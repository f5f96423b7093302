"""kill -9 of any process of a worker without a spare: clients hear of it, nothing hangs, it comes back and serves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.core.liveness import LEASE_S
from tools.running_cluster import Cluster, is_alive, kill, running
from tools.waiting import wait_for

HEAR_OF_IT_S = 5.0
REST_ENDS_S = 5.0
"""The kernel ends it at once; what takes time is to give its memory back."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Nobody waits for a worker that was lost, so that clients hear of it."""
    config = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    config.write_text("[router]\nworker_wait_s = 0\n")
    flags = ("--prefill", "1", "--decode", "1", "--disaggregation", "always", "--threads", "1")
    with running("--config", str(config), *flags) as cluster:
        yield cluster


class Stream(threading.Thread):
    """One long streamed answer, read in a thread of its own."""

    def __init__(self, cluster: Cluster, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(daemon=True)
        body = {
            "model": "tandem-tiny",
            "prompt": [(13 * k) % 900 + 600 for k in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        self._request = urllib.request.Request(f"{cluster.api}/v1/completions", data, headers)
        self.tokens = 0
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self.ended_s = 0.0
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=60) as response:
                for raw in response:
                    line = raw.decode().strip()
                    if line == "data: [DONE]":
                        self.is_done = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        self.error = event.get("error", self.error)
                        self.tokens += 1
        except urllib.error.HTTPError as error:
            with error:
                self.error = json.load(error)["error"]
        self.ended_s = time.monotonic()


def is_serving(cluster: Cluster) -> bool:
    """A short answer comes back whole."""
    body = {"model": "tandem-tiny", "prompt": "A list is", "max_tokens": 4, "ignore_eos": True}
    status, answer = cluster.post("/v1/completions", body)
    return status == 200 and answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("part", [0, 1], ids=["host", "rank"])
@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
def test_kill_while_a_request_is_there(cluster: Cluster, worker: str, part: int) -> None:
    wait_for(lambda: is_serving(cluster), 60, "the cluster serves")
    router_pid = cluster.status()["router"]["pid"]
    pids = cluster.pids()[worker]
    streams = [Stream(cluster, 100, 3000 if worker == "decode-0" else 300) for _ in range(3)]
    if worker == "decode-0":
        wait_for(lambda: all(s.tokens > 3 for s in streams), 30, "tokens flow")
    else:
        streams += [Stream(cluster, 3000 + k, 50) for k in range(3)]
        wait_for(lambda: _in_flight(cluster, worker) > 0, 30, "a prompt is being computed")
    killed_s = time.monotonic()
    kill(pids[part])
    wait_for(lambda: not any(is_alive(pid) for pid in pids), REST_ENDS_S, "the rest of the worker is gone")
    affected = streams if worker == "decode-0" else streams[3:]
    for stream in affected:
        stream.join(HEAR_OF_IT_S + 1)
        assert not stream.is_alive()
        assert stream.error is not None or stream.is_done
        assert stream.ended_s - killed_s < HEAR_OF_IT_S or stream.is_done
    if worker == "decode-0":
        assert all(stream.error is not None and not stream.is_done for stream in streams)
        assert {stream.error["code"] for stream in streams if stream.error} == {"worker_lost"}
    else:
        assert any(stream.error is not None for stream in affected)
    wait_for(lambda: is_serving(cluster), 60, "the restarted worker serves")
    assert cluster.status()["router"]["pid"] == router_pid
    assert cluster.pids()[worker] != pids
    for stream in streams:
        stream.join(60)
        assert not stream.is_alive()
    wait_for(lambda: _is_quiet(cluster), 10, "nothing in flight, nothing held")


@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
def test_a_worker_that_is_stopped_and_wakes_up(cluster: Cluster, worker: str) -> None:
    """SIGSTOP of all of it: clients hear of it; after SIGCONT it is somebody else, and serves."""
    wait_for(lambda: is_serving(cluster), 60, "the cluster serves")
    wait_for(lambda: _is_quiet(cluster), 10, "nothing in flight")
    before = {w["worker"]: w["incarnation"] for w in cluster.status()["workers"]}
    pids = cluster.pids()[worker]
    streams = [Stream(cluster, 100, 3000) for _ in range(3)] if worker == "decode-0" else []
    if streams:
        wait_for(lambda: all(s.tokens > 3 for s in streams), 30, "tokens flow")
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        if not streams:
            streams = [Stream(cluster, 200, 20)]
        for stream in streams:
            stream.join(HEAR_OF_IT_S + 5)
            assert not stream.is_alive()
            assert stream.error is not None
            print(f"heard of it after {stream.ended_s - stopped_s:.1f} s: {stream.error['code']}")
        wait_for(lambda: time.monotonic() - stopped_s > LEASE_S + 0.5, 10, "its lease lapsed by any clock")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: is_serving(cluster), 60, "the worker that woke up serves")
    after = {w["worker"]: w["incarnation"] for w in cluster.status()["workers"]}
    assert cluster.pids()[worker] == pids
    assert after[worker] != before[worker]
    wait_for(lambda: _is_quiet(cluster), 10, "nothing in flight, nothing held")


def _in_flight(cluster: Cluster, worker: str) -> int:
    return sum(w["in_flight"] for w in cluster.status()["workers"] if w["worker"] == worker)


def _is_quiet(cluster: Cluster) -> bool:
    status = cluster.status()
    held = [b[k] for w in status["workers"] for b in w["blocks"] for k in ("request", "pushing", "reserved")]
    return status["router"]["in_flight"] == 0 and not any(held) and len(status["workers"]) == 2
