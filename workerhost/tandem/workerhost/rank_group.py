"""All rank processes of a worker: started together, watched, and ended together.

Rank 0 alone talks with the host; the others get their commands from it over rings that the host creates. They use their
own ring to the host only for a fatal error.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tandem.core.config import WorkerConfig
from tandem.core.errors import WorkerLostError
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import passing_pb2 as p
from tandem.workercore.heartbeat import Pulse
from tandem.workercore.message_ring import RingPair
from tandem.workerhost.rank_process import RankProcess
from tandem.workerhost.relay import ForRank

MODULE = "tandem.worker.rank"
SETTLE_S = 0.3
"""When a rank is lost, others soon fail too; ends within this time are gathered, to separate cause and consequences."""
START_AGAIN = "the worker is restarted"


class RankGroup:
    """`on_message` is called on the event loop with (rank, message) for every message of a rank."""

    def __init__(self, config: WorkerConfig, config_file: Path, on_message: Callable[[int, p.FromRank], None]) -> None:
        size = config.settings.tp
        self._pairs = [RingPair.create(f"tandem-rank{rank}") for rank in range(1, size)]
        self._rendezvous = Path(config.runtime_dir) / f"{config.worker_id}-{secrets.token_hex(4)}.meet"
        self._fatals: dict[int, e.Fatal] = {}
        self._news = asyncio.Event()
        self._ranks: list[RankProcess] = []
        for rank in range(size):
            pairs = self._pairs if rank == 0 else [self._pairs[rank - 1]]
            arguments = [f"--pair={pair}" for pair in pairs]
            if size > 1:
                arguments.append(f"--rendezvous={self._rendezvous}")
            heard = functools.partial(on_message, rank)
            descriptors = [descriptor for pair in pairs for descriptor in pair.descriptors]
            self._ranks.append(
                RankProcess(rank, MODULE, config_file, heard, arguments=arguments, descriptors=descriptors)
            )

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [rank.pid for rank in self._ranks]

    @property
    def pulses(self) -> list[Pulse]:
        """Heartbeat pages, in rank order."""
        return [rank.pulse for rank in self._ranks]

    def log_stacks(self) -> None:
        """Have every rank log what its threads do, and how much its step computes."""
        for rank in self._ranks:
            rank.pulse.ask_stacks()

    def write_stacks(self, rank: int) -> None:
        """Have a rank that does not tick write the stacks of its threads."""
        self._ranks[rank].write_stacks()

    def send(self, message: ForRank) -> None:
        """Send to rank 0, in order; see RankProcess.send."""
        self._ranks[0].send(message)

    def grant(self, until_s: float, incarnation: int) -> None:
        """Let every rank push, publish and send until then, as this incarnation."""
        for rank in self._ranks:
            rank.pulse.grant(until_s, incarnation)

    def note_fatal(self, rank: int, fatal: e.Fatal) -> None:
        """`rank` reports that it cannot go on: `wait_loss` ends."""
        self._fatals.setdefault(rank, fatal)
        self._news.set()

    async def start(self) -> None:
        for rank in self._ranks:
            await rank.start()

    async def wait_loss(self) -> NoReturn:
        """Wait until a rank ends or reports that it cannot go on; raises WorkerLostError with the rank and the
        reason."""
        news = [asyncio.ensure_future(rank.wait()) for rank in self._ranks]
        news.append(asyncio.ensure_future(self._wait_fatal()))
        try:
            await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
            if self.size > 1:
                await asyncio.wait(news, timeout=SETTLE_S)
        finally:
            for waiting in news:
                waiting.cancel()
        for rank in self._ranks:
            rank.drain()
        raise self._loss()

    async def stop(self, timeout_s: float) -> None:
        """Ask rank 0, which asks the others, to stop; ranks that still run after `timeout_s` are killed."""
        if self._ranks[0].status is None and self._ranks[0].pid:
            self.send(e.HostToRank(stop=e.Stop(reason="the worker stops")))
            waiting = [asyncio.ensure_future(rank.wait()) for rank in self._ranks]
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            for task in late:
                task.cancel()
        self.kill()
        await self.wait()

    def kill(self) -> None:
        """Send SIGKILL to every rank that runs."""
        for rank in self._ranks:
            rank.kill()

    async def wait(self) -> None:
        """Wait until every rank has ended."""
        for rank in self._ranks:
            await rank.wait()

    def close(self) -> None:
        """Give the shared memory back; the processes must have ended."""
        for rank in self._ranks:
            rank.close()
        for pair in self._pairs:
            pair.close()
        self._rendezvous.unlink(missing_ok=True)

    async def _wait_fatal(self) -> int:
        await self._news.wait()
        return 0

    def _loss(self) -> WorkerLostError:
        """The first loss: a rank that was killed explains the others' errors, an error explains the exit after it."""
        ends = [(rank.rank, rank.status) for rank in self._ranks if rank.status is not None]
        for number, status in ends:
            if status < 0:
                return WorkerLostError(f"rank {number} was killed by signal {-status}", todo=START_AGAIN)
        if self._fatals:
            number = min(self._fatals, key=lambda rank: self._fatals[rank].code == WorkerLostError.code)
            return WorkerLostError(f"rank {number} cannot continue", why=self._fatals[number].message, todo=START_AGAIN)
        number, status = ends[0]
        return WorkerLostError(f"rank {number} ended with status {status}", why="see its log", todo=START_AGAIN)
