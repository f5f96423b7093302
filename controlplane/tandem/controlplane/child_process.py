"""One child of this machine: its own process group, dies with us, its output kept; its exit is noticed at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.core.parent_death_signal import tied

_MAX_LINE_BYTES = 256 * 1024
_KILL_WAIT_S = 5.0
_LATE_OUTPUT_S = 1.0


class ChildProcess:
    """A running child. Lines of its standard output come from `lines`, all output also goes to its log file.

    Create it with `start`, on the event loop of the main thread. When the child exits, whatever is left of its process
    group is killed.
    """

    def __init__(self, process: subprocess.Popen[bytes], log_file: Path, log_start: int) -> None:
        self._process, self._log_file, self._log_start = process, log_file, log_start
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._unsent = bytearray()
        # While the exited leader is not reaped, its process id cannot be reused.
        self._pidfd = os.pidfd_open(process.pid)
        try:
            self._loop.add_reader(self._pidfd, self._on_exit)
        except OSError:
            os.close(self._pidfd)
            raise

    @classmethod
    def start(
        cls, command: Sequence[str], *, variables: Mapping[str, str], log_file: Path, takes_input: bool = False
    ) -> ChildProcess:
        """Start `command` with the environment `variables`; OSError if the system cannot. `takes_input`: `write`."""
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                tied(command),
                stdin=subprocess.PIPE if takes_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(variables),
                process_group=0,  # Ctrl-C is the launcher's; no session: the scheduler would share cores by session
            )
            try:
                return cls(process, log_file, log.tell())
            except OSError:  # out of descriptors or memory: it would run on without an owner
                _discard(process)
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return not self._exited.done()

    async def lines(self) -> AsyncIterator[str]:
        """Yield lines of standard output until it closes, each also appended to the log file. OSError: it cannot be
        read."""
        assert self._process.stdout is not None
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await self._loop.connect_read_pipe(lambda: protocol, self._process.stdout)
        except OSError:
            self._process.stdout.close()
            raise
        # A grandchild that left the group could keep the pipe open for ever.
        self._exited.add_done_callback(lambda _: self._loop.call_later(_LATE_OUTPUT_S, transport.close))
        try:
            while True:
                try:
                    line = await reader.readline()
                except ValueError:  # longer than the limit: the reader has dropped it
                    continue
                if not line:
                    return
                self._log(line)
                yield line.decode(errors="replace").rstrip("\n")
        finally:
            transport.close()

    def write(self, line: str) -> None:
        """Write a line to its standard input. Data beyond the pipe's capacity is kept until it reads. OSError when it
        is gone."""
        stdin = self._process.stdin
        assert stdin is not None
        if stdin.closed:
            raise BrokenPipeError("it has ended")
        os.set_blocking(stdin.fileno(), False)
        self._unsent += f"{line}\n".encode()
        self._send(stdin.fileno())

    async def wait(self) -> int:
        """Wait for its end and return the exit code; −N for signal N."""
        return await asyncio.shield(self._exited)

    async def wait_at_most(self, seconds: float) -> bool:
        """True if it ends within `seconds`. Unlike `wait_for`, it never swallows a cancellation."""
        done, _ = await asyncio.wait([self._exited], timeout=seconds)
        return bool(done)

    async def stop(self, *, grace_s: float, hurry: asyncio.Event | None = None) -> int:
        """Ask it to end; after `grace_s`, or once `hurry` is set, kill the whole group. Returns the exit code."""
        if self.is_running:
            self._signal(signal.SIGTERM)
            waits: list[asyncio.Future[Any]] = [self._exited]
            hurried = asyncio.ensure_future(hurry.wait()) if hurry is not None else None
            if hurried is not None:
                waits.append(hurried)
            try:
                await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if hurried is not None:
                    hurried.cancel()
                self.kill()
        if not await self.wait_at_most(_KILL_WAIT_S):
            raise TimeoutError(f"process {self.pid} does not end although it was killed")
        return self._exited.result()

    def kill(self) -> None:
        """Send SIGKILL to the child and everything it started in its group."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def last_line(self) -> str:
        """Return the last line that it wrote to its log, empty if none."""
        return last_line(self._log_file, self._log_start)

    def end_reason(self, code: int) -> str:
        """Return in one line why it ended with `code`."""
        return end_reason(code, self._log_file, self._log_start)

    def _send(self, stdin: int) -> None:
        with contextlib.suppress(BlockingIOError):
            del self._unsent[: os.write(stdin, self._unsent)]
        if self._unsent:
            self._loop.add_writer(stdin, self._send_more, stdin)

    def _send_more(self, stdin: int) -> None:
        self._loop.remove_writer(stdin)
        with contextlib.suppress(OSError):  # it has ended, or reads no more
            self._send(stdin)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _log(self, line: bytes) -> None:
        with contextlib.suppress(OSError), self._log_file.open("ab") as log:
            log.write(line)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        os.close(self._pidfd)
        if self._process.stdin is not None:
            self._loop.remove_writer(self._process.stdin.fileno())
            self._process.stdin.close()
        if not self._exited.done():
            self._exited.set_result(code)


def _discard(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def last_line(log_file: Path, start: int) -> str:
    """Return the last line of a log behind position `start`, empty if none."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(start, log_file.stat().st_size - 8192))
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def end_reason(code: int, log_file: Path, log_start: int, where: str = "") -> str:
    """Return in one line why a process with that log ended with `code`."""
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    last, log = last_line(log_file, log_start), f"(log: {log_file}{where})"
    return f"{how}; its last line: {last[:300]} {log}" if last else f"{how} {log}"


def message_in(line: str) -> dict[str, Any]:
    """Return the JSON object that a child wrote as one line; {} for any other line."""
    try:
        said = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
