"""Sockets and HTTP servers: a taken port is an error in words, and signals are left to the process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from tandem.core.errors import ConfigError, StartupError
from tandem.router.api.accept_queue_draining import let_nobody_in, queued
from tandem.router.api.http.protocol import BoundedProtocol

_LOOK_S = 0.02
_ENTERING_S = 0.2
"""Handshakes in progress when the listener stops taking new connections are over by then."""
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2, with 1.3's own; uvicorn's default was "TLSv1" once, which has anonymous and null ones."""
UNHEARD_S = 1.0
"""How long a connection may take to send its first request once no new one is taken."""


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A listening socket; StartupError when the port is taken or the address is not ours.

    `is_shared`: beside other processes, on a port that is held by `reserve`.
    """
    try:
        listener, address = _socket(host, port)
        try:
            if is_shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _taken(host, port, error) from error
    listener.setblocking(False)
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """A socket that holds a port and takes no connection; StartupError when the port is in use, shared or not.

    It is bound alone and shares only afterwards: else two routers on one port would share its connections unnoticed.
    """
    try:
        holder, address = _socket(host, port)
        try:
            holder.bind(address)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError:
            holder.close()
            raise
    except OSError as error:
        raise _taken(host, port, error) from error
    return holder


def _socket(host: str, port: int) -> tuple[socket.socket, Any]:
    """Of the family that the host's address has, and that address."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made, address


def _taken(host: str, port: int, error: OSError) -> StartupError:
    why = error.strerror or str(error)
    return StartupError(f"cannot listen on {host}:{port}", why=why, todo="choose another port")


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def port_after(wanted: int, before: int, before_wanted: int) -> int:
    """−1 = the port before + 1, or any free one where the port before was any free one."""
    if wanted >= 0:
        return wanted
    return 0 if before_wanted == 0 else before + 1


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the certificate with its chain, and its private key, without a password."""

    cert: Path
    key: Path

    @classmethod
    def of(cls, cert: str, key: str) -> TlsFiles | None:
        """Those of `[router]`, None without; ConfigError when they are no pair that can be used."""
        if not cert and not key:
            return None
        if not cert or not key:
            absent = "tls_key" if cert else "tls_cert"
            raise ConfigError(f"router.{absent} is missing", why="a certificate and its key go together",
                              todo="give both or none")  # fmt: skip
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            why = getattr(error, "reason", None) or error.strerror or str(error)
            raise ConfigError(f"cannot serve TLS with {cert} and {key}", why=why, todo="check both files") from error
        return cls(Path(cert), Path(key))


class HttpServer:
    """One uvicorn server on a bound socket."""

    def __init__(self, app: Any, listener: socket.socket, tls: TlsFiles | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # no code asks where a client is
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
            ssl_certfile=tls.cert if tls else None,
            ssl_keyfile=tls.key if tls else None,
            ssl_ciphers=_CIPHERS,
        )
        self._server = _QuietServer(config)
        self._listener = listener

    async def run(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._listener])

    async def wait_started(self) -> None:
        while not self._server.started:  # noqa: ASYNC110 - uvicorn offers nothing to wait for
            await asyncio.sleep(0.005)

    @property
    def busy(self) -> int:
        """Requests that are being answered."""
        return len(self._server.server_state.tasks)

    def end_connections(self) -> None:
        """Close each behind the answer that it waits for. Those that wait for none are left: a request may be on its
        way there."""
        for connection in list(self._server.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                connection.shutdown()

    async def finish_requests(self) -> None:
        """Take no new connection, and let those that are open or queued send a request and get its answer: a connection
        that is closed before that is reset. About UNHEARD_S at most, in looks and not by a clock: each look accepts
        those that wait, however slow the machine is."""
        let_nobody_in(self._listener)
        for look in range(round(UNHEARD_S / _LOOK_S)):
            await asyncio.sleep(_LOOK_S)
            if look * _LOOK_S >= _ENTERING_S and not self._is_expecting:
                return

    @property
    def _is_expecting(self) -> bool:
        silent = any(getattr(each, "cycle", self) is None for each in self._server.server_state.connections)
        return silent or self.busy > 0 or queued(self._listener) > 0

    def stop(self) -> None:
        """No new connections; those in progress get a second."""
        self._server.should_exit = True


class _QuietServer(uvicorn.Server):
    """Signals belong to the process, not to one of its servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
