"""Sockets and HTTP servers: a taken port is an error in words, and signals are left to the process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from tandem.core.errors import StartupError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; StartupError when the port is taken or the address is not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        why = error.strerror or str(error)
        raise StartupError(f"cannot listen on {host}:{port}", why=why, todo="choose another port") from error
    listener.setblocking(False)
    return listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def port_after(wanted: int, before: int, before_wanted: int) -> int:
    """−1 = the port before + 1, or any free one where the port before was any free one."""
    if wanted >= 0:
        return wanted
    return 0 if before_wanted == 0 else before + 1


class HttpServer:
    """One uvicorn server on a bound socket."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )
        self._server = _QuietServer(config)
        self._listener = listener

    async def run(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._listener])

    async def wait_started(self) -> None:
        while not self._server.started:  # noqa: ASYNC110 - uvicorn offers nothing to wait for
            await asyncio.sleep(0.005)

    def stop(self) -> None:
        """No new connections; those in progress get a second."""
        self._server.should_exit = True


class _QuietServer(uvicorn.Server):
    """Signals belong to the process, not to one of its servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
