"""Forwarding of a Service's connections to its pods: addresses of Services, and a forwarder at each of their ports.

Pods that are ready and not being ended get new connections, in turn; open connections stay where they are. As on nodes
of a real cluster it takes a while until a pod that leaves gets none any more, and nothing is sent a second time.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.integration.deploy.emulation.resources import PODS, SERVICES, Object
from tests.integration.deploy.emulation.store import Store, fits
from tests.integration.deploy.emulation.workloads import active, is_ready

NEWS_S = 1.0
"""From a change of a pod until forwarders know of it."""
_LOOK_S = 0.05
_PART_BYTES = 65536
PortOf = Callable[[str, int | str], int]
"""The number of a port of a running pod, by the pod's name."""


@dataclass
class Forwarders:
    """All of a cluster. `run` them in a thread. `addresses`: of Services, by name; each has all ports to itself."""

    store: Store
    addresses: dict[str, str]
    port_of: PortOf
    stopping: threading.Event = field(default_factory=threading.Event)
    _known: list[tuple[float, dict[str, list[Object]]]] = field(default_factory=list)
    _turns: itertools.count[int] = field(default_factory=itertools.count)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def run(self) -> None:
        asyncio.run(self._serve())

    def known(self, service: str) -> list[str]:
        """Names of the pods that get the connections of a Service."""
        return [pod["metadata"]["name"] for pod in self._pods(service)]

    async def _serve(self) -> None:
        servers: dict[tuple[str, int], asyncio.Server] = {}
        while not self.stopping.is_set():
            self._look()
            services = {_name(each): each for each in self.store.all(SERVICES)}
            wanted = {
                (name, port["port"]): port.get("targetPort", port["port"])
                for name, service in services.items() for port in service["spec"]["ports"]
            }  # fmt: skip
            for at, target in wanted.items():
                if at not in servers:
                    servers[at] = await self._begin(*at, target)
            for at in [at for at in servers if at not in wanted]:
                servers.pop(at).close()
            await asyncio.sleep(_LOOK_S)
        for server in servers.values():
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _look(self) -> None:
        """Remember which pods are there, until it is known everywhere."""
        pods, now_s = active(self.store.all(PODS)), time.monotonic()
        there = {
            _name(service): [pod for pod in pods if is_ready(pod) and fits(pod, _selector(service))]
            for service in self.store.all(SERVICES)
        }
        self._known.append((now_s, there))
        while len(self._known) > 1 and self._known[1][0] < now_s - NEWS_S:
            self._known.pop(0)

    def _pods(self, service: str) -> list[Object]:
        return self._known[0][1].get(service, []) if self._known else []

    async def _begin(self, service: str, port: int, target: int | str) -> asyncio.Server:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._forward(service, target, reader, writer)
            except asyncio.CancelledError:
                return  # asyncio would log it as a failure
            finally:
                self._tasks.discard(task)
                writer.close()

        return await asyncio.start_server(accepted, self.addresses[service], port)

    async def _forward(
        self, service: str, target: int | str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        pods = self._pods(service)
        if not pods:
            return
        pod = pods[next(self._turns) % len(pods)]
        try:
            port = self.port_of(pod["metadata"]["name"], target)
            there, back = await asyncio.open_connection(pod["status"]["podIP"], port)
        except (OSError, KeyError):
            return
        try:
            await asyncio.gather(_pass(reader, back), _pass(there, writer))
        finally:
            back.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes, and the end of them."""
    try:
        while part := await reader.read(_PART_BYTES):
            writer.write(part)
            await writer.drain()
        writer.write_eof()
    except (OSError, RuntimeError):
        writer.close()


def _name(service: Object) -> str:
    return f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"


def _selector(service: Object) -> list[tuple[str, str, bool]]:
    return [(key, value, True) for key, value in service["spec"]["selector"].items()]
