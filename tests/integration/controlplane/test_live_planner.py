"""The planner on a real store: one-time advice, compare-and-set actions, durable cool-downs, and concurrent
planners."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tandem.controlplane.event_log import EventLog
from tandem.controlplane.initial_state import begin
from tandem.controlplane.live_planner import REPEAT_S, LivePlanner, Stores
from tandem.controlplane.planner.inputs import Watch
from tandem.controlplane.planner.planner import Planner
from tandem.controlplane.planner.records import Rates, Rules
from tandem.core.clock import ManualClock
from tandem.core.config import PlannerMode, PlannerSection, SloSection
from tandem.core.demand import Demand, DemandSample, WorkerSeen
from tandem.core.desired import DesiredState, Pool, roles_of
from tandem.core.desired_changes import cordoned, with_role
from tandem.core.errors import UnavailableError
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.ids import RouterId, WorkerId
from tandem.core.prefill_queue import PrefillSpeed
from tandem.core.state_enums import RoleName
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore
from tandem.statestore.stores.events import ClusterEventStore
from tandem.statestore.stores.planning import PlanningStore
from tools.waiting import wait_for_async

KEYS = Keys("c")
PREFILL, DECODE = RoleName.PREFILL, RoleName.DECODE
ADVISE, ACT = PlannerSection(mode=PlannerMode.ADVISE), PlannerSection(mode=PlannerMode.ACT)
START_S, STEP_S = 1000.0, 15.0
KV_TOKEN_BYTES = 100_000
BUSY = {"decode-0": 5, "decode-1": 1, "decode-2": 3}
PROMPTS = tuple(
    DemandSample(age_s=60.0 - n / 1.5, prompt_tokens=2000, output_tokens=20, has_ended=True, slo="chat")
    for n in range(90)
)
"""1.5 prompts a second of a second each: one prefill worker is not enough."""


def record(prefill: int = 1, decode: int = 3, prefill_tp: int = 1) -> DesiredState:
    pools = (
        Pool(name="prefill", model="m", role=PREFILL, count=prefill, tp=prefill_tp),
        Pool(name="decode", model="m", role=DECODE, count=decode),
    )
    return DesiredState(version=1, pools=pools).filled()


class RacedStore(DesiredStateStore):
    """Another client writes right after `dated` was answered, or a write is not answered while it `is_mute`."""

    race: Callable[[], Awaitable[None]] | None = None
    is_mute = False

    async def save(self, state: DesiredState, expected_version: int, *, configured: DesiredState | None = None) -> bool:
        is_saved = await super().save(state, expected_version, configured=configured)
        if self.is_mute:
            raise UnavailableError("Redis does not answer")
        return is_saved

    async def dated(self) -> tuple[DesiredState | None, float]:
        found = await super().dated()
        if self.race is not None:
            race, self.race = self.race, None
            await race()
        return found


Play = Callable[..., AbstractAsyncContextManager["Scene"]]


class Scene:
    """A store, and one planner after another that looks at it. Routers see the workers of `self.shown`."""

    def __init__(self, redis: Redis, state: DesiredState) -> None:
        self.redis: Any = redis
        self.desired, self.planning = RacedStore(redis, KEYS), PlanningStore(redis, KEYS)
        self.store = ClusterEventStore(redis, KEYS)
        self.clock = ManualClock(START_S)
        self.log = EventLog(self.store, wall_clock=self._wall_s)
        self.shown = state
        self.link_bytes_per_s = 0.0

    def _wall_s(self) -> float:
        return 1e9 + self.clock.now_s()

    def planner(self, section: PlannerSection) -> LivePlanner:
        rules = Rules.configured(section)
        stores = Stores(desired=self.desired, planning=self.planning, events=self.store)
        watch = Watch(rules, Rates(), "m")
        return LivePlanner(section, Planner(rules), watch, stores, self.log, self.clock, self._wall_s)

    async def look(self, planner: LivePlanner, times: int = 1, step_s: float = STEP_S) -> dict[str, Any]:
        """Run so many looks, `step_s` apart; return the report after the last."""
        for _ in range(times):
            self.clock.advance(step_s)
            await self.planning.tell(RouterId("router-0"), seen(self.shown, self.link_bytes_per_s))
            await planner.look()
            await self.log.flush(timeout_s=60.0)
        word = await self.planning.word()
        assert word is not None
        return word

    async def look_until(self, planner: LivePlanner, kind: EventKind, times: int = 30) -> str:
        """Return the text of the next event of that kind."""
        before = len(await self.events(kind))
        for _ in range(times):
            await self.look(planner)
            found = await self.events(kind)
            if len(found) > before:
                return found[-1].reason
        raise AssertionError(f"{kind} does not come: {await self.planning.word()}")

    async def start_again(self) -> None:
        """Start as `up` does, with a configuration that asks for the present record."""
        state = await self.state()
        await begin(self.desired, lambda version: dataclasses.replace(state, version=version))

    async def let_age(self) -> None:
        """The server's clock knows nothing of this one: the record becomes as old as it is here."""
        seconds, _ = await self.redis.time()
        await self.redis.hset(KEYS.desired, "saved_s", seconds - round(self.clock.now_s() - START_S))

    async def events(self, kind: EventKind) -> list[ClusterEvent]:
        return [happened for _, happened in await self.store.last(1000) if happened.kind is kind]

    async def state(self) -> DesiredState:
        found = await self.desired.load()
        assert found is not None
        return found

    async def write(self, state: DesiredState) -> None:
        """Write as an operator does."""
        before = await self.state()
        assert await self.desired.save(dataclasses.replace(state, version=before.version + 1), before.version)

    async def counts(self) -> tuple[int, int]:
        found = roles_of((await self.state()).pools, "m")
        return found[PREFILL], found[DECODE]


def seen(state: DesiredState, link_bytes_per_s: float) -> Demand:
    """All workers of the record, at work."""
    return Demand(
        asked=PROMPTS,
        workers=tuple(
            WorkerSeen(
                worker=WorkerId(member.worker_id), role=member.role, in_flight=BUSY.get(member.worker_id, 0),
                prefill_speed=PrefillSpeed(tokens_per_s=2000.0 if member.role is PREFILL else 0.0),
                decoding_sequences=int(member.role is DECODE), decode_step_s=0.011, decode_sequence_s=0.001,
                kv_token_bytes=KV_TOKEN_BYTES,
            )
            for member in state.members
        ),
        promises={"chat": SloSection(ttft_s=4.0, itl_s=0.12)},
        link_bytes_per_s=link_bytes_per_s,
    )  # fmt: skip


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    with PrivateRedis.start(tmp_path / "redis", "hush") as server:

        @asynccontextmanager
        async def playing(state: DesiredState | None = None) -> AsyncIterator[Scene]:
            redis = await connect(server.url)
            scene = Scene(redis, state or record())
            assert await scene.desired.save(scene.shown, 0)
            yield scene
            await redis.aclose()

        yield playing


@pytest.fixture
def scene(play: Play) -> AbstractAsyncContextManager[Scene]:
    return play()


async def test_advice_is_given_once_with_its_figures_and_changes_nothing(scene: Scene) -> None:
    planner = scene.planner(ADVISE)
    said = await scene.look_until(planner, EventKind.PLAN_ADVISED)
    assert said.startswith("1P:3D → 2P:2D, because 2P:2D would keep ")
    assert "TTFT p90" in said
    word = await scene.look(planner, 10)
    assert (word["mode"], word["split"], word["wanted"], word["is_due"]) == ("advise", "1P:3D", "2P:2D", True)
    assert word["then"]["attained"] > word["now"]["attained"]
    await scene.let_age()
    await scene.start_again()
    await scene.look(scene.planner(ADVISE), 10)
    assert len(await scene.events(EventKind.PLAN_ADVISED)) == 1, "nor by the planner of the next controller"
    scene.clock.advance(REPEAT_S)
    await scene.look_until(planner, EventKind.PLAN_ADVISED)
    assert (await scene.state()).version == 1


@pytest.mark.parametrize(
    ("link_bytes_per_s", "wanted", "links"),
    [(0.0, "2P:2D", "no link was measured"), (5e9, "2P:2D", "links of 5.00 GB/s"), (4e7, "4M", "links of 40 MB/s")],
)
async def test_pairs_are_wanted_where_links_can_carry_what_they_compute(
    scene: Scene, link_bytes_per_s: float, wanted: str, links: str
) -> None:
    """A prompt's KV takes 5 s at 40 MB/s, and 1.5 of them come a second."""
    scene.link_bytes_per_s = link_bytes_per_s
    planner = scene.planner(dataclasses.replace(ADVISE, is_mixed_allowed=True))
    said = await scene.look_until(planner, EventKind.PLAN_ADVISED)
    assert f"because {wanted} would keep " in said
    assert links in said
    word = await scene.look(planner)
    assert word["link_bytes_per_s"] == link_bytes_per_s


async def test_it_flips_the_worker_with_the_least_to_do_and_waits_until_that_is_done(scene: Scene) -> None:
    planner = scene.planner(ACT)
    said = await scene.look_until(planner, EventKind.PLAN_ACTED)
    assert said.startswith("1P:3D → 2P:2D, because ")
    assert said.endswith("version 2: decode-1 flip from decode to prefill")
    assert await scene.counts() == (2, 2)
    word = await scene.look(planner, 8)
    assert word["reason"] == "workers are still changing"
    assert word["unsettled"] == "decode-1 is to become a prefill worker"
    assert (word["last_action"]["what"], word["last_advice"]) == (said, None)
    scene.shown = await scene.state()
    word = await scene.look(planner, 8)
    assert word["unsettled"] == ""
    assert (await scene.state()).members[0].role is PREFILL
    assert (await scene.look(scene.planner(ACT)))["last_action"]["what"] == said, "as events say"


HASTY = dataclasses.replace(ACT, confirmations=1, worth_s=0.0)
"""Acts at the first look after the cool-down."""


async def test_of_two_writers_one_wins_and_the_planner_gives_way(scene: Scene) -> None:
    planner = scene.planner(HASTY)
    await scene.redis.hset(KEYS.desired, "saved_s", 0)
    shorter = dataclasses.replace(await scene.state(), drain_deadline_s=7.0)
    scene.desired.race = lambda: scene.write(shorter)
    await scene.look(planner)
    (denied,) = await scene.events(EventKind.PLAN_DENIED)
    assert denied.reason == "1P:3D → 2P:2D, another writer changed the desired state first"
    assert (await scene.state()).drain_deadline_s == 7.0
    word = await scene.look(planner)
    assert word["waits_s"] > 0, "what others do gives it a cool-down"
    assert (await scene.state()).version == 2
    await scene.look_until(planner, EventKind.PLAN_ACTED)
    after = await scene.state()
    assert (after.version, after.drain_deadline_s) == (3, 7.0)


@pytest.mark.parametrize("is_overwritten", [False, True])
async def test_an_act_whose_answer_got_lost_is_told_of_if_it_stands_there(scene: Scene, is_overwritten: bool) -> None:
    planner = scene.planner(HASTY)
    await scene.redis.hset(KEYS.desired, "saved_s", 0)
    scene.desired.is_mute = True
    with pytest.raises(UnavailableError):
        await scene.look(planner)
    scene.desired.is_mute = False
    assert (await scene.counts(), await scene.events(EventKind.PLAN_ACTED)) == ((2, 2), [])
    if is_overwritten:
        await scene.write(record())
    await scene.look(planner, 2, step_s=1.0)
    acted = [happened.reason for happened in await scene.events(EventKind.PLAN_ACTED)]
    ends = [reason.partition("; ")[2] for reason in acted]
    assert ends == ([] if is_overwritten else ["version 2: decode-1 flip from decode to prefill"])


async def test_what_an_operator_does_gives_it_a_cool_down(scene: Scene) -> None:
    """Also a change that leaves the split as it is; and to the planner of the next controller, too."""
    planner = scene.planner(HASTY)
    await scene.redis.hset(KEYS.desired, "saved_s", 0)
    await scene.write(dataclasses.replace(await scene.state(), drain_deadline_s=7.0))
    for one in (planner, scene.planner(HASTY)):
        word = await scene.look(one, step_s=1.0)
        assert 20 < word["waits_s"] <= 31
        assert "the split changed lately" in word["reason"]
    seconds, _ = await scene.redis.time()
    await scene.redis.hset(KEYS.desired, "saved_s", seconds - 12)
    await scene.start_again()
    word = await scene.look(scene.planner(HASTY), step_s=1.0)
    assert 10 < word["waits_s"] <= 19, "as much as is left of it"
    assert await scene.events(EventKind.PLAN_ACTED) == []


async def test_a_worker_that_somebody_drained_is_left_alone(scene: Scene) -> None:
    await scene.write(cordoned(await scene.state(), "decode-2", is_cordoned=True))
    word = await scene.look(scene.planner(HASTY), 10)
    assert word["unsettled"] == "decode-2 is to have no work"
    assert await scene.events(EventKind.PLAN_ACTED) == []


async def test_it_starts_nobody_where_nobody_can_flip(play: Play) -> None:
    """Pools differ, so that `scale` would stop one worker and start another; that is reported once."""
    async with play(record(prefill_tp=2)) as scene:
        planner = scene.planner(HASTY)
        denied = await scene.look_until(planner, EventKind.PLAN_DENIED)
        assert denied.startswith("1P:3D → 2P:2D, it takes another start")
        await scene.look(planner, 10)
        assert len(await scene.events(EventKind.PLAN_DENIED)) == 1
        assert await scene.counts() == (1, 3)


async def test_an_operator_who_flips_back_is_advised_again(scene: Scene) -> None:
    planner = scene.planner(ADVISE)
    await scene.look_until(planner, EventKind.PLAN_ADVISED)
    await scene.write(with_role(await scene.state(), "decode-0", PREFILL))
    scene.shown = await scene.state()
    await scene.look(planner, 3)
    await scene.write(with_role(await scene.state(), "decode-0", DECODE))
    scene.shown = await scene.state()
    await scene.look_until(planner, EventKind.PLAN_ADVISED)
    assert len(await scene.events(EventKind.PLAN_ADVISED)) == 2


async def test_more_workers_where_no_flip_helps_but_never_above_the_budget(play: Play) -> None:
    async with play(record(1, 1)) as scene:
        planner = scene.planner(dataclasses.replace(HASTY, is_scaling=True, budget=3))
        for _ in range(30):
            await scene.look(planner)
            scene.shown = await scene.state()
        assert await scene.counts() == (2, 1)


async def test_without_scaling_workers_above_the_budget_are_an_operators(play: Play) -> None:
    async with play(record(3, 3)) as scene:
        planner = scene.planner(dataclasses.replace(HASTY, budget=4))
        advice = await scene.look_until(planner, EventKind.PLAN_ADVISED)
        assert advice.startswith("3P:3D → ")
        assert "6 workers are above the budget of 4" in advice
        word = await scene.look(planner, 10)
        assert (word["mode"], word["is_due"], word["is_advice"]) == ("act", True, True)
        assert (await scene.state()).version == 1


async def test_without_a_word_of_any_router_it_says_so(scene: Scene) -> None:
    await scene.planner(ACT).look()
    word = await scene.planning.word()
    assert word is not None
    assert (word["routers"], word["reason"]) == (0, "no router says what is asked of it")


async def test_an_outage_costs_a_look_and_no_more(tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path / "redis", "hush") as server:
        redis = await connect(server.url)
        scene = Scene(redis, record())
        assert await scene.desired.save(scene.shown, 0)
        planner = scene.planner(dataclasses.replace(ACT, interval_s=0.01))
        running = asyncio.create_task(planner.run())
        await wait_for_async(scene.planning.word)
        server.stop()
        with pytest.raises(UnavailableError):
            await scene.planning.word()
        with PrivateRedis.start(server.directory, "hush", port=server.port):
            await redis.delete(KEYS.planner)
            await wait_for_async(scene.planning.word)
            assert not running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await redis.aclose()
