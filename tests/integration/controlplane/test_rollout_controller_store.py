"""The steps of a rollout on a real store, which loses an answer or what was written last."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.controlplane.reconcile import ObservedPhase, ObservedWorker
from tandem.controlplane.rollout_controller import Rolling
from tandem.core.desired import DesiredState
from tandem.core.errors import UnavailableError
from tandem.core.events import EventKind
from tandem.core.rollouts import started
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore, to_json
from tests.unit.controlplane.controller_rig import Events
from tests.unit.controlplane.world import wanted

KEYS = Keys("c")
FIRST = replace(started(wanted(prefill=1, decode=1), name="r2"), version=1)
SEEN = [
    ObservedWorker(
        worker_id=member.worker_id,
        model="m",
        role=member.role,
        life=ObservedPhase.READY,
        revision=FIRST.revision_of(member),
    )
    for member in FIRST.members
]
COME = "m: to r2: prefill-1, decode-1 to come"


class MuteStore(DesiredStateStore):
    """A store that carries out calls, and does not answer while it `is_mute`."""

    is_mute = False

    async def save(self, state: DesiredState, expected_version: int, *, configured: DesiredState | None = None) -> bool:
        is_saved = await super().save(state, expected_version, configured=configured)
        if self.is_mute:
            raise UnavailableError("Redis does not answer")
        return is_saved


class Scene:
    """A record with a rollout that has just begun, and the controllers that take its steps."""

    def __init__(self, redis: Any) -> None:
        self.redis, self.store, self.events = redis, MuteStore(redis, KEYS), Events()
        self.rolling = Rolling(self.store.save, self.events)

    async def step(self, state: DesiredState) -> bool:
        return await self.rolling.step(state, SEEN, (), {})

    async def state(self) -> DesiredState:
        found = await self.store.load()
        assert found is not None
        return found

    @property
    def told(self) -> list[str]:
        return self.events.of(EventKind.ROLLOUT)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[AbstractAsyncContextManager[Scene]]:
    with PrivateRedis.start(tmp_path / "redis", "hush") as server:

        @asynccontextmanager
        async def playing() -> AsyncIterator[Scene]:
            redis = await connect(server.url)
            scene = Scene(redis)
            assert await scene.store.save(FIRST, 0)
            yield scene
            await redis.aclose()

        yield playing()


async def test_it_goes_on_from_a_store_that_lost_the_last_step(scene: Scene) -> None:
    assert await scene.step(FIRST)
    after = await scene.state()
    assert (after.version, scene.told) == (2, [COME])
    assert await scene.step(FIRST), "who looks has not seen it yet"
    assert (await scene.state(), scene.told) == (after, [COME])
    await scene.redis.hset(KEYS.desired, mapping={"version": 1, "state": to_json(FIRST)})
    assert await scene.step(await scene.state())
    assert await scene.state() == after


@pytest.mark.parametrize("is_seen_first", [True, False])
async def test_a_step_without_an_answer_is_told_once_it_is_known(scene: Scene, is_seen_first: bool) -> None:
    scene.store.is_mute = True
    for _ in range(2):
        assert await scene.step(FIRST)
    lost = "cluster: no answer to the next step: Redis does not answer."
    assert ((await scene.state()).version, scene.told) == (2, [lost])
    scene.store.is_mute = False
    for state in (await scene.state() if is_seen_first else FIRST, await scene.state(), await scene.state()):
        assert await scene.step(state)
    assert scene.told == [lost, COME]


async def test_a_step_that_somebody_else_was_faster_than_is_not_told(scene: Scene) -> None:
    faster = replace(FIRST, version=2, drain_deadline_s=7.0)
    assert await scene.store.save(faster, 1)
    scene.store.is_mute = True
    assert await scene.step(FIRST)
    scene.store.is_mute = False
    assert await scene.step(FIRST)
    assert COME not in scene.told
    assert await scene.step(faster)
    assert scene.told[-1] == COME
