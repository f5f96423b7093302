"""Keeps the groups of a RayCluster as large as the record and the workers need, beside the reconcile loop.

It starts and stops no worker: a leaving worker is drained and stopped by the controller first, and only then is its
node named. It remembers how long nodes have been empty and nothing else, so `up` may die after every step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from tandem.controlplane.kuberay_autoscaler.raycluster import groups_of, is_autoscaled, node_of, patch_of, selector
from tandem.controlplane.kuberay_autoscaler.sizing import Resize, empty, occupants, resizes
from tandem.controlplane.kubernetes.api import ExpiredError, KubernetesApi
from tandem.core.clock import Clock
from tandem.core.config import RayClusterSection
from tandem.core.desired import DesiredState
from tandem.core.errors import TandemError, UnavailableError
from tandem.core.ids import WorkerId
from tandem.core.logs import event
from tandem.core.state_enums import RoleName

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 2.0
EMPTY_S: Final = 10.0
"""A node goes when empty for so long: longer than it takes until a worker is seen where it is."""


class RayClusterSizer:
    """Resizes one RayCluster; `run` it in a task. An error is reported once and retried; ConfigError for an account
    that is none.

    `started`: the started workers, with the address of their node ("" = not known); None = unknown now. `hosts`: the
    registered workers, with theirs.
    """

    def __init__(
        self,
        section: RayClusterSection,
        *,
        load: Callable[[], Awaitable[DesiredState | None]],
        started: Callable[[], Mapping[WorkerId, str] | None],
        hosts: Callable[[], Mapping[WorkerId, str]],
        clock: Clock,
        say: Callable[[str, str], None],
    ) -> None:
        self._section, self._load, self._started, self._hosts = section, load, started, hosts
        self._clock, self._say = clock, say
        roles = {role: getattr(section, role.value) for role in RoleName}
        self._groups = {role: name for role, name in roles.items() if name}
        self._empty_since_s: dict[str, float] = {}
        self._trouble = ""

    async def run(self) -> None:
        """Run until cancelled."""
        section = self._section
        async with KubernetesApi(section.api, Path(section.account), section.namespace) as api:
            while True:
                try:
                    await self.look(api)
                    self._trouble = ""
                except (TandemError, ExpiredError, ValueError) as error:
                    why = error.message if isinstance(error, TandemError) else str(error)
                    if why != self._trouble:
                        event(log, "the RayCluster cannot be resized", logging.WARNING, why=why)
                        self._say("kuberay", f"the RayCluster cannot be resized: {why}")
                    self._trouble = why
                await asyncio.sleep(LOOK_EVERY_S)

    async def look(self, api: KubernetesApi) -> tuple[Resize, ...]:
        """Look once and return the changes made. Raises TandemError, ExpiredError, and ValueError for malformed
        objects."""
        raycluster = await api.raycluster(self._section.name)
        if is_autoscaled(raycluster):
            raise UnavailableError("Ray's autoscaler decides how many nodes there are", todo="turn one of the two off")
        nodes = [node_of(pod) for pod in (await api.pods(selector(self._section.name))).pods]
        state, started = await self._load(), self._started()
        if state is None or state.is_stopped or started is None:
            self._empty_since_s.clear()
            return ()
        workers = occupants(state, started, self._hosts(), self._groups)
        groups = groups_of(raycluster, sorted(self._groups.values()))
        found = resizes(groups, nodes, workers, self._settled(empty(nodes, workers)))
        if found:
            await api.patch_raycluster(self._section.name, patch_of(raycluster, found))
        replicas = {group.name: group.replicas for group in groups}
        named = {name for group in groups for name in group.named}
        for one in found:
            going = [name for name in one.named if name not in named]
            event(log, "group resized", group=one.group, replicas=one.replicas, before=replicas[one.group], going=going)
            without = f", without {', '.join(going)}" if going else ""
            self._say("kuberay", f"group {one.group} from {replicas[one.group]} to {one.replicas} nodes{without}")
        return found

    def _settled(self, free: set[str]) -> set[str]:
        now_s = self._clock.now_s()
        self._empty_since_s = {name: self._empty_since_s.get(name, now_s) for name in free}
        return {name for name, since_s in self._empty_since_s.items() if now_s - since_s >= EMPTY_S}
