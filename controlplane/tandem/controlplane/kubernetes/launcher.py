"""A launcher for workers that Kubernetes starts: reports the pods, and makes the cluster fit the record.

It starts no pod by name and ends none itself. More pods come when a Deployment's scale is raised;
one that is to leave is marked as the cheapest to lose, then the scale is lowered. Each step is derived from the state
observed then, never from past actions: it may be repeated, by this controller or the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tandem.controlplane.kubernetes.adoption import Home, Homes, PodTargets
from tandem.controlplane.kubernetes.api import ExpiredError, KubernetesApi
from tandem.controlplane.kubernetes.pods import COST, LOWEST_COST, MEMBER, POOL, ROLE, WorkerPod, read, staying
from tandem.controlplane.launcher import LauncherBase, RunningWorker, WorkerExited, WorkerSpec
from tandem.core.errors import ConflictError, NotFoundError, TandemError
from tandem.core.ids import WorkerId
from tandem.core.logs import event
from tandem.core.state_enums import RoleName

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
"""The pods are compared with the record after every change, and at least so often."""
_RELIST_S: Final = 0.2
_TAKEN: Final = 1024
"""Number of victims that are remembered, the latest."""
_BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0)


class KubernetesLauncher(LauncherBase):
    """A launcher over the pods that `selector` finds. `run` it in a task, beside its controller."""

    def __init__(self, api: KubernetesApi, selector: str, homes: Homes, *, model: str) -> None:
        super().__init__()
        self._api, self._selector, self._homes, self._model = api, selector, homes, model
        self._pods: dict[WorkerId, WorkerPod] = {}
        self._replicas: dict[str, tuple[int, int]] = {}
        self._changes = 0
        self._asked: dict[str, int] = {}
        """How many pods were asked for here and are not known to have come: they may be taken back."""
        self._roles: Mapping[WorkerId, RoleName] = {}
        self._wanted = PodTargets()
        self._members: dict[WorkerId, int] = {}
        """Since which version, also where it does not stand on the pod yet."""
        self._victims: set[WorkerId] = set()
        self._taken: dict[WorkerId, None] = {}
        self._changed, self._moved = asyncio.Event(), asyncio.Condition()
        self._on_change: Callable[[], None] = lambda: None
        self.is_listed = False
        """True once the pods have been listed; until then none is known."""

    async def run(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Follow the pods and make them fit, until cancelled; outages are survived. `on_change`: a pod changed."""
        self._on_change = on_change
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._fit())

    @property
    def pods(self) -> Sequence[WorkerPod]:
        """Return all known pods; a mark that is on its way counts."""
        return [self._noted(pod) for pod in self._pods.values()]

    def replicas(self, version: int) -> Mapping[str, int]:
        """Return by pool of the chart the replicas of its Deployment, where they were read after the last change of its
        pods and of the record, with the pods as they are known."""
        return {pool: count for pool, (known, count) in self._replicas.items() if known == version}

    @property
    def taken(self) -> frozenset[WorkerId]:
        """Return the latest workers that were marked as victims, and are gone or will be."""
        return frozenset(self._taken)

    def note_members(self, members: Iterable[WorkerId], version: int) -> None:
        """Record that these stand in that version of the record."""
        for member in members:
            self._members.setdefault(member, version)

    def want(self, wanted: PodTargets, roles: Mapping[WorkerId, RoleName]) -> None:
        """Set what the record wants now, and the role of every registered worker."""
        self.note_members(wanted.members, wanted.version)
        if (wanted, dict(roles)) != (self._wanted, self._roles):
            self._wanted, self._roles = wanted, dict(roles)
            self._changed.set()

    # ---- as every launcher -----------------------------------------------------------------------------------------

    async def start_worker(self, spec: WorkerSpec) -> None:
        """Report WorkerExited: workers cannot be started by name; pods were assigned to members before."""
        self._reports.put_nowait(WorkerExited(spec.worker_id, "pods start by themselves", is_unplaced=True))

    async def stop(self, worker_id: WorkerId, *, grace_s: float) -> None:
        """Take its pod out of its Deployment's scale, and return once Kubernetes ends it, with the pod's own grace."""
        self._victims.add(worker_id)
        self._changed.set()
        try:
            async with self._moved:
                await self._moved.wait_for(lambda: self._is_over(worker_id))
        finally:
            self._victims.discard(worker_id)

    async def running(self) -> Sequence[RunningWorker]:
        """Return the running members, and former members: pods that have just come belong to no member yet."""
        return [
            RunningWorker(
                worker_id=pod.name,
                model=self._model,
                role=pod.role,
                ranks=home.ranks,
                revision=pod.revision,
                restart_generation=0,
                is_ready=True,
            )
            for pod in staying(self.pods)
            if pod.was_member(self._wanted.version) and (home := self._homes.of_pod(pod)) is not None
        ]

    # ---- following the pods ----------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        failures = _Failures("pods cannot be followed")
        while True:
            try:
                listed = await self._api.pods(self._selector)
                await self._take_all(_readable(listed.pods))
                failures.over()
                async for change in self._api.watch_pods(self._selector, listed.version):
                    for pod in _readable([change.pod]):
                        await self._take(pod, is_gone=change.is_gone)
            except ExpiredError:
                event(log, "the watch of pods expired")
            except TandemError as error:
                await failures.pause(error)
            await asyncio.sleep(_RELIST_S)

    async def _take_all(self, pods: Sequence[WorkerPod]) -> None:
        self.is_listed = True
        here = {pod.name for pod in pods}
        for pod in [pod for name, pod in self._pods.items() if name not in here]:
            await self._take(pod, is_gone=True)
        for pod in pods:
            await self._take(pod)

    async def _take(self, pod: WorkerPod, *, is_gone: bool = False) -> None:
        before = self._pods.get(pod.name)
        if before is not None and before.is_leaving:  # there is no way back, whatever response arrives late
            pod = replace(pod, is_leaving=True)
        if before == pod and not is_gone:
            return
        self._replicas.pop(pod.pool, None)
        self._changes += 1
        if pod.is_victim or (before is not None and before.is_victim):
            self._taken[pod.name] = None
            while len(self._taken) > _TAKEN:
                del self._taken[next(iter(self._taken))]
        if is_gone:
            self._pods.pop(pod.name, None)
            self._members.pop(pod.name, None)
        else:
            self._pods[pod.name] = pod
        if before is not None and not before.is_leaving and (is_gone or pod.is_leaving):
            why = "its pod is gone" if is_gone else "its pod is being ended"
            self._reports.put_nowait(WorkerExited(pod.name, why, is_for_good=True))
        self._changed.set()
        self._on_change()
        async with self._moved:
            self._moved.notify_all()

    def _noted(self, pod: WorkerPod) -> WorkerPod:
        since = self._members.get(pod.name, 0)
        is_news = since > 0 and not pod.was_member(since)
        return replace(pod, member_since=since) if is_news else pod

    def _is_over(self, worker_id: WorkerId) -> bool:
        pod = self._pods.get(worker_id)
        return pod is None or pod.is_leaving

    # ---- making them fit -------------------------------------------------------------------------------------------

    async def _fit(self) -> None:
        failures = _Failures("pods and scales cannot be changed")
        while True:
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            if not self.is_listed:
                continue
            try:
                await self._fit_once()
                failures.over()
            except TandemError as error:
                await failures.pause(error)
            except ExpiredError:
                self._changed.set()

    async def _fit_once(self) -> None:
        for pod in staying(self._pods.values()):
            await self._mark(pod)
        for home in self._homes.all:
            victims = any(pod.is_victim and pod.pool == home.pool for pod in staying(self._pods.values()))
            if home.is_scaled_here and (victims or self._is_asked(home)):
                await self._fit_scale(home)

    def _is_asked(self, home: Home) -> bool:
        is_unclear = home.pool in self._wanted.missing and home.pool not in self.replicas(self._wanted.version)
        vacancies = self._wanted.vacancies.get(home.pool, 0)
        if self._has_newcomers(home) and home.pool not in self.replicas(self._wanted.version):
            return True
        return is_unclear or vacancies > 0 or self._asked.get(home.pool, 0) > vacancies

    def _has_newcomers(self, home: Home) -> bool:
        """True if a worker is registered that the record never contained, as far as is known."""
        return any(
            pod.pool == home.pool and pod.name in self._roles and not pod.was_member(self._wanted.version)
            for pod in staying(self.pods)
            if pod.name not in self._wanted.members
        )

    async def _mark(self, pod: WorkerPod) -> None:
        """Write the mark on the pod, for the next controller, the ReplicaSet, and people."""
        annotations: dict[str, str] = {}
        if pod.name in self._wanted.members and not pod.was_member(self._wanted.version):
            annotations[MEMBER] = str(self._wanted.version)
        if pod.name in self._victims and not pod.is_victim:
            annotations[COST] = LOWEST_COST
        role = self._roles.get(pod.name, pod.role)
        labels = {ROLE: role.value} if role is not pod.role else {}
        if labels or annotations:
            try:
                found = await self._api.patch_pod(pod.name, labels=labels, annotations=annotations)
            except NotFoundError:
                return  # the watch will report it
            for after in _readable([found]):
                if after.name in self._pods:  # else it has gone meanwhile
                    await self._take(after)

    async def _fit_scale(self, home: Home) -> None:
        """Lower the scale to the staying pods while a victim is there, for a satisfied ReplicaSet ends none. Else raise
        it to the pods to come; pods that were asked for and are wanted no more are taken back: a ReplicaSet ends those
        first that have not started."""
        changes, version = self._changes, self._wanted.version
        listed = await self._api.pods(f"{self._selector},{POOL}={home.pool}")
        scale = await self._api.scale(home.deployment)
        here = staying(_readable(listed.pods))
        if changes != self._changes:
            return  # the list may be older than the known state
        for pod in here:
            if pod.name in self._pods:  # a mark that the watch has not reported yet
                await self._take(pod)
        known = {pod.name for pod in staying(self._pods.values()) if pod.pool == home.pool}
        if (changes, version, known) != (self._changes, self._wanted.version, {pod.name for pod in here}):
            return  # the wishes were given without knowing this
        self._replicas[home.pool] = version, scale.replicas
        self._on_change()
        replicas = self._fitting(home, here, scale.replicas)
        if replicas == scale.replicas:
            return
        try:
            await self._api.set_scale(home.deployment, replicas, version=scale.version)
        except ConflictError:
            self._changed.set()  # it is looked at again
            return
        victims = [pod.name for pod in here if pod.is_victim]
        if not victims:
            self._asked[home.pool] = max(0, self._asked[home.pool] + replicas - scale.replicas)
        event(log, "scale set", deployment=home.deployment, replicas=replicas, before=scale.replicas, victims=victims)

    def _fitting(self, home: Home, here: Sequence[WorkerPod], replicas: int) -> int:
        victims = sum(pod.is_victim for pod in here)
        if victims:
            if self._wanted.missing.get(home.pool):
                return replicas  # a scale that is lowered now would be taken for one lowered from outside
            return min(replicas, max(len(here) - victims, replicas - victims))
        vacancies = self._wanted.vacancies.get(home.pool, 0)
        new = sum(not self._noted(pod).was_member(self._wanted.version) for pod in here)
        coming = new + max(0, replicas - len(here))
        asked = self._asked[home.pool] = min(self._asked.get(home.pool, 0), coming)
        if coming < vacancies:
            return max(replicas, len(here) - new + vacancies)
        return replicas - max(0, min(asked, coming - vacancies - self._wanted.missing.get(home.pool, 0)))


class _Failures:
    """Reports an error once, and waits longer each time."""

    def __init__(self, what: str) -> None:
        self._what, self._count, self._told = what, 0, ""

    def over(self) -> None:
        if self._count:
            event(log, "the Kubernetes API answers again")
        self._count, self._told = 0, ""

    async def pause(self, error: TandemError) -> None:
        if error.message != self._told:
            event(log, self._what, logging.WARNING, why=error.message)
        self._told = error.message
        delay_s = _BACKOFF_S[min(self._count, len(_BACKOFF_S) - 1)]
        self._count += 1
        await asyncio.sleep(delay_s)


def _readable(pods: Iterable[Mapping[str, Any]]) -> list[WorkerPod]:
    """Return the pods that are workers'."""
    found: list[WorkerPod] = []
    for pod in pods:
        try:
            found.append(read(pod))
        except ValueError as error:
            event(log, "a pod is not that of a worker", logging.WARNING, why=str(error))
    return found
