"""A controller with the launcher `kubernetes`, over an emulated cluster with pods that run fake workers."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem.controlplane.controller import Controller
from tandem.controlplane.kubernetes import pods
from tandem.controlplane.kubernetes.adoption import Home, Homes
from tandem.controlplane.kubernetes.api import KubernetesApi
from tandem.controlplane.kubernetes.launcher import KubernetesLauncher
from tandem.controlplane.kubernetes.pod_sync import PodFollowing
from tandem.controlplane.worker_control import WorkerControlClient, WorkerLook
from tandem.core.clock import MonotonicClock
from tandem.core.desired import DesiredState, Pool
from tandem.core.errors import UnavailableError
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.state_enums import RoleName, WorkerState
from tests.integration.deploy.emulated import Cluster, serving
from tests.unit.controlplane.controller_rig import Events, spec_of
from tools.waiting import wait_for_async

P, D = RoleName.PREFILL, RoleName.DECODE
ROLES = {"prefill": P, "decode": D}
HOMES = Homes([Home(pool=name, role=role, deployment=f"demo-worker-{name}") for name, role in ROLES.items()])
SELECTOR = "app=worker"


@dataclass
class Worker:
    """A worker's reported state, and the orders that it received."""

    role: RoleName
    state: WorkerState = WorkerState.READY
    target: RoleName | None = None
    was_drained: bool = False


class Record:
    """The desired state: of two writers onto one version, one wins."""

    def __init__(self, state: DesiredState) -> None:
        self.state, self.refused = state, 0
        self._changed = asyncio.Condition()

    async def watch(self, on_change: Callable[[DesiredState], None]) -> None:
        seen = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.state.version != seen)  # noqa: B023 - it is awaited here
                seen = self.state.version
            on_change(self.state)

    async def save(self, state: DesiredState, expected_version: int) -> bool:
        await asyncio.sleep(0)
        if self.state.version != expected_version:
            self.refused += 1
            return False
        state.validate()
        async with self._changed:
            self.state = state
            self._changed.notify_all()
        return True

    async def wish(self, change: Callable[[DesiredState], DesiredState]) -> None:
        """Change the present record as an operator does."""
        while not await self.save(replace(change(self.state), version=self.state.version + 1), self.state.version):
            pass


@dataclass
class Kubelet(WorkerControlClient):
    """Start and end pods at once or, those in `slow`, when the test triggers it. Also serves as the controller's worker
    control: a drain and a flip take one look."""

    cluster: Cluster
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    cut_off: list[str] = field(default_factory=list)
    """Workers that a ReplicaSet picked while they had work."""

    async def run(self) -> None:
        while True:
            for name, pod in list(self.cluster.pods.items()):
                self._keep(name, is_leaving="deletionTimestamp" in pod["metadata"], role=pod["owner"].split("-")[-1])
            await asyncio.sleep(0.005)

    def _keep(self, name: str, *, is_leaving: bool, role: str) -> None:
        worker = self.workers.get(WorkerId(name))
        if is_leaving:
            if worker is not None and worker.state != "drained" and name in self.cluster.ended:
                self.cut_off.append(name)
            self.workers.pop(WorkerId(name), None)
            self.cluster.remove_pod(name)
        elif worker is None and name not in self.slow:
            self.workers[WorkerId(name)] = Worker(ROLES[role])
            self.cluster.set_ready(name)

    def roles(self) -> dict[WorkerId, RoleName]:
        return {name: worker.role for name, worker in self.workers.items()}

    async def look(self, worker: WorkerId) -> WorkerLook:
        found = self.workers.get(worker)
        if found is None or worker in self.silent:
            raise UnavailableError(f"{worker} does not answer")
        said = WorkerLook(
            worker=worker, incarnation=Incarnation(1), role=found.role, state=found.state, target=found.target
        )
        if found.state is WorkerState.DRAINING:
            found.state, found.was_drained = WorkerState.DRAINED, True
        if found.target is not None:
            found.role, found.target, found.state = found.target, None, WorkerState.READY
        return said

    async def drain(self, worker: WorkerId, deadline_s: float | None = None) -> WorkerLook:
        return self._obey(worker, WorkerState.DRAINING)

    async def uncordon(self, worker: WorkerId) -> WorkerLook:
        return self._obey(worker, WorkerState.READY)

    async def become(self, worker: WorkerId, role: RoleName, deadline_s: float | None = None) -> WorkerLook:
        return self._obey(worker, WorkerState.FLIPPING, role)

    def _obey(self, worker: WorkerId, state: WorkerState, target: RoleName | None = None) -> WorkerLook:
        found = self.workers[worker]
        found.state, found.target = state, target or found.target
        return WorkerLook(worker=worker, incarnation=Incarnation(1), role=found.role, state=state, target=target)


@dataclass
class Scene:
    """The objects that a test observes and changes."""

    cluster: Cluster
    kubelet: Kubelet
    record: Record
    events: Events
    begin: Callable[[], Coroutine[None, None, asyncio.Task[None]]]
    """Starts one more controller; cancel it to have it die."""

    def members(self, role: RoleName = D) -> set[WorkerId]:
        return {member.worker_id for member in self.record.state.members if member.role is role}

    def is_settled(self, prefill: int, decode: int) -> bool:
        """True if there are exactly so many of each, every one a marked pod that serves as recorded, and no other
        pods."""
        state = self.record.state
        is_right = all(
            (worker := self.kubelet.workers.get(member.worker_id)) is not None
            and worker.role is member.role
            and (worker.state == "drained" if member.is_cordoned else worker.state == "ready")
            for member in state.members
        )
        pods_of = self.cluster.pods
        is_marked = all(
            pods.MEMBER in pods_of.get(member.worker_id, {}).get("metadata", {}).get("annotations", {})
            for member in state.members
        )
        live = set(self.cluster.live())
        wants = sum(deployment["replicas"] for deployment in self.cluster.deployments.values())
        return (
            is_right
            and is_marked
            and (len(self.members(P)), len(self.members())) == (prefill, decode)
            and live == {member.worker_id for member in state.members}
            and len(live) == wants
        )

    async def settled(self, prefill: int, decode: int) -> None:
        try:
            await wait_for_async(lambda: self.is_settled(prefill, decode))
        except AssertionError as error:
            wants = {name: found["replicas"] for name, found in self.cluster.deployments.items()}
            told = "\n".join(map(str, self.events.seen[-30:]))
            raise AssertionError(
                f"not {prefill}:{decode}\n{self.record.state.members}\n{self.kubelet.workers}\n"
                f"{wants} {self.cluster.live()}\n{self.cluster.writes}\n{told}"
            ) from error


def play(
    account: Path,
    scene: Callable[[Scene], Coroutine[None, None, None]],
    *,
    prefill: int = 1,
    decode: int = 3,
    there: tuple[int, int] | None = None,
    homes: Homes = HOMES,
    controllers: int = 1,
) -> Scene:
    """With controllers that run meanwhile. `there`: what Helm installed, by default what is configured."""
    cluster = Cluster()
    counts = there if there is not None else (prefill, decode)
    for name, count in zip(ROLES, counts, strict=True):
        labels = {"app": "worker", pods.POOL: name, pods.ROLE: name, pods.REVISION: "r1"}
        cluster.add_deployment(f"demo-worker-{name}", count, {"labels": labels})
    pools = [Pool(name=role.value, model="m", role=role, count=count) for role, count in ((P, prefill), (D, decode))]
    configured = DesiredState(version=1, pools=tuple(pools)).filled()

    async def run(url: str) -> Scene:
        record, events, kubelet = Record(configured), Events(), Kubelet(cluster)
        async with AsyncExitStack() as stack:

            async def begin() -> asyncio.Task[None]:
                api = await stack.enter_async_context(KubernetesApi(url, account, "serving", timeout_s=20.0))
                return asyncio.create_task(control(api, homes, record, kubelet, events))

            found = Scene(cluster, kubelet, record, events, begin)
            tasks = [asyncio.create_task(kubelet.run()), *[await begin() for _ in range(controllers)]]
            playing = asyncio.create_task(scene(found))
            done, _ = await asyncio.wait([playing, *tasks], timeout=240, return_when=asyncio.FIRST_COMPLETED)
            for task in (playing, *tasks):
                task.cancel()
            await asyncio.gather(playing, *tasks, return_exceptions=True)
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            assert playing in done, "the scene did not end"
            return found

    with serving(cluster) as url:
        return asyncio.run(run(url))


async def control(api: KubernetesApi, homes: Homes, record: Record, kubelet: Kubelet, events: Events) -> None:
    launcher = KubernetesLauncher(api, SELECTOR, homes, model="m")
    controller = Controller(
        launcher=launcher,
        desired=record,
        make_spec=spec_of,
        events=events,
        clock=MonotonicClock(),
        client=kubelet,
        is_continued=True,
        following=PodFollowing(launcher, homes, kubelet.roles, record.save, events),
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(launcher.run(controller.look_again))
        group.create_task(controller.run())
