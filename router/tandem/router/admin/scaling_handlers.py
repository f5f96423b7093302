"""The desired state as the admin port offers it: read it, see what a wish would make of it, write it.

A proposal changes nothing. Its result is written as it was shown, victims and all, and only onto the version that it
was made from: of two operators one wins, and the other gets an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.core.config import ClusterConfig, PlannerMode
from tandem.core.desired import DesiredState, roles_of
from tandem.core.desired_changes import WorkerLoad, changes, cordoned, model_of, restarted, split, with_role, with_scale
from tandem.core.errors import ConfigError, ConflictError, InvalidRequestError, UnavailableError
from tandem.core.ids import WorkerId
from tandem.core.revision_overrides import configured
from tandem.core.rollouts import current_revision, paused, resumed, started, undone
from tandem.core.state_enums import RoleName
from tandem.router.workers.table import WorkerTable
from tandem.statestore.stores.desired import DesiredStateStore, from_record
from tandem.statestore.stores.events import ClusterEventStore
from tandem.statestore.stores.planning import PlanningStore

MAX_EVENTS_AT_ONCE = 500
Loads = Callable[[], Awaitable[Mapping[WorkerId, WorkerLoad]]]
UniqueBlocks = Callable[[], Awaitable[Mapping[WorkerId, int]]]
Counts = dict[Literal["prefill", "decode", "mixed"], Annotated[int, Field(ge=0, le=100_000)]]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ScaleWish(_Body):
    """So many workers of some roles, or a ratio of prefill to decode over `total` workers (0 = as many as now)."""

    verb: Literal["scale"]
    model: str = ""
    counts: Counts = Field(default_factory=dict)
    ratio: list[Annotated[int, Field(ge=1, le=10_000)]] = Field(default_factory=list, max_length=2)
    total: int = Field(default=0, ge=0, le=100_000)
    may_flip: bool = True


class FlipWish(_Body):
    """A worker in another role."""

    verb: Literal["flip"]
    worker: str
    role: Literal["prefill", "decode", "mixed"]


class CordonWish(_Body):
    """A worker without work, or with work again."""

    verb: Literal["drain", "uncordon"]
    worker: str
    deadline_s: float | None = Field(default=None, ge=0, le=86_400, allow_inf_nan=False)


class RestartWish(_Body):
    """A worker once more from the beginning."""

    verb: Literal["restart"]
    worker: str


class RolloutWish(_Body):
    """Workers of another revision in place of those there are, or how such a rollout goes on. `model_path`, `settings`,
    `revision` (its name), `max_surge` and `max_unavailable` are for `start` alone. `current_revision` "" = any."""

    verb: Literal["rollout"]
    step: Literal["start", "pause", "resume", "undo"]
    model: str = ""
    model_path: str = Field(default="", max_length=4096)
    settings: dict[str, str] = Field(default_factory=dict)
    revision: str = ""
    max_surge: int = Field(default=1, ge=0, le=1024)
    max_unavailable: int = Field(default=0, ge=0, le=1024)
    current_revision: str = ""


Wish = ScaleWish | FlipWish | CordonWish | RestartWish | RolloutWish


class NewWish(_Body):
    """A wish, and how many workers of some roles there have to be beforehand."""

    wish: Annotated[Wish, Field(discriminator="verb")]
    current: Counts = Field(default_factory=dict)


class NewState(_Body):
    """The whole record; it follows the version before its own."""

    state: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingHandlers:
    """Answers in plain values, ready to be JSON. All raise UnavailableError while the store does not answer."""

    store: DesiredStateStore | None
    events: ClusterEventStore | None
    loads: Loads
    planning: PlanningStore | None = None
    planner_mode: PlannerMode = PlannerMode.OFF
    has_rollouts: bool = True

    async def desired(self) -> dict[str, Any]:
        """The record as it stands."""
        return {"desired": asdict(await self._load())}

    async def propose(self, wanted: NewWish) -> dict[str, Any]:
        """The record after the wish, and what that means for which worker. Changes nothing.

        ConflictError if `current` does not hold, or the wish cannot be; NotFoundError for a worker that is not there.
        """
        before = await self._load()
        _check_current(before, wanted)
        after = await self._wished(before, wanted.wish)
        is_changed = after != before
        after = replace(after, version=before.version + 1) if is_changed else before
        rows = [{**asdict(change), "deed": change.deed.value} for change in changes(before, after)]
        return {"is_changed": is_changed, "before": asdict(before), "after": asdict(after), "changes": rows}

    async def write(self, new: NewState) -> dict[str, Any]:
        """Make it the desired state. ConflictError if it was changed since it was read."""
        try:
            state = from_record(new.state)
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidRequestError("state is not a desired state", why=str(error), param="state") from error
        before = await self._load()
        if before == state:
            return {"desired": asdict(state)}  # the answer to the same request got lost
        is_next = state.version == before.version + 1
        if is_next:  # else the frame may have changed since: the end of a rollout changes the pools' revision
            _check_same_frame(before, state)
        assert self.store is not None  # _load looks
        try:
            is_saved = is_next and await self.store.save(state, before.version)
        except ConfigError as error:
            raise ConflictError(error.what, why=error.why, todo=error.todo) from error
        if not is_saved:
            why = f"it was made for version {state.version - 1}, and there is version {before.version} or a later one"
            raise ConflictError("another client changed the desired state", why=why, todo="look at it and try again")
        return {"desired": asdict(state)}

    async def happened(self, after: str, count: int) -> dict[str, Any]:
        """Up to `count` events after that place, oldest first; "" = the last `count`. `next` is the place to go on."""
        if self.events is None:
            raise _no_state()
        if not 1 <= count <= MAX_EVENTS_AT_ONCE:
            raise InvalidRequestError(f"count is {count}", why=f"it must be 1 to {MAX_EVENTS_AT_ONCE}", param="count")
        found = await self.events.after(after, count) if after else await self.events.last(count)
        rows = [{"place": place, **asdict(event), "kind": event.kind.value} for place, event in found]
        return {"events": rows, "next": rows[-1]["place"] if rows else after or "0"}

    async def planned(self) -> dict[str, Any]:
        """The planner's last report: {"mode", "plan"}; `plan` None = there was none for a while."""
        word = await self.planning.word() if self.planning is not None else None
        return {"mode": str((word or {}).get("mode", self.planner_mode.value)), "plan": word}

    async def _wished(self, before: DesiredState, wish: Wish) -> DesiredState:
        if isinstance(wish, RolloutWish):
            if not self.has_rollouts:
                why = "workers of another revision are started from outside"
                raise ConflictError("there are no rollouts here", why=why, todo="use `helm upgrade`")
            return _rolled(before, wish)
        if isinstance(wish, FlipWish):
            return with_role(before, wish.worker, RoleName(wish.role))
        if isinstance(wish, RestartWish):
            return restarted(before, wish.worker)
        if isinstance(wish, CordonWish):
            is_cordoned = wish.verb == "drain"
            return cordoned(before, wish.worker, is_cordoned=is_cordoned, deadline_s=wish.deadline_s)
        counts = {RoleName(role): count for role, count in wish.counts.items()}
        if bool(counts) == bool(wish.ratio):
            raise InvalidRequestError("give either counts or a ratio", param="counts")
        if wish.ratio:
            if len(wish.ratio) != 2:
                raise InvalidRequestError("a ratio must have two numbers, prefill and decode workers", param="ratio")
            counts = split(before, (wish.ratio[0], wish.ratio[1]), wish.total, model=wish.model)
        return with_scale(before, counts, await self.loads(), model=wish.model, may_flip=wish.may_flip)

    async def _load(self) -> DesiredState:
        state = await self.store.load() if self.store is not None else None
        if state is None:
            raise _no_state()
        if state.is_stopped:
            raise ConflictError("the cluster is being stopped", todo="start it again with `clusterctl up`")
        return state


async def loads_of(table: WorkerTable, unique_blocks: UniqueBlocks | None) -> Mapping[WorkerId, WorkerLoad]:
    """Requests and unique prefix bytes of every connected worker, as far as known."""
    alone = await unique_blocks() if unique_blocks is not None else {}
    return {
        link.worker: WorkerLoad(
            in_flight=max(link.load.in_flight, len(link.requests)),
            unique_prefix_bytes=alone.get(link.worker, 0) * link.facts.block_tokens * link.facts.token_kv_bytes,
        )
        for link in table.links
        if link.facts is not None
    }


def _rolled(before: DesiredState, wish: RolloutWish) -> DesiredState:
    if wish.current_revision:
        now = current_revision(before, model_of(before, wish.model))
        if now != wish.current_revision:
            raise ConflictError(
                f"the revision is {now} and not {wish.current_revision[:80]}",
                why=f"version {before.version} of the desired state says so",
                todo="look at it and try again",
            )
    if wish.step == "pause":
        return paused(before, model=wish.model)
    if wish.step == "resume":
        return resumed(before, model=wish.model)
    if wish.step == "undo":
        return undone(before, model=wish.model)
    try:
        configured(ClusterConfig(), wish.settings)
    except ConfigError as error:
        raise InvalidRequestError(error.what, why=error.why, todo=error.todo, param="settings") from error
    return started(
        before,
        model=wish.model,
        name=wish.revision,
        model_path=wish.model_path,
        settings=wish.settings,
        max_surge=wish.max_surge,
        max_unavailable=wish.max_unavailable,
    )


def _check_current(state: DesiredState, wanted: NewWish) -> None:
    named = wanted.wish.model if isinstance(wanted.wish, ScaleWish | RolloutWish) else ""
    model = model_of(state, named) if wanted.current else ""
    counts = roles_of(state.pools, model)
    for role, count in wanted.current.items():
        if counts[RoleName(role)] != count:
            raise ConflictError(
                f"there are {counts[RoleName(role)]} {role} workers wanted now and not {count}",
                why=f"version {state.version} of the desired state says so",
                todo="look at it and try again",
            )


def _check_same_frame(before: DesiredState, after: DesiredState) -> None:
    """Raise InvalidRequestError if a field that `up` alone decides was changed."""
    pools = [tuple(replace(pool, count=0) for pool in state.pools) for state in (before, after)]
    if pools[0] != pools[1] or before.max_ranks != after.max_ranks or after.is_stopped:
        why = "models, TP, hardware and max_ranks are configured; only counts and members can be written"
        raise InvalidRequestError("the desired state changes what only the configuration sets", why=why, param="state")


def _no_state() -> UnavailableError:
    return UnavailableError(
        "this cluster has no desired state", why="no controller has written one yet", todo="try again"
    )
