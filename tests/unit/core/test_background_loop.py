"""Work on an event loop beside the main one, which goes on while that one stands."""

import asyncio
import logging
import threading

import pytest

from tandem.core.background_loop import LATE_S, LoopWatch, run_beside
from tandem.core.clock import ManualClock
from tandem.core.lease_timing import LEASE_S, PROOF_OF_LIFE, STAND_S
from tools.waiting import wait_for_async


def test_it_goes_on_while_the_loop_stands_and_ends_with_whoever_waits() -> None:
    turned, ended = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            while True:
                turned.set()
                await asyncio.sleep(0.001)
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    async def run() -> None:
        beside = asyncio.create_task(run_beside(work, "beside"))
        await asyncio.sleep(0)
        for _ in range(3):
            turned.clear()
            assert turned.wait(30), "this loop stands, the other one turns"
        beside.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beside
        assert ended.is_set()

    asyncio.run(run())
    assert "beside" not in [thread.name for thread in threading.enumerate() if thread.is_alive()]


def test_what_it_raises_is_raised() -> None:
    async def work() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(run_beside(work, "beside"))


def test_what_ends_by_itself_is_waited_for() -> None:
    done: list[int] = []

    async def work() -> None:
        done.append(threading.get_ident())

    asyncio.run(run_beside(work, "beside"))
    assert done != [threading.get_ident()]


def test_a_loop_that_does_not_turn_stands_and_is_given_up_later(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(100.0)
    watch = LoopWatch(clock)

    async def run() -> None:
        marks = asyncio.create_task(watch.run())
        assert not watch.stands
        clock.advance(LATE_S + 0.1)
        assert (watch.stands, watch.is_given_up) == (True, False)
        clock.advance(STAND_S - LATE_S)
        assert (watch.stands, watch.is_given_up) == (True, True)
        await wait_for_async(lambda: not watch.stands)
        marks.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert [record.message for record in caplog.records] == ["the event loop stood"]
    assert vars(caplog.records[0])["fields"] == {"stood_s": STAND_S + 0.1}


def test_a_process_without_a_sign_of_life_is_gone_after_a_lease() -> None:
    options = dict(PROOF_OF_LIFE)
    assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] == 1000 * LEASE_S
    assert 2 * LEASE_S < STAND_S
