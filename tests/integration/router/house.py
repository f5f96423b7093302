"""A router on real sockets with scripted workers behind it, in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from tandem.core.api_keys import ApiKey
from tandem.core.config import (
    AdmissionSection,
    BudgetSection,
    Disaggregation,
    RouterConfig,
    RouterSection,
    ServedModel,
    SloSection,
    StoreSection,
    TracingSection,
)
from tandem.core.ids import Incarnation, WorkerId, new_incarnation
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.router.server.main import Dependencies, Router
from tandem.router.server.storage import open_storage
from tandem.statestore.connection import connect
from tandem.statestore.keys import Keys
from tandem.statestore.stores.budgets import BudgetStore
from tandem.statestore.stores.desired import DesiredStateStore
from tandem.statestore.stores.events import ClusterEventStore
from tandem.statestore.stores.planning import PlanningStore
from tests.integration.router.scripted_worker import Fabric, Script, ScriptedWorker
from tools.waiting import PATIENCE_S, wait_for_async

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "tandem-tiny"
ADMIN_KEY = "k" * 32
TINY = ServedModel(name="tandem-tiny", model_dir=str(MODEL), served_names=("tandem-tiny", "tiny"))


@dataclass(frozen=True)
class Record:
    incarnation: Incarnation
    address: str


class ListedDirectory:
    """A registry that returns `workers` as of the last notification that they changed."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, ScriptedWorker] = {}
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    async def run(self, on_change: Callable[[Mapping[WorkerId, Any]], None]) -> None:
        while True:
            on_change({name: Record(worker.incarnation, worker.address) for name, worker in self.workers.items()})
            await self._changed.wait()
            self._changed.clear()

    def note_beat(self, worker: WorkerId, incarnation: Incarnation) -> None:
        return


class ListedKeys:
    """A store of API keys in memory; `watch` reports nothing but `lose`."""

    def __init__(self) -> None:
        self.kept: dict[str, ApiKey] = {}
        self.gone: list[str] = []
        self._changed = asyncio.Event()

    async def add(self, key: ApiKey) -> None:
        self.kept[key.id] = key

    async def revoke(self, key_id: str, now_s: float) -> bool:
        was_there = self.kept.pop(key_id, None) is not None
        self.gone += [key_id] if was_there else []
        return was_there

    async def revoked(self) -> list[str]:
        return self.gone

    async def all(self) -> list[ApiKey]:
        return list(self.kept.values())

    async def lose(self) -> None:
        self.kept.clear()
        self._changed.set()

    async def watch(self, on_keys: Callable[[list[ApiKey]], None]) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            on_keys(list(self.kept.values()))


@dataclass
class RouterHarness:
    """A router and its workers in a thread of their own; tests talk to it as clients do."""

    config: RouterConfig
    secret: ClusterSecret
    workers: dict[str, ScriptedWorker] = field(default_factory=dict)
    downs: int = 0
    keys: ListedKeys = field(default_factory=ListedKeys)

    def __post_init__(self) -> None:
        self.ports: dict[str, int] = {}
        self.loop = asyncio.new_event_loop()
        self.directory: ListedDirectory
        self.router: Router
        self._listening = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="router")

    @property
    def is_started(self) -> bool:
        return self._thread.ident is not None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http']}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['admin']}"

    def call(self, coroutine: Any, timeout_s: float = PATIENCE_S) -> Any:
        """Run something in the router's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def wait(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Wait until `condition` holds, looked at from the router's own loop."""
        self.call(wait_for_async(condition, timeout_s), timeout_s + 5)

    def wait_ready(self) -> None:
        """Wait until it serves, has met every running worker that it knows of, and has tried all that it wants to try:
        it is ready as soon as one pair has answered."""
        self.wait(self._is_calm)

    def _is_calm(self) -> bool:
        readiness, told = self.router.readiness, self.directory.workers
        links = [self.router.table.link(name) for name, worker in told.items() if worker.is_running]
        is_missing = bool(readiness.missing())  # reads the connected workers
        tried = [key for keys in readiness._tried.values() for key in keys]
        has_met_all = all(link is not None and link.is_up for link in links)
        return not is_missing and has_met_all and readiness._proven.issuperset(tried)

    def start(self) -> None:
        self._thread.start()
        assert self._listening.wait(PATIENCE_S)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.router.stop)
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def restart_worker(self, worker: str) -> None:
        async def run() -> None:
            await self.workers[worker].restart()
            self.directory.changed()

        self.call(run())

    def kill_worker(self, worker: str) -> None:
        self.call(self.workers[worker].stop())

    def status(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        body: dict[str, Any] = httpx.get(f"{self.admin_url}/admin/v1/status", headers=headers).json()
        return body

    def metric(self, name: str) -> float:
        """Return the sum of all samples on lines that start with `name`."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._run())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self._failure = error
        finally:
            self._listening.set()

    async def _run(self) -> None:
        self.directory = ListedDirectory()
        for worker in self.workers.values():
            await worker.start()
            self.directory.workers[worker.worker] = worker

        async def on_down() -> None:
            self.downs += 1

        surroundings = Dependencies(directory=self.directory, index=None, on_down=on_down, keys=self.keys)
        redis = await connect(self.config.redis_url) if self.config.redis_url else None
        if redis is not None:  # then clients can leave things with it
            storage = open_storage(redis, Keys(self.config.cluster), self.config.store)
            budgets = BudgetStore(redis, Keys(self.config.cluster))
            keys = Keys(self.config.cluster)
            desired, events = DesiredStateStore(redis, keys), ClusterEventStore(redis, keys)
            surroundings = replace(surroundings, storage=storage, budgets=budgets, desired=desired, events=events)
            surroundings = replace(surroundings, planning=PlanningStore(redis, keys))
        self.router = Router(self.config, surroundings, new_incarnation())
        try:
            self.ports = await self.router.start()
            await self.router.serve(self._listening.set)
        finally:
            await self.router.close()
            if redis is not None:
                await redis.aclose()
            for worker in self.workers.values():
                await worker.stop()


Build = Callable[..., RouterHarness]


@contextmanager
def builder(folder: Path) -> Iterator[Build]:
    houses: list[RouterHarness] = []

    def make(
        prefill: int = 1,
        decode: int = 1,
        mixed: int = 0,
        mode: Disaggregation | None = None,
        script: Script | None = None,
        start: bool = True,
        cluster: str = "test",
        redis_url: str = "",
        store: StoreSection | None = None,
        admission: AdmissionSection | None = None,
        slo: dict[str, SloSection] | None = None,
        budget: dict[str, BudgetSection] | None = None,
        models: tuple[ServedModel, ...] = (TINY,),
        tracing: TracingSection | None = None,
        **settings: Any,
    ) -> RouterHarness:
        secret = ClusterSecret.generate()
        secret.save(folder / "secret")
        (folder / "key").write_text(ADMIN_KEY)
        # Pairs, where there are any: most tests look at what crosses.
        mode = mode or (Disaggregation.AUTO if mixed or not decode else Disaggregation.ALWAYS)
        section = replace(RouterSection(port=0, disaggregation=mode), **settings)
        config = RouterConfig(
            cluster=cluster,
            router_id="r1",
            models=models,
            redis_url=redis_url,
            secret_file=str(folder / "secret"),
            admin_key_file=str(folder / "key"),
            ready_file=str(folder / "ready"),
            settings=section,
            store=store or StoreSection(),
            admission=admission or AdmissionSection(),
            slo=slo or {},
            budget=budget or {},
            tracing=tracing or TracingSection(),
        )
        fabric = Fabric()
        house = RouterHarness(config, secret)
        counts = ((RoleName.PREFILL, prefill), (RoleName.DECODE, decode), (RoleName.MIXED, mixed))
        for place, model in enumerate(models):
            for role, number in ((role, number) for role, count in counts for number in range(count)):
                worker = WorkerId(f"{role}-m{place + 1}-{number}" if place else f"{role}-{number}")
                house.workers[worker] = ScriptedWorker(
                    worker, role, fabric, secret, replace(script or Script()), fingerprint=f"{15 - place:x}" * 32,
                    model=model.name,
                )  # fmt: skip
        houses.append(house)
        if start:
            house.start()
        return house

    try:
        yield make
    finally:
        for house in houses:
            if house.is_started:
                house.stop()


def ask(house: RouterHarness, **more: Any) -> httpx.Response:
    """The answer to a short greedy completion, once it is complete; `more` goes into the body."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0, **more}
    return httpx.post(f"{house.url}/v1/completions", json=body, timeout=PATIENCE_S)
