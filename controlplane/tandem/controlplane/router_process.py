"""Keeps the router running on this machine: starts it, waits until it listens, starts it again on the same ports."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tandem.controlplane.child_process import ChildProcess
from tandem.controlplane.environment import Environment
from tandem.controlplane.state_dir import HeldState
from tandem.core import config_loader
from tandem.core.backoff import RestartBackoff
from tandem.core.clock import Clock
from tandem.core.config import ClusterConfig, RouterConfig, RouterSection, ServedModel, StoreSection
from tandem.core.errors import ConfigError, StartupError
from tandem.core.events import EventKind, EventSink
from tandem.core.timeout_scale import patient
from tandem.router.server.registration import Ready

ROUTER_COMMAND = (sys.executable, "-m", "tandem.router")
READY_TIMEOUT_S = patient(60.0)
_POLL_S = 0.05


def router_config(
    config: ClusterConfig,
    settings: RouterSection,
    *,
    router_id: str,
    models: Iterable[ServedModel],
    redis_url: str,
    secret_file: Path,
    admin_key_file: Path,
    ready_file: Path,
    store: StoreSection,
) -> RouterConfig:
    """Return a router's start configuration, wherever it runs. `settings`: with its ports (`resolve.check`)."""
    return RouterConfig(
        cluster=config.name,
        router_id=router_id,
        models=tuple(models),
        redis_url=redis_url,
        secret_file=str(secret_file),
        admin_key_file=str(admin_key_file),
        ready_file=str(ready_file),
        log_level=config.log_level,
        log_format=config.log_format,
        settings=settings,
        admission=config.admission,
        slo=config.slo,
        budget=config.budget,
        store=store,
        planner=config.planner,
        price=config.price,
        tracing=config.tracing,
    )


class RouterProcess:
    """One router. `run` keeps it alive until cancelled; its end before it ever listened raises StartupError."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        held: HeldState,
        environment: Environment,
        events: EventSink,
        clock: Clock,
        command: Sequence[str] = ROUTER_COMMAND,
    ) -> None:
        self._config, self._held, self._environment = config, held, environment
        self._events, self._command = events, tuple(command)
        self._ready_file = Path(config.ready_file)
        self._backoff = RestartBackoff(clock)
        self._child: ChildProcess | None = None
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    async def wait_ready(self) -> Ready:
        """Return where it listens, once it does."""
        return await asyncio.shield(self._ready)

    async def run(self) -> None:
        """Start it, and again whenever it dies after it listened once."""
        name = self._config.router_id
        while True:
            reason = await self._run_once()
            self._events.record(EventKind.EXITED, name, reason)
            if not self._ready.done():
                raise StartupError("the router cannot start", why=reason)
            delay_s = self._backoff.died()
            self._events.record(EventKind.RESTART_PLANNED, name, f"in {delay_s:g} s, because it died")
            await asyncio.sleep(delay_s)

    async def stop(self, *, grace_s: float, hurry: asyncio.Event | None = None) -> None:
        """End it. Call this after `run` was cancelled."""
        if self._child is not None:
            await self._child.stop(grace_s=grace_s, hurry=hurry)

    async def _run_once(self) -> str:
        """Run the process once; return why it ended."""
        why = "after it died" if self._ready.done() else "the cluster starts"
        self._events.record(EventKind.STARTED, self._config.router_id, why)
        try:
            self._child = child = self._start()
        except OSError as error:
            return f"it could not be started: {error}"
        output = asyncio.create_task(_drain(child))
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while child.is_running and not _is_there(self._ready_file):
                    await child.wait_at_most(_POLL_S)
            if child.is_running:
                self._note_ready(config_loader.load(self._ready_file, Ready))
            code = await child.wait()
        except TimeoutError:
            return await _ended(child, f"it did not say where it listens within {READY_TIMEOUT_S:g} s")
        except ConfigError as error:
            return await _ended(child, f"where it listens cannot be read: {error.message}")
        finally:
            output.cancel()
        return _router_error(code, child) or child.end_reason(code)

    def _start(self) -> ChildProcess:
        name = self._config.router_id
        self._ready_file.unlink(missing_ok=True)
        path = self._held.write_config(name, self._config)
        return ChildProcess.start(
            [*self._command, "--config", str(path)],
            variables=self._environment.for_child(threads=1),
            log_file=self._held.state.log_file(name),
        )

    def _note_ready(self, addresses: Ready) -> None:
        self._backoff.ready()
        self._events.record(EventKind.READY, self._config.router_id, f"it listens at {addresses.http}")
        if not self._ready.done():
            self._ready.set_result(addresses)
            settings = dataclasses.replace(
                self._config.settings,
                port=_port(addresses.http),
                grpc_port=_port(addresses.grpc),
                admin_port=_port(addresses.admin),
            )
            self._config = dataclasses.replace(self._config, settings=settings)


def _is_there(path: Path) -> bool:
    return path.is_file()


async def _ended(child: ChildProcess, why: str) -> str:
    """Kill it and return `why`."""
    child.kill()
    await child.wait()
    return why


async def _drain(child: ChildProcess) -> None:
    async for _ in child.lines():
        pass


def _router_error(code: int, child: ChildProcess) -> str:
    """Return the error of a router: one that refuses its configuration ends with code 2 and one line with the
    reason."""
    return child.last_line().removeprefix("tandem router: ") if code == 2 else ""


def _port(address: str) -> int:
    return int(address.rstrip("/").rsplit(":", 1)[1])
