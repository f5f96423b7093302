"""The reconcile loop against a launcher that obeys the test and a clock that the test moves."""

import asyncio

import pytest

from tandem.controlplane.supervised_worker import WorkerPhase
from tandem.core.errors import StartupError
from tandem.core.events import EventKind
from tests.unit.controlplane.controller_rig import D0, P0, P1, Harness, settle


async def second_wanted(h: Harness) -> None:
    """Want a second prefill worker once the first one is ready."""
    await h.want(prefill=1)
    h.ready(P0)
    await settle()
    await h.want(prefill=2)


async def test_starts_what_is_wanted_and_is_ready_when_all_are(h: Harness) -> None:
    await h.want(prefill=2, decode=1)
    assert sorted(h.launcher.started) == [D0, P0, P1]
    waiting = asyncio.create_task(h.controller.wait_ready())
    h.ready(P0, P1)
    await settle()
    assert not waiting.done()
    h.ready(D0)
    await waiting


async def test_restarts_with_growing_delays_and_resets_after_running_well(h: Harness) -> None:
    await h.want(prefill=1)
    for delay_s in (0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        starts = len(h.launcher.started)
        h.ready(P0)
        await h.dies(P0)
        assert h.events.of(EventKind.RESTART_PLANNED)[-1] == f"prefill-0: in {delay_s:g} s, because it died"
        await h.want(prefill=1, after_s=delay_s - 0.01)  # anything that wakes the loop
        assert len(h.launcher.started) == starts
        await h.want(prefill=1, after_s=0.02)
        assert len(h.launcher.started) == starts + 1
    h.ready(P0)
    await settle()
    h.clock.advance(30.1)
    await h.dies(P0)
    assert h.events.of(EventKind.RESTART_PLANNED)[-1] == "prefill-0: in 0.5 s, because it died"


async def test_a_restart_comes_by_itself(h: Harness) -> None:
    """Nothing has to wake the loop: the delay on a clock that really runs is enough."""
    await h.want(prefill=1)
    h.ready(P0)
    await h.dies(P0)
    h.clock.advance(0.45)
    async with asyncio.timeout(5):
        while len(h.launcher.started) < 2:
            h.clock.advance(0.001)
            await asyncio.sleep(0.005)


async def test_a_first_start_that_fails_ends_the_start_up_with_its_reason() -> None:
    h = Harness()
    task = asyncio.create_task(h.controller.run())
    await h.want(prefill=1, decode=1)
    await h.dies(D0, "the model is broken")
    with pytest.raises(StartupError, match="decode-0 cannot start: the model is broken"):
        await asyncio.wait_for(task, 5)
    assert h.launcher.started.count(D0) == 1


async def test_a_later_start_that_fails_waits_for_the_next_desired_state(h: Harness) -> None:
    await second_wanted(h)
    await h.dies(P1, "no memory")
    assert h.controller.phases()[P1] is WorkerPhase.FAILED
    assert h.launcher.started.count(P1) == 1
    await h.want(prefill=2)
    assert h.launcher.started.count(P1) == 2


async def test_stops_what_is_too_much_last_first_and_can_grow_again(h: Harness) -> None:
    await h.want(prefill=2)
    h.ready(P0, P1)
    await h.want(prefill=1)
    assert h.launcher.stopped == [P1]
    assert set(h.controller.phases()) == {P0}
    await h.want(prefill=2)
    assert h.launcher.started.count(P1) == 2
    assert not h.events.of(EventKind.RESTART_PLANNED)


async def test_a_waiting_restart_is_dropped_when_nobody_wants_it(h: Harness) -> None:
    await h.want(prefill=2)
    h.ready(P0, P1)
    await h.dies(P1)
    await h.want(prefill=1)
    await h.want(prefill=1, decode=1, after_s=60)
    assert h.launcher.started.count(P1) == 1
    assert h.launcher.stopped == []


async def test_ends_when_the_desired_state_is_stopped_and_shutdown_stops_all() -> None:
    h = Harness()
    task = asyncio.create_task(h.controller.run())
    await h.want(prefill=1, decode=1)
    h.ready(P0)
    await h.want(stop=True)
    await asyncio.wait_for(task, 5)
    await h.controller.shutdown()
    assert sorted(h.launcher.stopped) == [D0, P0]


async def test_a_restart_that_hangs_is_killed_and_tried_again(h: Harness) -> None:
    await h.want(prefill=1)
    h.ready(P0)
    await h.dies(P0)
    await h.want(prefill=1, after_s=0.5)
    assert h.launcher.started.count(P0) == 2
    await h.want(prefill=1, after_s=301)
    assert h.launcher.stopped == [P0]
    assert h.events.of(EventKind.STOPPING) == ["prefill-0: it did not get ready within 300 s"]
    await h.want(prefill=1, after_s=10)
    assert h.launcher.started.count(P0) == 3


async def test_a_stop_that_fails_is_told_and_goes_on_once_the_worker_has_ended(h: Harness) -> None:
    await h.want(prefill=2)
    h.ready(P0, P1)
    h.launcher.stuck = True
    await h.want(prefill=1)
    why = "stopping it failed: process 7 does not end although it was killed"
    assert h.events.of(EventKind.GAVE_UP) == [f"prefill-1: {why}"]
    await h.want(prefill=2)
    assert h.launcher.started.count(P1) == 1, "the old one still runs"
    await h.dies(P1)
    assert h.launcher.started.count(P1) == 2


async def test_one_that_found_no_room_is_tried_again_since_machines_join(h: Harness) -> None:
    await second_wanted(h)
    await h.dies(P1, "it got no place within 120 s", is_unplaced=True)
    assert h.events.of(EventKind.RESTART_PLANNED) == ["prefill-1: in 0.5 s, as there may be room by then"]
    await h.want(prefill=2, after_s=0.6)
    assert h.launcher.started.count(P1) == 2
    await h.dies(P1, "the model is broken")
    assert h.controller.phases()[P1] is WorkerPhase.FAILED, "what is wrong with the configuration stays wrong"


async def test_what_a_worker_has_no_place_for_is_told_at_once_and_no_second_time(h: Harness) -> None:
    missing = "for a place: needs 2 CPU on one node: 10.0.0.2 has 1 of 2 CPU free"
    await second_wanted(h)
    for _ in range(2):
        h.says(P1, f"waiting {missing}")
        await settle()
        assert h.events.of(EventKind.WAITING) == [f"prefill-1: {missing}"]
        await h.dies(P1, "it got no place within 120 s", is_unplaced=True)
        await h.want(prefill=2, after_s=1.1)
    h.says(P1, "waiting for a place: no node has joined")
    h.says(P1, "it has a place on 10.0.0.3")
    h.says(P1, "loading weights")
    await settle()
    assert h.events.of(EventKind.WAITING)[1:] == ["prefill-1: for a place: no node has joined"]
    assert h.events.of(EventKind.STARTED)[-1] == "prefill-1: it has a place on 10.0.0.3"


async def test_one_that_found_no_room_in_the_start_up_ends_it_with_what_is_missing() -> None:
    h = Harness()
    task = asyncio.create_task(h.controller.run())
    await h.want(prefill=1, decode=1)
    await h.dies(D0, "it got no place within 60 s: GPU 0 has 9 of 10 MiB in use", is_unplaced=True)
    with pytest.raises(StartupError, match="decode-0 cannot start: it got no place within 60 s: GPU 0 has 9 of 10"):
        await asyncio.wait_for(task, 5)
    assert h.events.of(EventKind.GAVE_UP) == ["decode-0: it never worked; there is no room to start in"]


async def test_one_that_loses_its_machine_while_it_starts_is_started_elsewhere_also_before_the_cluster_was_ready(
    h: Harness,
) -> None:
    for worker, count in ((P0, 1), (P1, 2)):
        await h.want(prefill=count)
        await h.dies(worker, "its agent died: its node is gone", is_place_lost=True)
        planned = h.events.of(EventKind.RESTART_PLANNED)[-1]
        assert planned == f"{worker}: in 0.5 s, because its place is gone"
        await h.want(prefill=count, after_s=0.6)
        assert h.launcher.started.count(worker) == 2
        h.ready(worker)
        await settle()
        await h.controller.wait_ready()
    assert h.events.of(EventKind.GAVE_UP) == []


async def test_that_there_is_no_room_is_told_once_while_the_reason_is_the_same(h: Harness) -> None:
    async def find_no_room(missing: str) -> list[tuple[EventKind, str]]:
        before = len(h.events.seen)
        await h.dies(P1, f"it got no place within 120 s: {missing}", is_unplaced=True)
        await h.want(prefill=2, after_s=10.1)
        return [(kind, why) for kind, name, why in h.events.seen[before:] if name == P1]

    await second_wanted(h)
    told = [EventKind.EXITED, EventKind.RESTART_PLANNED]
    assert [kind for kind, _ in await find_no_room("needs 8 CPU")] == told
    for _ in range(10):
        assert await find_no_room("needs 8 CPU") == []
    assert [kind for kind, _ in await find_no_room("needs 2 GPU")] == told
    assert h.launcher.started.count(P1) == 13, "and all the time it is tried"
    h.ready(P1)
    await settle()
    await h.dies(P1)
    await h.want(prefill=2, after_s=10.1)
    kinds = [kind for kind, name, _ in h.events.seen if name == P1]
    assert kinds[-4:] == [EventKind.READY, *told, EventKind.STARTED]


async def test_every_action_has_a_reason(h: Harness) -> None:
    await h.want(prefill=1)
    h.ready(P0)
    await h.dies(P0)
    assert all(reason for _, _, reason in h.events.seen)
    kinds = [kind for kind, _, _ in h.events.seen]
    expected = [EventKind.DESIRED_CHANGED, EventKind.STARTED, EventKind.READY, EventKind.EXITED]
    assert kinds == [*expected, EventKind.RESTART_PLANNED]


async def test_where_a_record_goes_on_one_that_cannot_start_ends_nothing_while_another_is_left() -> None:
    h = Harness(is_continued=True)
    task = asyncio.create_task(h.controller.run())
    try:
        await asyncio.wait_for(h.controller.wait_ready(), 1)
        await h.want(prefill=2, decode=1)
        await h.dies(P1, "the model is broken")
        await h.dies(P0, "it got no place", is_unplaced=True)
        assert h.events.of(EventKind.GAVE_UP) == ["prefill-1: it never worked; another start will not help"]
        assert h.events.of(EventKind.RESTART_PLANNED) == ["prefill-0: in 0.5 s, as there may be room by then"]
        await h.want(prefill=1, decode=1, after_s=0.6)
        assert h.launcher.started.count(P0) == 2
        await h.dies(P0, "the model is broken")
        assert not task.done()
        await h.dies(D0, "the model is broken")
        with pytest.raises(StartupError, match="decode-0 cannot start: the model is broken"):
            await asyncio.wait_for(task, 5)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
