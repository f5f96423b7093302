"""Test changes of role, and the watch over ranks."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tandem.core.clock import ManualClock
from tandem.core.state_enums import RoleName, WorkerState
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.heartbeat import Pulse
from tandem.workerhost.lifecycle import WorkerLifecycle
from tandem.workerhost.relay import ForRank
from tandem.workerhost.watchdog import SILENT_LOOKS, WATCH_EVERY_S, RankWatch
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
async def test_a_deadline_that_is_given_meanwhile_holds_in_the_new_role(order: str) -> None:
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


@pytest.fixture
def pulses() -> Iterator[list[Pulse]]:
    pulses = [Pulse.create(f"test-{rank}") for rank in range(2)]
    yield pulses
    for pulse in pulses:
        pulse.close()


def test_only_the_silent_rank_is_named(pulses: list[Pulse]) -> None:
    watch = RankWatch(pulses)
    for look in range(1, 3 * SILENT_LOOKS):
        pulses[0].tick(float(look))
        assert watch.look() == ([1] if look >= SILENT_LOOKS else [])
    pulses[1].tick(99.0)
    assert watch.look() == []


def test_a_machine_that_was_suspended_is_no_false_alarm(pulses: list[Pulse]) -> None:
    """However far the clock jumps: it costs the one look that came before the ranks' next tick."""
    watch = RankWatch(pulses)
    for now_s in (1.0, 2.0, 100_000.0, 200_000.0):
        for pulse in pulses:
            pulse.tick(now_s)
        assert watch.look() == []
        assert watch.look() == []


def test_the_longest_step_is_named(pulses: list[Pulse]) -> None:
    watch = RankWatch(pulses)
    pulses[1].begin_step()
    for look in range(4):
        watch.look()
        assert watch.step_s()[1] == look * WATCH_EVERY_S
    pulses[0].begin_step()
    watch.look()
    assert watch.step_s() == (1, 4 * WATCH_EVERY_S)
    pulses[1].end_step()
    pulses[1].begin_step()  # another one
    watch.look()
    assert watch.step_s() == (0, WATCH_EVERY_S)
    for pulse in pulses:
        pulse.end_step()
    watch.look()
    assert watch.step_s()[1] == 0.0


def test_a_machine_that_was_suspended_inside_a_step_is_no_false_alarm(pulses: list[Pulse]) -> None:
    """Host and ranks are stopped for longer than any step may take, and go on together, the host first."""
    watch = RankWatch(pulses)
    pulses[0].tick(100.0)
    pulses[0].begin_step()
    watch.look()
    pulses[1].tick(100_000.0)  # the clock has gone on
    assert watch.look() == []
    assert watch.step_s() == (0, WATCH_EVERY_S)
