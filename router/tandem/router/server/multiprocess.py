"""Several processes of one router: each is a router of its own, and all listen on the same ports.

The kernel spreads connections over them (SO_REUSEPORT). This parent holds the ports, starts the processes, restarts
those that die, and has the admin port; it sees no request of a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from tandem.core import config_loader
from tandem.core.backoff import RestartBackoff
from tandem.core.clock import Clock, MonotonicClock
from tandem.core.config import RouterConfig
from tandem.core.errors import ConfigError, StartupError, TandemError
from tandem.core.files import write_private
from tandem.core.logs import event
from tandem.core.parent_death_signal import tied
from tandem.core.timeout_scale import patient
from tandem.router.admin.app import load_key
from tandem.router.admin.multiprocess_admin import ReplicatedSettings, RouterMember, create_parts_admin, replay
from tandem.router.admin.page.chat import ApiRelay
from tandem.router.api.servers import HttpServer, TlsFiles, bind, port_after, port_of, reserve
from tandem.router.server.registration import Ready, write_ready
from tandem.router.server.shutdown import AFTER_DRAIN_S, on_signal

_log = logging.getLogger(__name__)
MAX_PROCESSES = 256
READY_S = patient(60.0)
_LOOK_S = 0.02


class _RefusedError(Exception):
    """A process could not start, and reported why itself; `code` is its exit status."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a process of the router ended with code {code}")
        self.code = code


async def run_processes(config: RouterConfig) -> int:
    """Run until SIGTERM or SIGINT; a second one ends everything at once, since no process outlives this one.

    The exit status: 0, or that of a process which could not start at all.
    """
    wants = config.settings
    if not 1 <= wants.processes <= MAX_PROCESSES:
        why = f"it must be between 1 and {MAX_PROCESSES}"
        raise ConfigError(f"router.processes is {wants.processes}", why=why, todo="one a core is enough")
    async with contextlib.AsyncExitStack() as stack:
        http = stack.enter_context(_held(wants.host, wants.port))
        grpc_wanted = port_after(wants.grpc_port, http, wants.port)
        grpc = stack.enter_context(_held(wants.host, grpc_wanted))
        listener = bind("127.0.0.1", port_after(wants.admin_port, grpc, grpc_wanted))
        stack.callback(listener.close)
        settings = dataclasses.replace(wants, port=http, grpc_port=grpc, admin_port=0)
        parent = f"http://127.0.0.1:{port_of(listener)}"
        one = dataclasses.replace(config, settings=settings, parent_admin=parent)
        orders, clock = ReplicatedSettings(), MonotonicClock()
        every = [Process(one, number, orders, clock) for number in range(wants.processes)]
        stack.push_async_callback(_stop, every)
        stopping = asyncio.Event()
        on_signal(stopping.set)
        try:
            await every[0].start()  # alone: if the configuration is wrong, it is reported once
            await asyncio.gather(*(process.start() for process in every[1:]))
        except _RefusedError as error:
            return error.code
        api = ApiRelay(wants.host, lambda: http, TlsFiles.of(wants.tls_cert, wants.tls_key), wants.request_timeout_s)
        await _serve(config, every, orders, listener, parent, stopping, api)
    return 0


async def _serve(
    config: RouterConfig,
    every: list[Process],
    orders: ReplicatedSettings,
    listener: socket.socket,
    parent: str,
    stopping: asyncio.Event,
    api: ApiRelay,
) -> None:
    def parts() -> list[RouterMember]:
        return [process.part for process in every if process.part is not None]

    app = create_parts_admin(
        config.router_id, port_of(listener), parts, orders,
        admin_key=load_key(Path(config.admin_key_file)), max_body_bytes=config.settings.max_body_bytes, api=api,
    )  # fmt: skip
    admin = HttpServer(app, listener)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(admin.run()), *(group.create_task(process.keep()) for process in every)]
        async with asyncio.timeout(READY_S):
            await admin.wait_started()
        first = every[0].ready
        assert first is not None
        ready = dataclasses.replace(first, admin=parent, pid=os.getpid())
        write_ready(Path(config.ready_file), ready)
        await stopping.wait()
        for task in tasks[1:]:
            task.cancel()
        await _stop(every)
        app.state.live.end()
        admin.stop()


class Process:
    """One process: started, waited for, started again. `ready` is its report once it listened; from then on it gets
    orders with the others, and `orders` holds those that came before."""

    def __init__(self, config: RouterConfig, number: int, orders: ReplicatedSettings, clock: Clock) -> None:
        folder, name = Path(config.ready_file).parent, f"{config.router_id}-{number}"
        self._ready_file, self._config_file = folder / f".{name}.ready.json", folder / f".{name}.json"
        self._config = dataclasses.replace(config, router_id=name, ready_file=str(self._ready_file), is_part=True)
        self._orders, self._backoff = orders, RestartBackoff(clock)
        self._child: asyncio.subprocess.Process | None = None
        self.name = name
        self.ready: Ready | None = None

    @property
    def part(self) -> RouterMember | None:
        """Its name, admin port and process id, None while it does not listen."""
        return None if self.ready is None else RouterMember(self.name, self.ready.admin, self.ready.pid)

    async def start(self) -> None:
        """Start it and wait until it listens. StartupError, and it is ended, or _RefusedError when it does not."""
        self._ready_file.unlink(missing_ok=True)
        write_private(self._config_file, config_loader.dump(self._config))
        command = tied([sys.executable, "-m", "tandem.router", "--config", str(self._config_file)])
        self._child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
        ended = asyncio.create_task(self._child.wait())
        try:
            async with asyncio.timeout(READY_S):
                while not self._ready_file.is_file():
                    if ended.done():
                        raise _RefusedError(ended.result())
                    await asyncio.wait([ended], timeout=_LOOK_S)
        except TimeoutError:
            self._child.kill()  # so that it is started again: it is waited for no longer
            raise StartupError(
                f"process {self.name} of the router did not listen within {READY_S:g} s", todo="look at its log"
            ) from None
        finally:
            ended.cancel()
        await self._join(config_loader.load(self._ready_file, Ready))

    async def _join(self, ready: Ready) -> None:
        """Catch up with the orders, then be asked with the others. StartupError, and the process is ended, if not."""
        async with self._orders.lock:
            try:
                part = RouterMember(self.name, ready.admin, ready.pid)
                await replay(self._orders, part, load_key(Path(self._config.admin_key_file)))
            except TandemError as error:
                assert self._child is not None
                if self._child.returncode is None:
                    self._child.kill()
                raise StartupError(
                    f"process {self.name} of the router cannot join the others", why=str(error)
                ) from error
            self.ready = ready
        self._backoff.ready()

    async def ended(self) -> int:
        """Wait until it has ended, for its exit status."""
        assert self._child is not None
        return await self._child.wait()

    async def keep(self) -> None:
        """Start it again whenever it ends, until cancelled."""
        while True:
            code = await self.ended()
            self.ready = None
            delay_s = self._backoff.died()
            event(_log, "process ended", logging.WARNING, process=self.name, code=code, again_in_s=delay_s)
            await asyncio.sleep(delay_s)
            try:
                await self.start()
            except (_RefusedError, TandemError, OSError) as error:  # the last: no memory, no room on the disk
                event(_log, "process did not start", logging.ERROR, process=self.name, why=str(error))

    async def stop(self) -> None:
        """SIGTERM, so that its streams finish; SIGKILL if it does not end."""
        if self._child is not None and self._child.returncode is None:
            self._child.terminate()
            try:
                async with asyncio.timeout(self._config.settings.drain_s + AFTER_DRAIN_S):
                    await self._child.wait()
            except TimeoutError:
                self._child.kill()
                await self._child.wait()
        for path in (self._ready_file, self._config_file):
            path.unlink(missing_ok=True)


async def _stop(every: list[Process]) -> None:
    await asyncio.gather(*(process.stop() for process in every))


@contextlib.contextmanager
def _held(host: str, port: int) -> Iterator[int]:
    """A port that no other program can have, and that processes of this user may share."""
    held = reserve(host, port)
    try:
        yield port_of(held)
    finally:
        held.close()
