"""The head of a Ray cluster as `up`'s child: it and its own Redis are kept running, so that nodes outlive its death."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.controlplane import gpu_free_check
from tandem.controlplane.child_process import ChildProcess, message_in
from tandem.controlplane.environment import Environment
from tandem.controlplane.ray.ray_start import NodeConfig
from tandem.controlplane.redis_server import ClusterRedis
from tandem.controlplane.state_dir import HeldState
from tandem.core.config import RaySection
from tandem.core.errors import StartupError
from tandem.core.files import write_private
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.statestore.embedded_redis import PrivateRedis

log = logging.getLogger(__name__)

_MEMBER = "ray-head"
_COMMAND = (sys.executable, "-m", "tandem.controlplane.ray.ray_start")
_START_TIMEOUT_S = 90.0
_GRACE_S = 20.0
_AGAIN_S = 1.0


class RayHead:
    """`async with` it: inside, a head runs at `address` and takes the token in `token_file`."""

    def __init__(
        self,
        held: HeldState,
        environment: Environment,
        section: RaySection,
        *,
        cluster: str,
        say: Callable[[str], None],
        hurry: asyncio.Event | None = None,
    ) -> None:
        self._held, self._environment, self._section = held, environment, section
        self._cluster, self._say, self._hurry = cluster, say, hurry
        self.token_file = held.state.path / "ray.token"
        self._directory = held.state.path / "ray-redis"
        self._child: ChildProcess | None = None
        self._started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        return self._started.result()

    async def __aenter__(self) -> RayHead:
        secret = ClusterSecret.load(self._held.state.secret_file)
        write_private(self.token_file, secret.derive(b"ray").hex().encode())
        password = secret.derive(b"ray redis").hex()
        server = PrivateRedis.start(self._directory, password)
        self._redis = ClusterRedis(server.url, server, lambda port: PrivateRedis.spawn(self._directory, password, port))
        try:
            path = self._held.write_config(_MEMBER, self._config(server.port, password))
            self._tasks = [
                asyncio.create_task(self._redis.keep(lambda text: self._say(f"its Redis: {text}"))),
                asyncio.create_task(self._keep(path)),
            ]
            await self._await_start()
        except BaseException:
            await self._close()
            raise
        self._say(f"the head listens at {self.address}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    def _config(self, redis_port: int, redis_password: str) -> NodeConfig:
        section = self._section
        return NodeConfig(
            host=section.host,
            port=usable_port(section.head_port),
            cpus=section.cpus or self._environment.cores,
            gpus=gpu_free_check.count(),
            hardware=section.hardware,
            token_file=str(self.token_file),
            redis_address=f"127.0.0.1:{redis_port}",
            redis_password=redis_password,
            cluster=self._cluster,
            state_root=str(self._held.state.path.parent),
        )

    async def _await_start(self) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(self._started), _START_TIMEOUT_S)
        except TimeoutError:
            raise StartupError(
                f"Ray's head does not start within {_START_TIMEOUT_S:g} s",
                todo=f"Look into {self._held.state.log_file(_MEMBER)}",
            ) from None

    async def _keep(self, path: Path) -> None:
        """Run the head's keeper, which runs Ray; again whenever it ends."""
        while True:
            why = await self._run_once(path)
            if not self._started.done():
                self._started.set_exception(StartupError("Ray's head cannot start", why=why))
                return
            self._say(f"the head ended and is started again: {why}")
            await asyncio.sleep(_AGAIN_S)

    async def _run_once(self, path: Path) -> str:
        try:
            self._child = child = ChildProcess.start(
                [*_COMMAND, "--config", str(path)],
                variables=self._environment.variables,
                log_file=self._held.state.log_file(_MEMBER),
            )
        except OSError as error:
            return f"it could not be started: {error}"
        trouble = ""
        try:
            async for line in child.lines():
                said = message_in(line)
                if "started" in said and not self._started.done():
                    self._started.set_result(said["started"])
                elif "started" in said:
                    self._say("the head runs again")
                elif "trouble" in said:
                    trouble = said["trouble"]
                    event(log, "Ray's head", logging.WARNING, trouble=repr(trouble))
                    if self._started.done():
                        self._say(f"the head is started again: {trouble}")
        except OSError as error:
            trouble = f"its output cannot be read: {error}"
            child.kill()
        return trouble or child.end_reason(await child.wait())

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            if self._child is not None:
                await self._child.stop(grace_s=_GRACE_S, hurry=self._hurry)
        finally:
            self._redis.stop()
            if self._started.done() and not self._started.cancelled():
                self._started.exception()


def usable_port(port: int) -> int:
    """Return `port` if it is free, for 0 any free one. StartupError if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - Ray's head listens on all; its token keeps others out
        except OSError as error:
            raise StartupError(
                f"port {port} is taken", why="Ray's head is to listen there", todo="Choose another with --ray-port"
            ) from error
        return int(probe.getsockname()[1])
