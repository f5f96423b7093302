"""Workers of a real cluster that stand still for longer than their lease while the registry is lost or comes back old,
and that wake up then; and workers that are killed. Every answer is held against the oracle of the simulated engine."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from tokenizers import Tokenizer

from tandem.core.block_hash import BlockHash
from tandem.core.ids import GroupId, Incarnation, WorkerId
from tandem.core.lease_timing import LEASE_S
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.events import BlockChange, BlockEvent
from tandem.statestore.index.publisher import BlockEventPublisher
from tandem.statestore.keys import Keys, Member
from tests.chaos.store_dumps import Dump, dump, restore
from tests.chaos.survivors import STREAM, Client, wait_whole
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, kill, running
from tools.waiting import wait_for, wait_for_async

CONFIG = """
[pools]
prefill = 2
decode = 2
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
WORKERS, CLIENTS = 4, 4
PROMPT_TOKENS, ANSWER_TOKENS = 1200, 60
MOMENTS = ("idle", "at work")
"""At work: a prefill worker in the midst of a push, a decode worker in the midst of an answer."""
STORES = ("kept", "emptied", "old dump", "old files")
"""The state of the volatile store meanwhile. Old dump: as it was just before, the leases with the time that they had
left then, the worker's own with more. Old files: Redis ends, and starts again on its files of then."""
_PASSWORD = "secret"
_OLD_LEASE_MS = int(4 * LEASE_S * 1000)


@dataclass(frozen=True, slots=True)
class Cell:
    """The worker that stands still, its activity then, and the state of the volatile store."""

    role: str
    moment: str
    store: str

    def __str__(self) -> str:
        return f"{self.role} worker, {self.moment}, store {self.store}"


CELLS = [Cell(role, moment, store) for role in ("prefill", "decode") for moment in MOMENTS for store in STORES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """`out_s`: from the stop until the router took it out of rotation. `back_s`: from its waking up until the router
    has it, under another incarnation. `refused`: its counters of refused writes to the index and the registry since it
    started; `dropped`: frames of all workers that fences refused."""

    out_s: float
    back_s: float
    reattempts: int
    refused: dict[str, int]
    dropped: int


class FrozenScene:
    """A cluster of two workers of each role and its Redis; every method leaves it whole and quiet."""

    def __init__(self, cluster: Cluster, server: PrivateRedis, folder: Path, rng: random.Random) -> None:
        self._cluster, self._server, self._folder, self._rng = cluster, server, folder, rng
        self._redis = redis.Redis.from_url(server.url)
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._keys = Keys(cluster.status()["cluster"])

    def freeze(self, cell: Cell) -> Frozen:
        """Stop a worker, let its lease lapse, do the cell's change to the store, and wake it up. AssertionError if a
        request fails or is answered wrongly, if the old incarnation is met again or has written anything, or if it does
        not serve."""
        wait_whole(self._cluster, WORKERS)
        old, reattempts, dropped = self._old_store(), self._reattempts(), self._dropped()
        clients = [] if cell.moment == "idle" else self._ask()
        victim = self._find(cell, clients)
        before = self._row(victim)
        incarnation, pids = str(before["incarnation"]), [before["pid"], *before["rank_pids"]]
        try:
            stopped_s = _signal(pids, signal.SIGSTOP)
            clients += [] if clients else self._ask()
            out_s = self._await_out(victim, incarnation, stopped_s)
            wait_for(lambda: time.monotonic() - stopped_s > LEASE_S + 0.5, what="it lapsed by any clock")
            self._change_store(cell.store, old, victim)
            said = self._said(victim, incarnation)
        finally:
            woke_s = _signal(pids, signal.SIGCONT)
        wait_for(lambda: self._is_back(victim, incarnation), what=f"{victim} is back as somebody else")
        back_s = time.monotonic() - woke_s
        self._check(clients)
        wait_whole(self._cluster, WORKERS)
        assert self._cluster.pids()[victim] == pids, "nobody started it again"
        self._check_fenced(victim, incarnation, said)
        self._await_serving(victim, incarnation)
        wait_whole(self._cluster, WORKERS)
        return Frozen(
            out_s=round(out_s, 2),
            back_s=round(back_s, 2),
            reattempts=self._reattempts() - reattempts,
            refused=self._refused(victim),
            dropped=self._dropped() - dropped,
        )

    def kill(self, role: str, part: str) -> float:
        """kill -9 of the host or the rank of a worker at work; seconds until the router took it out of rotation.
        AssertionError if a request fails or is answered wrongly."""
        wait_whole(self._cluster, WORKERS)
        clients = self._ask()
        victim = self._find(Cell(role, "at work", "kept"), clients)
        row = self._row(victim)
        killed_s = time.monotonic()
        kill(row["pid"] if part == "host" else row["rank_pids"][0])
        out_s = self._await_out(victim, str(row["incarnation"]), killed_s)
        self._check(clients)
        wait_whole(self._cluster, WORKERS)
        return out_s

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _ask(self) -> list[tuple[Client, list[int]]]:
        asked = []
        for _ in range(CLIENTS):
            prompt = [self._rng.randrange(600, 3600) for _ in range(PROMPT_TOKENS)]
            body = {**STREAM, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
            asked.append((Client(self._cluster, body), prompt))
        return asked

    def _check(self, asked: Sequence[tuple[Client, list[int]]]) -> None:
        """No client saw anything of it: every token once."""
        for client, prompt in asked:
            got = client.transcript()
            assert (got.errors, got.dones) == ([], 1)
            assert got.is_well_formed
            right = expected_tokens(prompt, ANSWER_TOKENS, 4096, eos_token_ids=(1,))
            assert got.choices[0].text == self._tokenizer.decode(right)
            assert got.usages[0]["completion_tokens"] == ANSWER_TOKENS

    def _await_serving(self, worker: str, old: str) -> None:
        """Wait until requests went over it, asked in waves that are more than the other one takes alone."""

        def passed() -> int:
            counters = self._row(worker)["counters"]
            return int(counters.get("handovers", 0) + counters.get("requests_finished", 0))

        def has_served() -> bool:
            asked = self._ask()
            while any(client.is_alive() for client, _ in asked):
                assert self._row(worker)["incarnation"] != old
                asked[0][0].join(0.02)
            self._check(asked)
            return passed() > before

        before = passed()

        wait_for(has_served, 90, f"{worker} serves again")

    # ---- the worker --------------------------------------------------------------------------------------------------

    def _find(self, cell: Cell, clients: list[tuple[Client, list[int]]]) -> str:
        """Return a worker of the role, at the cell's moment. Requests that are over before that was seen are sent
        anew."""
        if cell.moment == "idle":
            return f"{cell.role}-{self._rng.randrange(2)}"

        def found() -> str:
            if not any(client.is_alive() for client, _ in clients):
                self._check(clients)
                clients[:] = self._ask()
            return self._at_work(cell.role)

        return str(wait_for(found, what=f"some {cell.role} worker is at work"))

    def _at_work(self, role: str) -> str:
        requests = self._cluster.admin("/admin/v1/requests")["requests"]
        for name in (f"{role}-0", f"{role}-1"):
            mine = [request for request in requests if request[role] == name]
            if role == "decode" and any(r["phase"] == "decode" and r["output_tokens"] > 3 for r in mine):
                return name
            is_pushing = any(blocks["pushing"] for blocks in self._row(name)["blocks"])
            if role == "prefill" and is_pushing and any(r["phase"] == "prefill" for r in mine):
                return name
        return ""

    def _row(self, worker: str) -> dict[str, Any]:
        (row,) = [row for row in self._cluster.status()["workers"] if row["worker"] == worker]
        return dict(row)

    def _await_out(self, worker: str, incarnation: str, since_s: float) -> float:
        """Seconds until nothing is planned there; it need not be listed any more."""

        def is_out() -> bool:
            rows = self._cluster.status()["workers"]
            mine = [row for row in rows if (row["worker"], row["incarnation"]) == (worker, incarnation)]
            return not any(row["is_connected"] and row["is_registered"] for row in mine)

        wait_for(is_out, what=f"{worker} is out of rotation")
        return time.monotonic() - since_s

    def _is_back(self, worker: str, old: str) -> bool:
        for row in self._cluster.status()["workers"]:
            if row["worker"] == worker:
                assert row["incarnation"] != old or not row["is_connected"], "who was given up is met again"
                return bool(row["incarnation"] != old and row["is_connected"] and row["is_registered"])
        return False

    # ---- what it may not do ------------------------------------------------------------------------------------------

    def _said(self, worker: str, incarnation: str) -> tuple[int, int]:
        """Entries and blocks in the index under this incarnation."""
        names = WorkerId(worker), Incarnation(int(incarnation))
        events: Any = self._redis.xlen(self._keys.events(*names))
        blocks: Any = self._redis.scard(self._keys.blocks(*names))
        return int(events), int(blocks)

    def _check_fenced(self, worker: str, incarnation: str, said: tuple[int, int]) -> None:
        """Nothing was written under the old incarnation since `said`, nor can it be; and the lease is the new one's."""
        lease: Any = self._redis.hget(self._keys.lease(Member.WORKER, worker), "incarnation")
        assert int(lease) == int(self._row(worker)["incarnation"])
        old = Incarnation(int(incarnation))
        assert asyncio.run(_publish(self._server.url, self._keys, WorkerId(worker), old)) == "refused"
        now = self._said(worker, incarnation)
        assert all(is_now in (0, was) for is_now, was in zip(now, said, strict=True)), f"{said} expire at most: {now}"

    def _refused(self, worker: str) -> dict[str, int]:
        counters = self._row(worker)["counters"]
        assert counters["tandem_worker_rejoins_total{incarnation=new}"] >= 1
        names = ("index_publishing_total{kind", "registry_refused_total{reason", "worker_rejoins_total{incarnation")
        return {
            key.removeprefix("tandem_"): int(count)
            for key, count in counters.items()
            if count
            and key.removeprefix("tandem_").startswith(names)
            and not key.endswith(("entries}", "republished}"))
        }

    def _reattempts(self) -> int:
        return int(self._cluster.metric("tandem_reattempts_total"))

    def _dropped(self) -> int:
        return int(self._cluster.metric("tandem_kv_frames_dropped_total"))

    # ---- the store ---------------------------------------------------------------------------------------------------

    def _old_store(self) -> Dump:
        """Dump the store as it is now, to be put back later; its files are copied."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        _copy_files(self._server.directory, self._folder)
        return dump(self._redis)

    def _change_store(self, how: str, old: Dump, worker: str) -> None:
        if how == "emptied":
            restore(self._redis, {})
        elif how == "old dump":
            lease = self._keys.lease(Member.WORKER, worker).encode()
            restore(self._redis, {**old, lease: (old[lease][0], _OLD_LEASE_MS)})
        elif how == "old files":
            self._server.stop()
            _copy_files(self._folder, self._server.directory)
            self._server = PrivateRedis.start(self._server.directory, _PASSWORD, self._server.port)
            self._redis.close()
            self._redis = redis.Redis.from_url(self._server.url)

    def close(self) -> None:
        """End Redis."""
        self._redis.close()
        self._server.stop()


def _copy_files(source: Path, to: Path) -> None:
    """A copy of the files that Redis appends to, of a running server as well: it drops half a command at the end."""
    for found in to.glob("appendonly*"):
        shutil.rmtree(found) if found.is_dir() else found.unlink()
    for found in source.glob("appendonly*"):
        (shutil.copytree if found.is_dir() else shutil.copy)(found, to / found.name)


def _signal(pids: Sequence[int], number: signal.Signals) -> float:
    """Send the signal to all; return the time of sending."""
    now_s = time.monotonic()
    for pid in pids:
        os.kill(pid, number)
    return now_s


async def _publish(url: str, keys: Keys, worker: WorkerId, incarnation: Incarnation) -> str:
    """Publish a block under this incarnation now; return "published" or "refused"."""
    client = await connect(url)
    publisher = BlockEventPublisher(client, keys, worker, incarnation)
    publisher.offer([BlockEvent(BlockChange.STORED, (BlockHash(b"0123456789abcdef"),), GroupId(0))])
    run = asyncio.create_task(publisher.run())
    try:
        await wait_for_async(lambda: publisher.is_idle or publisher.counters.refused)
        return "refused" if publisher.counters.refused else "published"
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await client.aclose()


@contextlib.contextmanager
def frozen_scene(folder: Path, seed: int) -> Iterator[FrozenScene]:
    """A running scene; the cluster has to stop in order at its end."""
    server = PrivateRedis.start(folder / "redis", _PASSWORD)
    ends: list[Callable[[], None]] = [server.stop]
    try:
        with running("--model", str(MODEL), "--redis", server.url, config=CONFIG) as cluster:
            scene = FrozenScene(cluster, server, folder / "old", random.Random(seed))
            ends.append(scene.close)
            yield scene
    finally:
        for end in reversed(ends):
            end()
