"""A cluster of simulated workers under load, behind a Redis that loses events, is emptied and comes back old.

Afterwards the workers' own books are compared with the router's view of them.
"""

import contextlib
import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from tandem.core.lease_timing import LEASE_S
from tandem.statestore.embedded_redis import PrivateRedis
from tests.chaos.lossy_redis import LossyRedis
from tests.chaos.shared_prompts import NO_ANSWER, SharedPrompts
from tests.chaos.store_dumps import Dump, dump, put, restore
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, kill, running
from tools.waiting import wait_for

WORKERS = 4
LOSS = 0.01
FLAGS = (
    "--engine", "sim", "--prefill", "2", "--decode", "2", "--disaggregation", "always", "--model", str(MODEL),
    "--max-model-len", "512", "--kv-memory", "2MiB",
)  # fmt: skip
TROUBLES = ("worker", "router", "restore", "flush", "last", "stopped")
LEASE_MS = int(LEASE_S * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calm:
    """How a cluster found back. `back_s`: until every worker was connected; `converged_s`: from then until the replica
    equalled what the workers hold; `stale`: of `probes` prompts, those that a worker knew less of than predicted."""

    back_s: float
    converged_s: float
    probes: int
    stale: int
    hits: int


class IndexScene:
    """`trouble(kind)` makes some, `calm()` waits until all is well and proves it. One thread, beside the load's."""

    def __init__(self, cluster: Cluster, server: PrivateRedis, lossy: LossyRedis, rng: random.Random) -> None:
        self._cluster, self._lossy, self._rng = cluster, lossy, rng
        self._redis = redis.Redis.from_url(server.url)
        self.prompts = SharedPrompts()
        self._old = dump(self._redis)
        self._incarnations: dict[str, list[str]] = {}
        self._lapsed: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self.answered = self.failed = 0

    @property
    def lost(self) -> int:
        """Events that Redis never got so far."""
        return self._lossy.lost

    @contextlib.contextmanager
    def load(self, clients: int = 3) -> Iterator[None]:
        """Requests that share prefixes, one after the other in each of these threads, while one in a hundred events is
        lost; of the last requests, all are."""
        is_over = threading.Event()
        seeds = [self._rng.random() for _ in range(clients)]
        threads = [threading.Thread(target=self._ask_on, args=(random.Random(seed), is_over)) for seed in seeds]
        self._lossy.rate = LOSS
        for thread in threads:
            thread.start()
        try:
            self._await_answers(8 * clients)
            yield
            self._await_answers(8 * clients)
            self._lossy.rate = 1.0
            self._await_answers(clients)
        finally:
            is_over.set()
            for thread in threads:
                thread.join(90)
            self._lossy.rate = 0.0

    def trouble(self, kind: str) -> str:
        """Make trouble of this kind; returns what was done, in words."""
        if kind == "worker":
            part, victim = self._rng.randrange(2), self._victim()
            kill((victim["pid"], victim["rank_pids"][0])[part])
            return f"kill -9 of {victim['worker']}'s {('host', 'rank')[part]}"
        if kind == "router":
            kill(self._cluster.status()["router"]["pid"])
            self._wait(self._is_ready, 60, "the router is back")
            return "kill -9 of the router"
        if kind == "stopped":
            return self._stop_and_wake()
        if kind == "last":
            lost = self._lossy.lost
            self._lossy.rate = 1.0
            self._wait(lambda: self._lossy.lost > lost, 60, "an event is lost")
            self._lossy.rate = LOSS
            return "an event was lost for certain"
        now = dump(self._redis)
        restore(self._redis, self._old if kind == "restore" else {})
        old, self._old = self._old, now
        return f"{len(now)} keys gone, {len(old) if kind == 'restore' else 0} of an old dump back"

    def _victim(self) -> dict[str, Any]:
        here = [w for w in self._cluster.status()["workers"] if w["is_connected"]]
        return dict(self._rng.choice(sorted(here, key=lambda w: str(w["worker"]))))

    def _stop_and_wake(self) -> str:
        """Stop a worker until it is out of use everywhere, and wake it up: its old incarnation is then unknown."""
        victim = self._victim()
        worker, incarnation, pids = victim["worker"], victim["incarnation"], [victim["pid"], *victim["rank_pids"]]

        def is_gone() -> bool:
            return all(
                (w["worker"], w["incarnation"]) != (worker, incarnation)
                or not (w["is_connected"] or w["is_registered"])
                for w in self._cluster.status()["workers"]
            )

        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            stopped_s = time.monotonic()
            self._wait(
                lambda: is_gone() and time.monotonic() - stopped_s > LEASE_S + 0.5,
                30,
                f"{worker} is gone, and its lease is over by any clock",
            )
            self._lapsed.add((worker, incarnation))
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        return f"{worker} was stopped until its lease was over, and woke up"

    def haunt(self, *, is_router_new: bool) -> str:
        """Kill a prefill worker, and once it has a successor put its lease, its registration and its blocks back from
        an old dump, again and again for two leases, before a router that knows better or one that knows nothing.
        AssertionError if it is taken for alive, or any of its blocks for held. Call without load."""
        known = [self.prompts.prompt(self._rng) for _ in range(10)]
        for prompt in known:
            assert self.prompts.ask(self._cluster.api, prompt)[0] == 200
        self._wait(self._is_equal, 60, "the index equals what the workers hold")
        held = {worker: max(self._claims(worker, known)) for worker in ("prefill-0", "prefill-1")}
        worker = max(held, key=lambda name: held[name])
        assert held[worker] > 0, "somebody holds something"
        (dead,) = [w for w in self._cluster.status()["workers"] if w["worker"] == worker]
        mark = f"{{{worker}}}".encode()
        ghost: Dump = {key: (value, 4 * LEASE_MS) for key, (value, _) in dump(self._redis).items() if mark in key}
        assert {key.rsplit(b":", 1)[1] for key in ghost} == {b"lease", b"events", b"blocks"}
        for pid in (dead["pid"], *dead["rank_pids"]):
            kill(pid)
        self._wait(lambda: self._incarnation(worker) not in ("", dead["incarnation"]), 60, f"{worker} has a successor")
        self._lapsed.add((worker, dead["incarnation"]))
        if is_router_new:
            put(self._redis, ghost)
            kill(self._cluster.status()["router"]["pid"])
        began_s = time.monotonic()
        while time.monotonic() - began_s < 2 * LEASE_S or not self._is_ready():
            assert time.monotonic() - began_s < 60, "the router is not ready"
            put(self._redis, ghost)
            self._watch_incarnations()
            assert is_router_new or not self._is_followed(worker, dead["incarnation"]), "a dead worker is believed in"
            assert not any(self._claims(worker, known)), "blocks of a dead worker are claimed"
        self._wait(lambda: self._incarnation(worker) not in ("", dead["incarnation"]), 30, "it is over")
        return f"{worker} haunted {'a new' if is_router_new else 'the'} router"

    def _claims(self, worker: str, prompts: Sequence[list[int]]) -> list[int]:
        """Return the tokens of each prompt that the router assumes this worker holds; [] = the router does not
        answer."""
        key = Path(self._cluster.context["admin_key_file"]).read_text().strip()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        claims = []
        with contextlib.suppress(*NO_ANSWER):
            for prompt in prompts:
                url, body = f"{self._cluster.context['admin']}/admin/v1/route/explain", json.dumps({"prompt": prompt})
                with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers), timeout=5) as answer:
                    rows = [row for row in json.load(answer)["workers"] if row["worker"] == worker]
                claims += [max(row["held_tokens"], row["reusable_tokens"]) for row in rows]
        return claims

    def _incarnation(self, worker: str) -> str:
        """Under which it is connected and registered; "" = it is not."""
        with contextlib.suppress(*NO_ANSWER):
            for row in self._cluster.status()["workers"]:
                if row["worker"] == worker and row["is_connected"] and row["is_registered"]:
                    return str(row["incarnation"])
        return ""

    def _is_followed(self, worker: str, incarnation: str) -> bool:
        """True if the router takes this incarnation for the worker, connected or not."""
        with contextlib.suppress(*NO_ANSWER):
            rows = self._cluster.status()["workers"]
            return any((row["worker"], row["incarnation"]) == (worker, incarnation) for row in rows)
        return False

    def calm(self, probes: int = 20) -> Calm:
        """Call without load. AssertionError if the cluster does not recover, or believes in a worker that is gone."""
        began_s = time.monotonic()
        self._wait(self._is_whole, 90, "every worker is connected")
        back_s = time.monotonic()
        self._wait(self._is_equal, 60, "the index equals what the workers hold")
        converged_s = time.monotonic()
        timings = [self._probe() for _ in range(probes)]
        by_index = [timing for timing in timings if timing["prediction_basis"] == "index"]
        stale = sum(timing["predicted_cached_tokens"] > timing["cached_tokens"] for timing in by_index)
        hits = sum(timing["cached_tokens"] > 0 for timing in timings)
        return Calm(
            back_s=round(back_s - began_s, 2),
            converged_s=round(converged_s - back_s, 2),
            probes=probes,
            stale=stale,
            hits=hits,
        )

    def _probe(self) -> dict[str, Any]:
        """Timing of one request, sent when the router knows what the one before it changed."""
        self._wait(self._is_equal, 60, "the index equals what the workers hold")
        status, timing = self.prompts.ask(self._cluster.api, self.prompts.prompt(self._rng))
        assert status == 200, f"{status} though nothing is wrong"
        return timing

    # ---- load ------------------------------------------------------------------------------------------------------

    def _await_answers(self, count: int) -> None:
        wanted = self.answered + count
        self._wait(lambda: self.answered >= wanted, 90, f"{count} more answers")

    def _ask_on(self, rng: random.Random, is_over: threading.Event) -> None:
        while not is_over.is_set():
            status, _ = self.prompts.ask(self._cluster.api, self.prompts.prompt(rng))
            with self._lock:
                self.answered += status == 200
                self.failed += status != 200
            if status != 200:
                is_over.wait(0.05)

    # ---- what is true ----------------------------------------------------------------------------------------------

    def _is_ready(self) -> bool:
        with contextlib.suppress(*NO_ANSWER):
            return self._cluster.get("/readyz")[0] == 200
        return False

    def _is_whole(self) -> bool:
        with contextlib.suppress(*NO_ANSWER):
            workers = self._cluster.status()["workers"]
            here = [w for w in workers if w["is_connected"] and w["is_registered"]]
            return len(here) == WORKERS and self._is_ready()
        return False

    def _is_equal(self) -> bool:
        index = self._index()
        return len(index) == WORKERS and all(one["is_equal"] for one in index.values())

    def _index(self) -> dict[str, dict[str, Any]]:
        """Return the blocks of each worker by its own books, and by the router's; {} = one of them did not answer."""
        with contextlib.suppress(*NO_ANSWER):
            found = self._cluster.admin("/admin/v1/kv/audit")
            return {} if found["unanswered"] else {one["worker"]: one["index"] for one in found["workers"]}
        return {}

    def _watch_incarnations(self) -> None:
        """A worker that was replaced, or was gone for longer than its lease, may never be connected again."""
        with contextlib.suppress(*NO_ANSWER):
            for worker in self._cluster.status()["workers"]:
                assert not worker["is_connected"] or (worker["worker"], worker["incarnation"]) not in self._lapsed
                known = self._incarnations.setdefault(worker["worker"], [])
                if worker["is_connected"] and worker["incarnation"] not in known[-1:]:
                    assert worker["incarnation"] not in known, f"{worker['worker']} is an earlier incarnation again"
                    known.append(worker["incarnation"])

    def _wait(self, condition: Any, timeout_s: float, what: str) -> None:
        def look() -> bool:
            self._watch_incarnations()
            return bool(condition())

        wait_for(look, timeout_s, what)


@contextlib.contextmanager
def index_scene(folder: Path, seed: int) -> Iterator[IndexScene]:
    """A running scene; the cluster has to stop in order at its end."""
    rng = random.Random(seed)
    with (
        PrivateRedis.start(folder / "redis", "secret") as server,
        LossyRedis(server.port, random.Random(rng.random())) as lossy,
        running(*FLAGS, "--redis", server.url.replace(f":{server.port}/", f":{lossy.port}/")) as cluster,
    ):
        yield IndexScene(cluster, server, lossy, rng)
