"""Connections to Redis: bounded in time, checked once at the start, and never with a password in a log line."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.connection import (
    AbstractConnection,
    BlockingConnectionPool,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from tandem.core.errors import ConfigError, StartupError, UnavailableError
from tandem.core.logs import event
from tandem.core.timeout_scale import patient
from tandem.core.urls import redacted

OUTAGE: Final = (RedisError, OSError, TimeoutError)
"""Errors of a call while Redis is away, loading, full or refusing: wait and try again."""
SOCKET_TIMEOUT_S: Final = patient(5.0)
OLDEST_VERSION: Final = (6, 2)
_CONNECTIONS: Final = 64
"""A caller that wants one more waits: a burst of requests is no outage."""
_SAY_EVERY_S: Final = 10.0
_log = logging.getLogger(__name__)


class NoRedisError(StartupError):
    """No Redis answers there, which time may change."""


class Backoff:
    """Growing, jittered pauses between tries, from `first_s` to `last_s` seconds."""

    def __init__(self, first_s: float = 0.05, last_s: float = 1.0) -> None:
        self._first_s, self._last_s = first_s, last_s
        self._next_s = first_s

    def reset(self) -> None:
        """It works again: begin with short pauses next time."""
        self._next_s = self._first_s

    async def pause(self) -> None:
        """Sleep for the next pause."""
        pause_s, self._next_s = self._next_s, min(self._last_s, self._next_s * 2)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret


async def connect(url: str, *, timeout_s: float = SOCKET_TIMEOUT_S) -> Redis:
    """A checked client for `url` (`redis://`, `rediss://`, `unix://`); the caller owns it and calls `aclose()`.

    Every command waits at most 5 s for one of 64 connections, is bounded by a socket timeout of 5 s and tried at most
    twice. Raises ConfigError for a wrong URL and StartupError when Redis does not answer within `timeout_s`, refuses
    the password or is too old.
    """
    place = redacted(url, "the given Redis URL")
    try:
        client = open_client(url)
    except (ValueError, TypeError):
        raise ConfigError(
            f"{place} is not a Redis URL", todo="write redis://:password@host:port/0 or unix:///path/to/socket"
        ) from None
    try:
        async with asyncio.timeout(timeout_s):
            info: dict[str, Any] = await client.info("server")
        _check_version(info, place)
    except (*OUTAGE, StartupError) as error:
        await client.aclose()
        raise _explained(error, place, timeout_s) from None
    except BaseException:
        await client.aclose()
        raise
    return client


async def wait_for_redis(url: str, *, within_s: float) -> None:
    """Return once `connect(url)` succeeds; logs now and then that it waits.

    Raises as `connect` does: at once what no wait changes, and after `within_s` that Redis cannot be reached.
    """
    backoff = Backoff()
    began_s = time.monotonic()
    say_s = 0.0
    while True:
        try:
            await (await connect(url)).aclose()
            return
        except NoRedisError as error:
            waited_s = time.monotonic() - began_s
            if waited_s >= within_s:
                raise
            if waited_s >= say_s:
                say_s = waited_s + _SAY_EVERY_S
                event(_log, "waiting for Redis", logging.WARNING, why=error.message, seconds=round(waited_s, 1))
        await backoff.pause()


@contextmanager
def raising_unavailable() -> Iterator[None]:
    """Raise UnavailableError in place of an outage, for callers outside this package."""
    try:
        yield
    except OUTAGE as error:
        raise UnavailableError("Redis does not answer", why=_one_line(error)) from error


class _CancelSafe(AbstractConnection):
    """Before Python 3.12 `asyncio.wait_for`, through which the client writes, may swallow a cancellation.

    A task that loops over commands would then go on forever; so it is raised again here.
    """

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        task = asyncio.current_task()
        cancelled_before = task.cancelling() if task else 0
        await super().send_packed_command(command, check_health)
        if task is not None and task.cancelling() > cancelled_before:
            await self.disconnect(nowait=True)  # an answer without a reader is on its way
            raise asyncio.CancelledError


class _TcpConnection(_CancelSafe, Connection):
    pass


class _TlsConnection(_CancelSafe, SSLConnection):
    pass


class _UnixConnection(_CancelSafe, UnixDomainSocketConnection):
    pass


_SAFE: Final[dict[type[AbstractConnection], type[AbstractConnection]]] = {
    Connection: _TcpConnection,
    SSLConnection: _TlsConnection,
    UnixDomainSocketConnection: _UnixConnection,
}


def open_client(url: str) -> Redis:
    """An unchecked client, bounded as those of `connect`, for the event loop that first uses it. Raises ValueError or
    TypeError for a wrong URL."""
    # Protocol 2 keeps replies of streams the same with every client version.
    pool = BlockingConnectionPool.from_url(
        url,
        protocol=2,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=2.0,
        health_check_interval=15,
        max_connections=_CONNECTIONS,
        timeout=SOCKET_TIMEOUT_S,
        retry=Retry(NoBackoff(), 1),
    )
    pool.connection_class = _SAFE[pool.connection_class]
    return Redis.from_pool(pool)


def _check_version(info: dict[str, Any], place: str) -> None:
    version = str(info.get("redis_version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_VERSION:
        raise StartupError(f"Redis at {place} is version {version}", todo="use Redis 6.2 or newer, or Valkey")


def _explained(error: BaseException, place: str, timeout_s: float) -> StartupError:
    if isinstance(error, StartupError):
        return error
    if isinstance(error, (AuthenticationError, NoPermissionError)) or "NOAUTH" in str(error):
        return StartupError(
            f"Redis at {place} refuses this password",
            todo="put the right one into the URL: redis://:password@host:port/0",
        )
    why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else _one_line(error)
    return NoRedisError(f"cannot reach Redis at {place}", why=why, todo="start it, or correct its URL")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
