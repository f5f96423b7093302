"""Requests to a worker in the middle of a change of its role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tandem.core.clock import ManualClock
from tandem.core.lifecycle import RoleName, WorkerState
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.lifecycle import WorkerLifecycle
from tandem.workerhost.relay import ForRank
from tools.waiting import wait_for_async


class Host:
    """A decode worker with routers that acknowledge at once. `meanwhile` is called while it registers; from then on a
    request runs."""

    is_state_heard = True

    def __init__(self, clock: ManualClock) -> None:
        self.info = w.WorkerInfo(worker="d0", incarnation=1, role="decode")
        self.steering = WorkerLifecycle(self, clock)
        self.meanwhile: Callable[[], None] = lambda: None
        self.said: list[w.WorkerState] = []
        self.in_flight = 0

    def to_rank(self, message: ForRank) -> None:
        assert isinstance(message, e.HostToRank)
        self.steering.looked(e.Looked(id=message.look.id, in_flight=self.in_flight, is_idle=not self.in_flight))

    def broadcast_state(self, state: w.WorkerState) -> None:
        self.said.append(state)

    async def record_state(self, state: WorkerState) -> None:
        return

    async def take_role(self, role: RoleName) -> None:
        self.in_flight = 1
        self.meanwhile()
        self.info.role = role.value


@pytest.mark.parametrize("order", ["drain", "become"])
def test_a_deadline_that_is_given_meanwhile_holds_in_the_new_role(order: str) -> None:
    async def run() -> None:
        clock = ManualClock(100.0)
        host = Host(clock)
        steering = host.steering
        host.meanwhile = lambda: steering.drain(5.0) if order == "drain" else steering.become(RoleName.DECODE, 5.0)
        task = asyncio.create_task(steering.run())
        steering.become(RoleName.PREFILL, 1.0)
        await wait_for_async(lambda: [said.sequence for said in host.said] == [1, 2])
        assert (host.info.role, host.said[-1].state, host.said[-1].hands_back) == ("prefill", "draining", False)
        clock.advance(5.0)
        await wait_for_async(lambda: host.said[-1].hands_back)
        assert [said.sequence for said in host.said] == [1, 2, 2]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_step_that_does_not_end_is_told_in_place_of_ready_alone() -> None:
    async def run() -> list[str]:
        host = Host(ManualClock(100.0))
        steering = host.steering
        task = asyncio.create_task(steering.run())
        steering.stall(True)
        steering.stall(False)
        steering.stall(True)
        steering.drain()
        await wait_for_async(lambda: host.said[-1].state == WorkerState.DRAINED)
        steering.stall(False)
        steering.stall(True)
        steering.uncordon()
        await wait_for_async(lambda: host.said[-1].state == WorkerState.STALLED)
        steering.stall(False)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [said.state for said in host.said]

    said = ["stalled", "ready", "stalled", "draining", "drained", "stalled", "ready"]
    assert asyncio.run(run()) == said
