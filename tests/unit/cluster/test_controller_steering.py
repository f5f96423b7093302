"""The reconcile loop with workers that can be drained and flipped, and with controllers that die half way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

import pytest

from tandem.cluster import controller
from tandem.cluster.controller import Controller
from tandem.cluster.steersman import SILENT_S
from tandem.core.desired import DesiredState, Pool
from tandem.core.errors import WorkerLostError
from tandem.core.events import EventKind
from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName
from tandem.core.wishes import cordoned, flipped, restarted, scaled, with_members
from tests.unit.cluster.controller_rig import P1, Harness, settle, spec_of


@dataclass
class Told:
    """What a worker says of itself."""

    state: str
    role: RoleName
    target: RoleName | None = None
    flip_failure: str = ""


class FakeSteering:
    """Workers that obey; a drain is over when the test says so, a flip that is refused raises."""

    def __init__(self) -> None:
        self.said: dict[WorkerId, Told] = {}
        self.calls: list[str] = []
        self.refuses = False
        self.fails = False
        self.looks, self.late_looks = 0, 0
        self.answers, self.drains = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.drains.set()

    async def look(self, worker: WorkerId) -> Told:
        """How things stand now, told once `answers` is set."""
        self.looks += 1
        if worker not in self.said:
            raise WorkerLostError(f"{worker} does not answer")
        said = replace(self.said[worker])
        if not self.answers.is_set():
            self.late_looks += 1
            await self.answers.wait()
        return said

    async def drain(self, worker: WorkerId, deadline_s: float) -> None:
        await self.drains.wait()
        self.calls.append(f"drain {worker} {deadline_s:g}")
        self.said[worker].state = "draining"

    async def uncordon(self, worker: WorkerId) -> None:
        self.calls.append(f"uncordon {worker}")
        self.said[worker].state = "ready"

    async def become(self, worker: WorkerId, role: RoleName, deadline_s: float) -> None:
        self.calls.append(f"become {worker} {role} {deadline_s:g}")
        if self.refuses:
            raise WorkerLostError("it does not hear")
        told = self.said[worker]
        told.role, told.flip_failure = (told.role, "no port is free") if self.fails else (role, "")


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


class Steered(Harness):
    """Two prefill workers and a decode worker, which can be steered."""

    def __init__(self) -> None:
        super().__init__()
        self.steering = FakeSteering()
        self.controller = self.another()

    def another(self) -> Controller:
        """A controller that knows nothing but the record and what runs."""
        return Controller(
            launcher=self.launcher, desired=self.desired, make_spec=spec_of, events=self.events, clock=self.clock,
            steering=self.steering,
        )  # fmt: skip

    def all_ready(self) -> None:
        for name, one in self.launcher.there.items():
            if not one.is_ready:
                self.steering.said[name] = Told("ready", one.role)
                self.ready(name)

    def write(self, state: DesiredState) -> None:
        self.version += 1
        self.desired.states.put_nowait(replace(state, version=self.version))


def _start() -> DesiredState:
    return DesiredState(version=1, pools=(
        Pool(name="prefill", model="m", role=RoleName.PREFILL, count=2),
        Pool(name="decode", model="m", role=RoleName.DECODE, count=1),
    )).filled()  # fmt: skip


def play_steered(scene: Callable[[Steered], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        h = Steered()
        task = asyncio.create_task(h.controller.run())
        try:
            h.write(_start())
            await _until(lambda: len(h.launcher.there) == 3)
            h.all_ready()
            await asyncio.wait_for(h.controller.wait_ready(), 20)
            await asyncio.wait_for(scene(h), 60)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_each_worker_is_told_the_deadline_of_its_own_drain() -> None:
    """Also by a controller that only reads the record, and who leaves is told that of the record."""

    async def scene(h: Steered) -> None:
        more = replace(
            _start(),
            pools=(replace(_start().pools[0], count=4), *_start().pools[1:]), members=(), drain_deadline_s=45.0
        ).filled()  # fmt: skip
        h.write(more)
        await _until(lambda: len(h.launcher.there) == 5)
        h.all_ready()
        one = cordoned(more, "prefill-1", is_cordoned=True, deadline_s=5.0)
        both = cordoned(one, "prefill-2", is_cordoned=True, deadline_s=300.0)
        h.write(one)
        await _until(lambda: h.steering.calls == ["drain prefill-1 5"])
        h.write(both)
        await _until(lambda: h.steering.calls == ["drain prefill-1 5", "drain prefill-2 300"])
        h.steering.said[P1].state = "ready"  # its process was started anew, say
        await _until(lambda: h.steering.calls[2:] == ["drain prefill-1 5"])
        h.write(with_members(both, [one for one in both.members if one.worker_id != "prefill-3"]))
        await _until(lambda: h.steering.calls[3:] == ["drain prefill-3 45"])

    play_steered(scene)


def test_a_victim_is_stopped_once_it_says_that_it_has_nothing_left() -> None:
    async def scene(h: Steered) -> None:
        h.write(scaled(_start(), {RoleName.PREFILL: 1}, {}, may_flip=False))
        await _until(lambda: h.steering.calls == ["drain prefill-1 60"])
        await settle()
        assert h.launcher.stopped == []
        h.steering.said[P1].state = "drained"
        await _until(lambda: h.launcher.stopped == [P1])
        assert h.events.of(EventKind.DRAINING) == ["prefill-1: it is wanted no more"]

    play_steered(scene)


def test_a_worker_that_is_wanted_again_in_time_goes_on() -> None:
    async def scene(h: Steered) -> None:
        h.write(scaled(_start(), {RoleName.PREFILL: 1}, {}, may_flip=False))
        await _until(lambda: h.steering.calls == ["drain prefill-1 60"])
        h.write(_start())
        await _until(lambda: h.steering.calls[1:] == ["uncordon prefill-1"])
        assert h.launcher.stopped == []

    play_steered(scene)


@pytest.mark.parametrize(("trouble", "why"), [("refuses", "it does not hear"), ("fails", "no port is free")])
def test_a_flip_that_fails_is_told_and_tried_again_later(trouble: str, why: str) -> None:
    async def scene(h: Steered) -> None:
        setattr(h.steering, trouble, True)
        h.write(flipped(_start(), "prefill-1", RoleName.DECODE))
        await _until(lambda: h.events.of(EventKind.STEP_FAILED))
        assert h.events.of(EventKind.STEP_FAILED) == [f"prefill-1: become: {why}; again in 0.5 s"]
        await settle()
        assert h.steering.calls == ["become prefill-1 decode 60"]
        setattr(h.steering, trouble, False)
        h.clock.advance(0.6)
        await _until(lambda: h.events.of(EventKind.FLIPPED) == ["prefill-1: it serves as decode"])
        assert h.launcher.stopped == []

    play_steered(scene)


def test_a_worker_that_says_nothing_for_long_and_is_wanted_no_more_is_stopped() -> None:
    async def scene(h: Steered) -> None:
        del h.steering.said[P1]
        h.write(scaled(_start(), {RoleName.PREFILL: 1}, {}, may_flip=False))
        await _until(lambda: h.events.of(EventKind.DESIRED_CHANGED)[1:])
        await settle()
        assert h.launcher.stopped == []
        h.clock.advance(SILENT_S + 0.1)
        await _until(lambda: h.launcher.stopped == [P1])

    play_steered(scene)


def test_a_look_from_before_an_order_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """prefill-1 begins to drain while its look is on the way: it does not stand in for prefill-0."""
    monkeypatch.setattr(controller, "WAIT_EVERY_S", 0.01)

    async def scene(h: Steered) -> None:
        h.steering.drains.clear()
        h.write(cordoned(_start(), "prefill-1", is_cordoned=True))
        await _until(lambda: h.events.of(EventKind.DRAINING))
        h.write(restarted(_start(), "prefill-0"))
        await _until(lambda: h.events.of(EventKind.WAITING))
        h.steering.answers.clear()
        await _until(lambda: h.steering.late_looks >= 3)
        h.steering.drains.set()
        await _until(lambda: h.steering.calls == ["drain prefill-1 60"])
        await settle()
        h.steering.answers.set()
        await _until(lambda: h.steering.calls[1:] == ["uncordon prefill-1", "drain prefill-0 60"])

    play_steered(scene)


def test_a_restart_that_was_wished_may_fail_once() -> None:
    async def scene(h: Steered) -> None:
        h.write(restarted(_start(), "prefill-1"))
        await _until(lambda: h.steering.calls == ["drain prefill-1 60"])
        h.steering.said[P1].state = "drained"
        await _until(lambda: h.launcher.started.count(P1) == 2)
        assert h.events.of(EventKind.STARTED)[-1] == "prefill-1: pool prefill wants 2"
        h.dies(P1, "no memory")
        await _until(lambda: h.events.of(EventKind.RESTART_PLANNED) == ["prefill-1: in 0.5 s, because it died"])
        h.clock.advance(0.6)
        await _until(lambda: h.launcher.started.count(P1) == 3)
        assert h.events.of(EventKind.STARTED)[-1] == "prefill-1: after it died"

    play_steered(scene)


def test_where_there_is_only_waiting_nobody_is_looked_at_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "WAIT_EVERY_S", 3600.0)
    monkeypatch.setattr(controller, "LOOK_EVERY_S", 0.001)

    async def rests(h: Steered) -> bool:
        looks = h.steering.looks
        for _ in range(20):
            await asyncio.sleep(0.005)
        return h.steering.looks == looks

    async def scene(h: Steered) -> None:
        h.write(replace(scaled(_start(), {RoleName.DECODE: 2}, {}), max_ranks=3))
        await _until(lambda: h.events.of(EventKind.WAITING))
        assert await rests(h)
        h.dies(P1)
        await _until(lambda: h.launcher.started[3:] == ["decode-1"])
        h.clock.advance(0.6)
        await _until(lambda: h.events.of(EventKind.WAITING)[1:])
        assert h.events.of(EventKind.WAITING)[1].startswith("prefill-1: no room for 1 more ranks")
        assert await rests(h)

    play_steered(scene)


@pytest.mark.parametrize("actions", range(1, 7))
def test_a_new_controller_goes_on_where_the_last_one_died(actions: int) -> None:
    """It dies after so many actions of a change that restarts, flips, drains, starts and stops workers."""

    async def run() -> None:
        h = Steered()
        first = asyncio.create_task(h.controller.run())
        h.write(_start())
        await _until(lambda: len(h.launcher.there) == 3)
        h.all_ready()
        await asyncio.wait_for(h.controller.wait_ready(), 20)
        change = scaled(_start(), {RoleName.PREFILL: 2, RoleName.DECODE: 3}, {})
        change = flipped(change, "decode-1", RoleName.PREFILL)
        change = restarted(cordoned(change, "prefill-1", is_cordoned=True), "prefill-0")
        h.write(change)

        def done() -> int:
            return len(h.launcher.started) - 3 + len(h.launcher.stopped) + len(h.steering.calls)

        await _moved_on(h, lambda: done() >= actions)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(h.another().run())
        h.desired.states.put_nowait(replace(change, version=h.version))
        await _moved_on(h, lambda: _is_as_wanted(h, change))
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)

    asyncio.run(run())


async def _moved_on(h: Steered, condition: Callable[[], bool]) -> None:
    """Until then, starting workers get ready and draining ones run dry."""

    def moved() -> bool:
        h.all_ready()
        for told in h.steering.said.values():
            if told.state == "draining":
                told.state = "drained"
        return condition()

    await _until(moved)


def _is_as_wanted(h: Steered, state: DesiredState) -> bool:
    found = {
        name: (h.steering.said[name].role, h.steering.said[name].state, one.restart_generation)
        for name, one in h.launcher.there.items()
        if name in h.steering.said
    }
    return found == {
        member.worker_id: (member.role, "drained" if member.is_cordoned else "ready", member.restart_generation)
        for member in state.members
    }
