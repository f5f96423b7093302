"""A rank that dies or stops ends its worker with the reason, whole, and no rank waits for it."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.worker.alone import ENDS_WITHIN_S, last_words, worker_of
from tests.integration.worker.pair import start_worker, submit
from tools.running_cluster import is_alive
from tools.waiting import wait_for_async

PROMPT = [(7 * i) % 4000 + 10 for i in range(40)]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("rank", "is_busy"), [(0, True), (1, False), (1, True)], ids=["0 busy", "1 idle", "1 busy"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
async def test_a_rank_is_lost(folder: Path, number: signal.Signals, rank: int, is_busy: bool) -> None:
    async with worker_of(folder, 2) as worker:
        pids = [int(pid) for pid in worker.ready["rank_pids"]]
        if is_busy:
            request = submit("r", w.LEG_FULL, worker, PROMPT, max_tokens=3000, ignore_eos=True)
            await worker.send(submit=request)
            async with asyncio.timeout(30):
                await worker.messages.get()
        struck_s = time.monotonic()
        os.kill(pids[rank], number)
        fatal, took_s = await last_words(worker), time.monotonic() - struck_s
    print(f"{number.name}: ended after {took_s:.2f} s: {fatal}")
    assert took_s < ENDS_WITHIN_S
    assert f"rank {rank}" in fatal
    assert ("stopped" if number is signal.SIGSTOP else "signal 9") in fatal
    assert not any(is_alive(pid) for pid in pids)


async def test_the_only_rank_stops(folder: Path) -> None:
    """Its host lives and would answer every ping: the worker has to end, or the loss would stay unnoticed."""
    async with worker_of(folder, 1) as worker:
        (pid,) = [int(pid) for pid in worker.ready["rank_pids"]]
        struck_s = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        fatal, took_s = await last_words(worker), time.monotonic() - struck_s
    assert "rank 0 has stopped" in fatal
    assert took_s < ENDS_WITHIN_S


async def test_a_tp_that_does_not_fit_says_which_do(folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"--tp 3 does not fit .* Use --tp 1, 2, 4"):
        async with worker_of(folder, 3):
            pass


async def test_a_rank_that_cannot_start_says_why(folder: Path) -> None:
    """Also for an unforeseen cause: here there is no place for the sockets."""
    with pytest.raises(RuntimeError, match="a rank failed: FileNotFoundError"):
        async with worker_of(folder, 1, engine="sim", transports=("shm",), runtime_dir=folder / "nowhere"):
            pass


async def test_ranks_do_not_wait_for_one_that_died_at_the_start(folder: Path) -> None:
    ClusterSecret.generate().save(folder / "secret")
    with PrivateRedis.start(folder / "redis", "test-password") as redis:
        start = asyncio.ensure_future(start_worker(folder, "m0", RoleName.MIXED, redis.url, tp=2))
        pids = await wait_for_async(lambda: _pids_of_rank(1))
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="rank 1 was killed by signal 9"):
            await asyncio.wait_for(start, ENDS_WITHIN_S)


def _pids_of_rank(rank: int) -> list[int]:
    """Processes below this one that have taken the rank's arguments."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child.pid] if f"--rank={rank}" in child.cmdline() else []
    return found
