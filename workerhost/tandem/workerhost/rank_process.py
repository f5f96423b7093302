"""A rank process as its host sees it: start it, talk over its rings, read its pulse, notice its death."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.core.errors import RequestTooLargeError
from tandem.rpc.v1 import passing_pb2 as p
from tandem.workercore.heartbeat import STACKS_SIGNAL, Pulse
from tandem.workercore.message_ring import RingHandle, RingReader, RingWriter
from tandem.workerhost.relay import ForRank

RETRY_WRITE_S = 0.002
MAX_BACKLOG, MAX_BACKLOG_BYTES = 10_000, 64 << 20


class RankProcess:
    """One rank of this worker. `on_message` is called on the event loop for every message of the rank.

    `arguments` are added to its command line, and it inherits `descriptors` besides those of its rings.
    """

    def __init__(
        self,
        rank: int,
        module: str,
        config: Path,
        on_message: Callable[[p.FromRank], None],
        *,
        arguments: Sequence[str] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self._module, self._config, self._on_message = module, config, on_message
        self._arguments, self._descriptors = tuple(arguments), tuple(descriptors)
        self._to_rank = RingHandle.create(f"tandem-to-rank{rank}")
        self._to_host = RingHandle.create(f"tandem-to-host{rank}")
        self.pulse = Pulse.create(f"tandem-pulse{rank}")
        self._writer, self._reader = RingWriter(self._to_rank), RingReader(self._to_host)
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._retry: asyncio.TimerHandle | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the process; it inherits the rings and dies with this one."""
        own = (*self._to_rank.descriptors, *self._to_host.descriptors, self.pulse.descriptor)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            f"--config={self._config}",
            f"--rank={self.rank}",
            f"--parent={os.getpid()}",
            f"--inbox={self._to_rank}",
            f"--outbox={self._to_host}",
            f"--pulse={self.pulse.descriptor}",
            *self._arguments,
            pass_fds=(*own, *self._descriptors),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # this process's stdout goes to the launcher
        )
        asyncio.get_running_loop().add_reader(self._reader.filled, self.drain)

    def send(self, message: ForRank) -> None:
        """Queue a message for the rank, in order; never blocks.

        Raises RequestTooLargeError for one that no ring can hold. If the rank takes nothing, raises BufferError for
        messages of routers and peers; that these are gone is never lost.
        """
        data = message.SerializeToString()
        if len(data) > self._writer.max_message_bytes:
            raise RequestTooLargeError(
                f"a message of {len(data)} bytes", why=f"a worker takes {self._writer.max_message_bytes} bytes"
            )
        if self._backlog or not self._writer.try_write(data):
            is_optional = message.WhichOneof("kind") in ("router", "peer")
            if is_optional and (len(self._backlog) >= MAX_BACKLOG or self._backlog_bytes >= MAX_BACKLOG_BYTES):
                raise BufferError(f"rank {self.rank} does not read its messages")
            self._backlog.append(data)
            self._backlog_bytes += len(data)
            self._schedule_retry()

    async def wait(self) -> int:
        """Wait until the process ends; returns its exit status (negative: the signal). 0 if it was never started."""
        if self._process is None:
            return 0
        status = await self._process.wait()
        self.drain()
        return status

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.returncode if self._process else None

    def kill(self) -> None:
        """Send SIGKILL, if it still runs; a stopped process dies of it too."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)

    def write_stacks(self) -> None:
        """Have it write the stacks of its threads to stderr, if it still runs: needs no Python thread."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(STACKS_SIGNAL)

    def close(self) -> None:
        """Give the shared memory back; the process must have ended."""
        asyncio.get_running_loop().remove_reader(self._reader.filled)
        if self._retry is not None:
            self._retry.cancel()
        self._writer.close()
        self._reader.close()
        self._to_rank.close()
        self._to_host.close()
        self.pulse.close()

    def drain(self) -> None:
        """Take the messages that it has sent so far."""
        for data in self._reader.read_all():
            self._on_message(p.FromRank.FromString(data))

    def _schedule_retry(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_WRITE_S, self._flush_backlog)

    def _flush_backlog(self) -> None:
        self._retry = None
        while self._backlog and self._writer.try_write(self._backlog[0]):
            self._backlog_bytes -= len(self._backlog.popleft())
        if self._backlog:
            self._schedule_retry()
