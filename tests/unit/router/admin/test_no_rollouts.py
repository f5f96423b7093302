"""Where workers are started from outside, the record cannot replace them: such changes are refused, others are not."""

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from tandem.core.desired import DesiredState, Pool
from tandem.core.desired_changes import WorkerLoad
from tandem.core.errors import ConflictError
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName
from tandem.router.admin.scaling_handlers import NewWish, RolloutWish, ScaleWish, ScalingHandlers
from tandem.statestore.stores.desired import DesiredStateStore

POOLS = tuple(Pool(name=role.value, model="m", role=role, count=2) for role in (RoleName.PREFILL, RoleName.DECODE))


class Store:
    async def load(self) -> DesiredState:
        return DesiredState(version=1, pools=POOLS).filled()


async def nobody() -> Mapping[WorkerId, WorkerLoad]:
    return {}


def handlers(*, has_rollouts: bool) -> ScalingHandlers:
    store = cast(DesiredStateStore, Store())
    return ScalingHandlers(store=store, events=None, loads=nobody, has_rollouts=has_rollouts)


def test_a_rollout_is_refused_and_says_what_to_do_instead() -> None:
    wish = NewWish(wish=RolloutWish(verb="rollout", step="start", settings={"worker.chunk_tokens": "256"}))
    with pytest.raises(ConflictError, match=r"there are no rollouts here.*helm upgrade"):
        asyncio.run(handlers(has_rollouts=False).propose(wish))
    assert asyncio.run(handlers(has_rollouts=True).propose(wish))["is_changed"]


def test_other_wishes_are_taken() -> None:
    wish = NewWish(wish=ScaleWish(verb="scale", counts={"decode": 3}))
    assert asyncio.run(handlers(has_rollouts=False).propose(wish))["is_changed"]
