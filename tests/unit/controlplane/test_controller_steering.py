"""The reconcile loop with workers that can be drained and flipped, and with controllers that die half way."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from tandem.controlplane import controller
from tandem.controlplane.control_orders import SILENT_S
from tandem.controlplane.controller import Controller
from tandem.controlplane.worker_control import WorkerControlClient, WorkerLook
from tandem.core.desired import DesiredState, Pool
from tandem.core.desired_changes import cordoned, restarted, with_members, with_role, with_scale
from tandem.core.errors import WorkerLostError
from tandem.core.events import EventKind
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.state_enums import RoleName, WorkerState
from tests.unit.controlplane.controller_rig import P1, Harness, settle, spec_of


class FakeControl(WorkerControlClient):
    """Workers that obey; the test ends a drain, a flip that is refused raises."""

    def __init__(self) -> None:
        self.said: dict[WorkerId, WorkerLook] = {}
        self.calls: list[str] = []
        self.refuses = False
        self.fails = False
        self.looks, self.late_looks = 0, 0
        self.answers, self.drains = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.drains.set()

    async def look(self, worker: WorkerId) -> WorkerLook:
        """Return the present state, once `answers` is set."""
        self.looks += 1
        if worker not in self.said:
            raise WorkerLostError(f"{worker} does not answer")
        said = self.said[worker]
        if not self.answers.is_set():
            self.late_looks += 1
            await self.answers.wait()
        return said

    def is_now(self, worker: WorkerId, **changes: Any) -> WorkerLook:
        """Change what the worker reports of itself."""
        self.said[worker] = replace(self.said[worker], **changes)
        return self.said[worker]

    async def drain(self, worker: WorkerId, deadline_s: float | None = None) -> WorkerLook:
        await self.drains.wait()
        self.calls.append(f"drain {worker} {deadline_s:g}")
        return self.is_now(worker, state=WorkerState.DRAINING)

    async def uncordon(self, worker: WorkerId) -> WorkerLook:
        self.calls.append(f"uncordon {worker}")
        return self.is_now(worker, state=WorkerState.READY)

    async def become(self, worker: WorkerId, role: RoleName, deadline_s: float | None = None) -> WorkerLook:
        self.calls.append(f"become {worker} {role} {deadline_s:g}")
        if self.refuses:
            raise WorkerLostError("it does not hear")
        if self.fails:
            return self.is_now(worker, flip_failure="no port is free")
        return self.is_now(worker, role=role, flip_failure="")


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


class Steered(Harness):
    """Two prefill workers and a decode worker, which can be steered."""

    def __init__(self, replace_silent_s: float = 60.0) -> None:
        super().__init__()
        self.control, self.replace_silent_s = FakeControl(), replace_silent_s
        self.controller = self.another()

    def another(self) -> Controller:
        """A controller that knows nothing but the record and what runs."""
        return Controller(
            launcher=self.launcher, desired=self.desired, make_spec=spec_of, events=self.events, clock=self.clock,
            client=self.control, replace_silent_s=self.replace_silent_s,
        )  # fmt: skip

    def all_ready(self) -> None:
        for name, one in self.launcher.there.items():
            if not one.is_ready:
                self.control.said[name] = WorkerLook(
                    worker=name, incarnation=Incarnation(1), role=one.role, state=WorkerState.READY
                )
                self.ready(name)

    def write(self, state: DesiredState) -> None:
        self.version += 1
        self.desired.states.put_nowait(replace(state, version=self.version))


def _start() -> DesiredState:
    return DesiredState(version=1, pools=(
        Pool(name="prefill", model="m", role=RoleName.PREFILL, count=2),
        Pool(name="decode", model="m", role=RoleName.DECODE, count=1),
    )).filled()  # fmt: skip


def play_steered(scene: Callable[[Steered], Coroutine[None, None, None]], replace_silent_s: float = 60.0) -> None:
    async def run() -> None:
        h = Steered(replace_silent_s)
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
    """Also by a controller that only reads the record, and a leaving worker gets the record's deadline."""

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
        await _until(lambda: h.control.calls == ["drain prefill-1 5"])
        h.write(both)
        await _until(lambda: h.control.calls == ["drain prefill-1 5", "drain prefill-2 300"])
        h.control.is_now(P1, state=WorkerState.READY)  # as if its process was started anew
        await _until(lambda: h.control.calls[2:] == ["drain prefill-1 5"])
        h.write(with_members(both, [one for one in both.members if one.worker_id != "prefill-3"]))
        await _until(lambda: h.control.calls[3:] == ["drain prefill-3 45"])

    play_steered(scene)


def test_a_victim_is_stopped_once_it_says_that_it_has_nothing_left() -> None:
    async def scene(h: Steered) -> None:
        h.write(with_scale(_start(), {RoleName.PREFILL: 1}, {}, may_flip=False))
        await _until(lambda: h.control.calls == ["drain prefill-1 60"])
        await settle()
        assert h.launcher.stopped == []
        h.control.is_now(P1, state=WorkerState.DRAINED)
        await _until(lambda: h.launcher.stopped == [P1])
        assert h.events.of(EventKind.DRAINING) == ["prefill-1: it is wanted no more"]

    play_steered(scene)


def test_a_worker_that_is_wanted_again_in_time_goes_on() -> None:
    async def scene(h: Steered) -> None:
        h.write(with_scale(_start(), {RoleName.PREFILL: 1}, {}, may_flip=False))
        await _until(lambda: h.control.calls == ["drain prefill-1 60"])
        h.write(_start())
        await _until(lambda: h.control.calls[1:] == ["uncordon prefill-1"])
        assert h.launcher.stopped == []

    play_steered(scene)


@pytest.mark.parametrize(("trouble", "why"), [("refuses", "it does not hear"), ("fails", "no port is free")])
def test_a_flip_that_fails_is_told_and_tried_again_later(trouble: str, why: str) -> None:
    async def scene(h: Steered) -> None:
        setattr(h.control, trouble, True)
        h.write(with_role(_start(), "prefill-1", RoleName.DECODE))
        await _until(lambda: h.events.of(EventKind.STEP_FAILED))
        assert h.events.of(EventKind.STEP_FAILED) == [f"prefill-1: become: {why}; again in 0.5 s"]
        await settle()
        assert h.control.calls == ["become prefill-1 decode 60"]
        setattr(h.control, trouble, False)
        h.clock.advance(0.6)
        await _until(lambda: h.events.of(EventKind.FLIPPED) == ["prefill-1: it serves as decode"])
        assert h.launcher.stopped == []

    play_steered(scene)


def test_a_worker_that_says_nothing_for_long_and_is_wanted_no_more_is_stopped() -> None:
    async def scene(h: Steered) -> None:
        del h.control.said[P1]
        h.write(with_scale(_start(), {RoleName.PREFILL: 1}, {}, may_flip=False))
        await _until(lambda: h.events.of(EventKind.DESIRED_CHANGED)[1:])
        await settle()
        assert h.launcher.stopped == []
        h.clock.advance(SILENT_S + 0.1)
        await _until(lambda: h.launcher.stopped == [P1])

    play_steered(scene)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are looked at all the time, independent of the test's clock."""
    monkeypatch.setattr(controller, "WAIT_EVERY_S", 0.001)
    monkeypatch.setattr(controller, "RELIST_EVERY_S", 0.001)


async def _falls_silent(h: Steered, worker: WorkerId) -> WorkerLook:
    """Return its last report. Its silence is reported as soon as it counts as silent."""
    before, said = len(h.events.of(EventKind.SILENT)), h.control.said.pop(worker)
    await _looked(h)
    assert len(h.events.of(EventKind.SILENT)) == before, "it may be busy"
    h.clock.advance(SILENT_S + 0.1)
    await _until(lambda: len(h.events.of(EventKind.SILENT)) == before + 1)
    return said


async def _looked(h: Steered) -> None:
    """Wait for two complete rounds of looks at all workers."""
    looks = h.control.looks
    await _until(lambda: h.control.looks >= looks + 2 * len(h.launcher.there) + 1)


@pytest.mark.usefixtures("often")
def test_a_worker_that_hangs_is_told_of_at_once_and_in_time_killed_and_started_anew() -> None:
    async def scene(h: Steered) -> None:
        said = await _falls_silent(h, P1)
        why = "it has not answered for 5 s; if that lasts 60 s more, it is started anew"
        assert h.events.of(EventKind.SILENT) == [f"prefill-1: {why}"]
        h.clock.advance(59.8)
        await _looked(h)
        assert h.launcher.stopped == []
        h.clock.advance(0.3)
        await _until(lambda: h.launcher.stopped == [P1])
        assert h.launcher.graces_s == [0.0], "it would not hear that it should end"
        await _until(lambda: h.events.of(EventKind.RESTART_PLANNED) == ["prefill-1: in 0.5 s, because it died"])
        assert h.events.of(EventKind.STOPPING) == ["prefill-1: it has not answered for 65 s"]
        h.clock.advance(0.6)
        await _until(lambda: h.launcher.started.count(P1) == 2)
        h.control.said[P1] = said
        h.ready(P1)
        await _until(lambda: h.events.of(EventKind.READY)[3:] == ["prefill-1: it serves as prefill"])
        h.clock.advance(600)
        await _looked(h)
        assert (h.launcher.stopped, h.events.of(EventKind.HEARD)) == ([P1], [])

    play_steered(scene)


@pytest.mark.usefixtures("often")
def test_one_that_is_heard_again_in_time_stays_and_a_later_silence_counts_anew() -> None:
    async def scene(h: Steered) -> None:
        heard: list[str] = []
        for _ in range(2):
            said = await _falls_silent(h, P1)
            h.clock.advance(40.0)
            await _looked(h)
            h.control.said[P1] = said
            heard.append("prefill-1: again, after 45 s")
            await _until(lambda: h.events.of(EventKind.HEARD) == heard)
        await _looked(h)
        assert h.launcher.stopped == []

    play_steered(scene)


@pytest.mark.usefixtures("often")
def test_a_machine_that_was_suspended_gives_its_workers_the_whole_time() -> None:
    """Hours pass between two looks, and at the first one no worker is there yet."""

    async def scene(h: Steered) -> None:
        said = dict(h.control.said)
        h.clock.advance(7200.0)
        h.control.said.clear()
        await _until(lambda: len(h.events.of(EventKind.SILENT)) == 3)
        h.control.said.update(said)
        await _until(lambda: len(h.events.of(EventKind.HEARD)) == 3)
        assert h.launcher.stopped == []

    play_steered(scene)


@pytest.mark.usefixtures("often")
def test_who_is_wanted_in_another_role_comes_back_in_it() -> None:
    async def scene(h: Steered) -> None:
        await _falls_silent(h, P1)
        h.write(with_role(_start(), "prefill-1", RoleName.DECODE))
        await _until(lambda: len(h.events.of(EventKind.DESIRED_CHANGED)) == 2)
        await _looked(h)
        assert h.control.calls == []
        h.clock.advance(60.1)
        await _until(lambda: h.events.of(EventKind.RESTART_PLANNED))
        h.clock.advance(0.6)
        await _until(lambda: h.launcher.started.count(P1) == 2)
        assert h.launcher.there[P1].role is RoleName.DECODE

    play_steered(scene)


@pytest.mark.usefixtures("often")
def test_without_a_time_nobody_is_replaced_for_being_silent() -> None:
    async def scene(h: Steered) -> None:
        await _falls_silent(h, P1)
        assert h.events.of(EventKind.SILENT) == ["prefill-1: it has not answered for 5 s; it is not replaced"]
        h.clock.advance(1e6)
        await _looked(h)
        assert h.launcher.stopped == []
        h.write(restarted(_start(), "prefill-1"))
        await _until(lambda: h.launcher.stopped == [P1])

    play_steered(scene, replace_silent_s=0.0)


def test_a_change_in_the_registry_is_looked_into_at_once() -> None:
    async def scene(h: Steered) -> None:
        await settle()
        looks = h.control.looks
        h.controller.look_again()
        await _until(lambda: h.control.looks == looks + 3)

    play_steered(scene)


def test_a_look_from_before_an_order_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """prefill-1 begins to drain while its look is on the way: it does not stand in for prefill-0."""
    monkeypatch.setattr(controller, "WAIT_EVERY_S", 0.01)

    async def scene(h: Steered) -> None:
        h.control.drains.clear()
        h.write(cordoned(_start(), "prefill-1", is_cordoned=True))
        await _until(lambda: h.events.of(EventKind.DRAINING))
        h.write(restarted(_start(), "prefill-0"))
        await _until(lambda: h.events.of(EventKind.WAITING))
        h.control.answers.clear()
        await _until(lambda: h.control.late_looks >= 3)
        h.control.drains.set()
        await _until(lambda: h.control.calls == ["drain prefill-1 60"])
        await settle()
        h.control.answers.set()
        await _until(lambda: h.control.calls[1:] == ["uncordon prefill-1", "drain prefill-0 60"])

    play_steered(scene)


def test_a_restart_that_was_wished_may_fail_once() -> None:
    async def scene(h: Steered) -> None:
        h.write(restarted(_start(), "prefill-1"))
        await _until(lambda: h.control.calls == ["drain prefill-1 60"])
        h.control.is_now(P1, state=WorkerState.DRAINED)
        await _until(lambda: h.launcher.started.count(P1) == 2)
        assert h.events.of(EventKind.STARTED)[-1] == "prefill-1: pool prefill wants 2"
        await h.dies(P1, "no memory")
        await _until(lambda: h.events.of(EventKind.RESTART_PLANNED) == ["prefill-1: in 0.5 s, because it died"])
        h.clock.advance(0.6)
        await _until(lambda: h.launcher.started.count(P1) == 3)
        assert h.events.of(EventKind.STARTED)[-1] == "prefill-1: after it died"

    play_steered(scene)


def test_where_there_is_only_waiting_nobody_is_looked_at_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "WAIT_EVERY_S", 3600.0)
    monkeypatch.setattr(controller, "LOOK_EVERY_S", 0.001)

    async def rests(h: Steered) -> bool:
        looks = h.control.looks
        for _ in range(20):
            await asyncio.sleep(0.005)
        return h.control.looks == looks

    async def scene(h: Steered) -> None:
        h.write(replace(with_scale(_start(), {RoleName.DECODE: 2}, {}), max_ranks=3))
        await _until(lambda: h.events.of(EventKind.WAITING))
        assert await rests(h)
        await h.dies(P1)
        await _until(lambda: h.launcher.started[3:] == ["decode-1"])
        h.clock.advance(0.6)
        await _until(lambda: h.events.of(EventKind.WAITING)[1:])
        assert h.events.of(EventKind.WAITING)[1].startswith("prefill-1: no room for 1 more ranks")
        assert await rests(h)

    play_steered(scene)


@pytest.mark.parametrize("actions", range(1, 7))
async def test_a_new_controller_goes_on_where_the_last_one_died(actions: int) -> None:
    """It dies after so many actions of a change that restarts, flips, drains, starts and stops workers."""
    h = Steered()
    first = asyncio.create_task(h.controller.run())
    h.write(_start())
    await _until(lambda: len(h.launcher.there) == 3)
    h.all_ready()
    await asyncio.wait_for(h.controller.wait_ready(), 20)
    change = with_scale(_start(), {RoleName.PREFILL: 2, RoleName.DECODE: 3}, {})
    change = with_role(change, "decode-1", RoleName.PREFILL)
    change = restarted(cordoned(change, "prefill-1", is_cordoned=True), "prefill-0")
    h.write(change)

    def done() -> int:
        return len(h.launcher.started) - 3 + len(h.launcher.stopped) + len(h.control.calls)

    await _moved_on(h, lambda: done() >= actions)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(h.another().run())
    h.desired.states.put_nowait(replace(change, version=h.version))
    await _moved_on(h, lambda: _is_as_wanted(h, change))
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)


async def _moved_on(h: Steered, condition: Callable[[], bool]) -> None:
    """Wait for the condition; meanwhile starting workers get ready and draining ones run dry."""

    def moved() -> bool:
        h.all_ready()
        for name, look in h.control.said.items():
            if look.state is WorkerState.DRAINING:
                h.control.is_now(name, state=WorkerState.DRAINED)
        return condition()

    await _until(moved)


def _is_as_wanted(h: Steered, state: DesiredState) -> bool:
    found = {
        name: (h.control.said[name].role, h.control.said[name].state, one.restart_generation)
        for name, one in h.launcher.there.items()
        if name in h.control.said
    }
    return found == {
        member.worker_id: (member.role, "drained" if member.is_cordoned else "ready", member.restart_generation)
        for member in state.members
    }
