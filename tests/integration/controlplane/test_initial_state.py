"""Initial state from an existing record: operators' changes outlive `up`, unless the configuration changed."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tandem.controlplane.initial_state import InitialState, begin
from tandem.core.desired import DesiredState, Pool, RolloutPhase
from tandem.core.desired_changes import cordoned, restarted, with_scale
from tandem.core.errors import StartupError
from tandem.core.events import EventKind
from tandem.core.rollouts import started
from tandem.core.state_enums import RoleName
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore

KEYS = Keys("c")
PREFILL, DECODE = RoleName.PREFILL, RoleName.DECODE
NOTHING_TO_TELL = InitialState()
Changed = Callable[[DesiredState], DesiredState]


def configured(prefill: int = 1, decode: int = 1, max_ranks: int = 0) -> DesiredState:
    pools = (
        Pool(name="prefill", model="m", role=PREFILL, count=prefill),
        Pool(name="decode", model="m", role=DECODE, count=decode),
    )
    return DesiredState(version=1, pools=pools, max_ranks=max_ranks).filled()


class Scene:
    """A store, `up` that starts again and again, and an operator between the starts."""

    def __init__(self, redis: Redis) -> None:
        self.redis: Any = redis
        self.store = DesiredStateStore(redis, KEYS)

    async def up(self, asked: DesiredState | None = None, *, as_configured: bool = False) -> InitialState:
        wanted = asked or configured()
        return await begin(self.store, lambda version: replace(wanted, version=version), as_configured=as_configured)

    async def state(self) -> DesiredState:
        found = await self.store.load()
        assert found is not None
        return found

    async def change(self, how: Changed) -> DesiredState:
        """Change the record as an operator does; return the record after it."""
        before = await self.state()
        after = replace(how(before), version=before.version + 1)
        assert await self.store.save(after, before.version)
        return await self.state()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[AbstractAsyncContextManager[Scene]]:
    with PrivateRedis.start(tmp_path / "redis", "hush") as server:

        @asynccontextmanager
        async def playing() -> AsyncIterator[Scene]:
            redis = await connect(server.url)
            try:
                yield Scene(redis)
            finally:
                await redis.aclose()

        yield playing()


def to_two(state: DesiredState) -> DesiredState:
    return with_scale(state, {PREFILL: 2}, {})


def half_rolled_out(state: DesiredState) -> DesiredState:
    return started(state, name="next", settings={"worker.chunk_tokens": "64"}, max_surge=1, max_unavailable=0)


def drained(state: DesiredState) -> DesiredState:
    return cordoned(to_two(state), "prefill-1", is_cordoned=True, deadline_s=4.0)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (to_two, "prefill 1 → 2"),
        (half_rolled_out, "+ the rollout to next, rolling"),
        (drained, "+ the drain of prefill-1"),
        (lambda state: restarted(to_two(state), "prefill-0"), "prefill 1 → 2"),
    ],
)
async def test_what_operators_changed_goes_on_while_the_configuration_is_the_same(
    scene: Scene, how: Changed, told: str
) -> None:
    assert await scene.up() == NOTHING_TO_TELL
    await scene.redis.hset(KEYS.desired, "saved_s", 7)
    changed = await scene.change(how)
    await scene.redis.hset(KEYS.desired, "saved_s", 8)
    for _ in range(2):
        found = await scene.up()
        assert (found.is_continued, found.kind) == (True, EventKind.DESIRED_KEPT)
        assert told in found.reason
        assert "`--as-configured` resets it" in found.reason
        assert await scene.state() == changed, "to the version"
    assert await scene.redis.hget(KEYS.desired, "saved_s") == b"8", "of its age, for the planner's cool-down"
    found = await scene.up(as_configured=True)
    assert (found.is_continued, found.kind) == (False, EventKind.DESIRED_REPLACED)
    assert "`--as-configured` was given" in found.reason
    assert await scene.state() == replace(configured(), version=3)
    assert await scene.up() == NOTHING_TO_TELL


async def test_half_a_rollout_goes_on_from_where_it_stands(scene: Scene) -> None:
    await scene.up()
    state = await scene.change(half_rolled_out)
    rolling = state.under_way("m")
    assert rolling is not None
    assert (await scene.up()).is_continued
    kept = await scene.state()
    assert (kept.under_way("m"), kept.revisions) == (rolling, state.revisions)
    assert rolling.phase is RolloutPhase.ROLLING


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (configured(prefill=3), "prefill 2 → 3"),
        (configured(max_ranks=4), "prefill 2 → 1, max_ranks 0 → 4"),
        (replace(configured(), pools=tuple(replace(p, tp=2) for p in configured().pools)), "prefill of another model"),
    ],
)
async def test_another_configuration_wins_and_what_it_replaced_is_told(
    scene: Scene, other: DesiredState, told: str
) -> None:
    await scene.up()
    await scene.change(to_two)
    found = await scene.up(other)
    assert (found.is_continued, found.kind) == (False, EventKind.DESIRED_REPLACED)
    assert told in found.reason
    assert "another configuration was given" in found.reason
    assert await scene.state() == replace(other, version=3)
    await scene.change(lambda state: with_scale(state, {DECODE: 2}, {}))
    assert (await scene.up(other)).is_continued, "from here on it is what was configured"
    assert not (await scene.up()).is_continued


async def test_a_configuration_that_asks_for_what_was_scaled_to_is_the_configuration_from_there_on(
    scene: Scene,
) -> None:
    await scene.up()
    await scene.change(lambda state: with_scale(state, {DECODE: 2}, {}))
    assert await scene.up(configured(decode=2)) == NOTHING_TO_TELL
    assert (await scene.state()).version == 2
    await scene.change(lambda state: with_scale(state, {DECODE: 3}, {}))
    assert (await scene.up(configured(decode=2))).is_continued


async def test_down_ends_what_operators_changed_too(scene: Scene) -> None:
    await scene.up()
    await scene.change(lambda state: replace(state, is_stopped=True))
    assert await scene.up() == NOTHING_TO_TELL, "nothing is lost"
    assert await scene.state() == replace(configured(), version=3)
    await scene.change(to_two)
    await scene.change(lambda state: replace(state, is_stopped=True))
    found = await scene.up()
    assert found.kind is EventKind.DESIRED_REPLACED
    assert "(prefill 2 → 1, other workers by name): `down` had ended the cluster" in found.reason
    assert await scene.state() == replace(configured(), version=6)


async def test_a_record_of_the_release_before_is_kept_only_as_configured(scene: Scene) -> None:
    """It does not contain the configuration at the time it was written."""
    assert await scene.store.save(configured(), 0)
    assert await scene.up() == NOTHING_TO_TELL
    assert (await scene.state()).version == 1
    await scene.change(to_two)
    assert (await scene.up()).is_continued, "noted at the start before"
    await scene.redis.hdel(KEYS.desired, "configured")
    found = await scene.up()
    assert "nothing says what was configured" in found.reason
    assert await scene.state() == replace(configured(), version=3)


async def test_what_cannot_be_read_or_cannot_be_is_replaced(scene: Scene) -> None:
    await scene.up()
    await scene.redis.hset(KEYS.desired, "state", '{"of": "another release"}')
    found = await scene.up()
    assert found.kind is EventKind.DESIRED_REPLACED
    assert "the desired state in Redis cannot be read" in found.reason
    assert await scene.state() == replace(configured(), version=2)
    text = (await scene.redis.hget(KEYS.desired, "state")).replace(b'"count":1', b'"count":0')
    await scene.redis.hset(KEYS.desired, "state", text)
    found = await scene.up()
    assert "cannot serve" in found.reason or "counts 0 workers" in found.reason
    assert await scene.state() == replace(configured(), version=3)
    await scene.redis.delete(KEYS.desired)
    assert await scene.up() == NOTHING_TO_TELL
    assert await scene.state() == configured()


async def test_whoever_writes_meanwhile_is_looked_at_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.up()
    recorded, races = scene.store.recorded, 1

    async def raced() -> Any:
        nonlocal races
        found = await recorded()
        if races:
            races -= 1
            await scene.change(to_two if found.version == 1 else lambda state: state)
        return found

    monkeypatch.setattr(scene.store, "recorded", raced)
    found = await scene.up(configured(prefill=3))
    assert "prefill 2 → 3" in found.reason
    races = 100
    with pytest.raises(StartupError, match="cannot write the desired state"):
        await scene.up()
