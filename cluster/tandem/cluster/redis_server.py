"""The cluster's Redis: a server that the operator named, or a private one that is kept running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from tandem.cluster.state_dir import StateDir
from tandem.core.errors import StartupError
from tandem.core.secret import ClusterSecret
from tandem.prefixindex.private_redis import PrivateRedis

_WATCH_S = 0.25
_RETRY_S = 1.0


class ClusterRedis:
    """Gives the URL to use. `keep` starts a private server again, on the same port and data, when it died."""

    def __init__(self, url: str, server: PrivateRedis | None, start: Callable[[int], PrivateRedis] | None) -> None:
        self.url, self._server, self._start = url, server, start

    async def keep(self, on_restart: Callable[[str], None]) -> None:
        """Watch over a private server until cancelled; `on_restart` gets one line whenever it had to act."""
        while True:
            await asyncio.sleep(_WATCH_S)
            server = self._server
            if server is None or server.is_alive():
                continue
            on_restart("it died, starting it again")
            try:
                # In this thread, for the kernel ends the server together with the thread that started it.
                assert self._start is not None
                self._server = self._start(server.port)
                on_restart(f"answers again, process {self._server.pid}")
            except (StartupError, OSError) as error:  # the latter: no room on the disk, no memory
                on_restart(error.message if isinstance(error, StartupError) else f"it could not be started: {error}")
                await asyncio.sleep(_RETRY_S)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


@contextlib.contextmanager
def open_redis(url: str, state: StateDir, secret: ClusterSecret) -> Iterator[ClusterRedis]:
    """The server at `url`, or with "" a private one that is stopped at the end. Call it on the main thread."""
    if url:
        yield ClusterRedis(url, None, None)
        return
    password = secret.derive(b"redis").hex()

    def start(port: int) -> PrivateRedis:
        return PrivateRedis.start(state.redis_dir, password, port)

    server = start(0)
    redis = ClusterRedis(server.url, server, start)
    try:
        yield redis
    finally:
        redis.stop()
