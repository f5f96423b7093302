"""The cluster's Redis: a server that the operator named, or a private one that is kept running."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from tandem.controlplane.state_dir import StateDir
from tandem.core.config import RedisSection
from tandem.core.errors import StartupError
from tandem.core.secret import ClusterSecret
from tandem.statestore.embedded_redis import ANSWER_TIMEOUT_S, PrivateRedis, RedisState

Say = Callable[[str], None]

_WATCH_S = 0.25
_RETRY_S = 1.0
_LOADING = "loading its data"


class ClusterRedis:
    """Gives the URL to use. `keep` starts a private server again, on the same port and data, when it died."""

    def __init__(self, url: str, server: PrivateRedis | None, spawn: Callable[[int], PrivateRedis] | None) -> None:
        self.url, self._server, self._spawn = url, server, spawn

    @property
    def pid(self) -> int:
        """Process id of the private server, 0 without one."""
        return self._server.pid if self._server is not None else 0

    async def keep(self, say: Say) -> None:
        """Supervise a private server until cancelled; `say` gets one line whenever it had to act."""
        while True:
            await asyncio.sleep(_WATCH_S)
            server = self._server
            if server is None or server.is_alive():
                continue
            say("it died, starting it again")
            try:
                # In this thread, for the kernel ends the server together with the thread that started it.
                assert self._spawn is not None
                self._server = self._spawn(server.port)
                await _ready(self._server, say)
                say(f"answers again, process {self._server.pid}")
            except (StartupError, OSError) as error:  # the latter: no room on the disk, no memory
                say(error.message if isinstance(error, StartupError) else f"it could not be started: {error}")
                await asyncio.sleep(_RETRY_S)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


async def _ready(server: PrivateRedis, say: Say) -> None:
    """Return once it answers, however long it loads. Without any response it is ended: StartupError."""
    deadline_s, is_loading = time.monotonic() + ANSWER_TIMEOUT_S, False
    while (answer := await asyncio.to_thread(server.answer)) is not RedisState.READY:
        if answer is RedisState.LOADING:
            if not is_loading:
                is_loading = True
                say(_LOADING)
            deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        elif time.monotonic() > deadline_s:
            await asyncio.to_thread(server.stop, 1.0)
            raise server.silence()
        await asyncio.sleep(_WATCH_S)


@contextlib.contextmanager
def open_redis(section: RedisSection, state: StateDir, secret: ClusterSecret, say: Say) -> Iterator[ClusterRedis]:
    """Yield the server that is named, or a private one that is stopped at the end. Call it on the main thread."""
    if section.url:
        yield ClusterRedis(section.url, None, None)
        return
    most = section.memory_bytes
    password = secret.derive(b"redis").hex()
    server = PrivateRedis.start(state.redis_dir, password, memory_bytes=most, on_loading=lambda: say(_LOADING))
    redis = ClusterRedis(
        server.url, server, lambda port: PrivateRedis.spawn(state.redis_dir, password, port, memory_bytes=most)
    )
    try:
        yield redis
    finally:
        redis.stop()
