"""An emulated API as a server on a free port of loopback, to be run in a thread."""

import asyncio

import uvicorn


class ThreadedServer:
    """`run` it in a thread until `stop`; `url` is known once `is_started`."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._server = uvicorn.Server(config)
        self._scheme = "https" if config.is_ssl else "http"

    @property
    def url(self) -> str:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"{self._scheme}://127.0.0.1:{port}"

    def run(self) -> None:
        asyncio.run(self._server.serve())

    @property
    def is_started(self) -> bool:
        return self._server.started

    def stop(self) -> None:
        self._server.should_exit = True
