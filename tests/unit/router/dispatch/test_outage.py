"""All workers are away: waiting requests, their dispatch once a worker comes, and an error of the router's own."""

import asyncio
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest

from tandem.core.errors import InternalError
from tandem.core.ids import RequestId
from tandem.router.dispatch import dispatcher
from tandem.router.dispatch.inflight_request import ArrivalQueue
from tests.unit.router.stage import Stage, work

COUNT = 300


async def until(is_so: Any) -> None:
    async with asyncio.timeout(60.0):
        while not is_so():
            await asyncio.sleep(0)


async def test_those_that_waited_are_planned_one_by_one_with_the_loop_running_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "SPACING_S", 0.0)
    stage, inboxes = Stage("p1", "d1"), [ArrivalQueue(1 << 20) for _ in range(COUNT)]
    stage.go("p1")
    stage.go("d1")
    with ExitStack() as stack:
        for number, inbox in enumerate(inboxes):
            stack.enter_context(stage.dispatcher.submit(RequestId(f"r{number}"), 0, work(), inbox))
        assert stage.dispatcher.stranded("") == COUNT
        stage.come("p1")
        stage.come("d1")
        at_once = COUNT - stage.dispatcher.waiting
        assert at_once <= 2
        left = []
        while stage.dispatcher.waiting:
            left.append(stage.dispatcher.waiting)
            await asyncio.sleep(0)
        assert left[0] == COUNT - at_once
        assert all(before - after <= 1 for before, after in pairwise(left))
        assert len(stage.submitted("d1")) == COUNT


async def test_another_worker_begins_with_the_first_that_waits_again() -> None:
    stage = Stage("p1", "d1")
    stage.go("p1")
    stage.go("d1")
    with ExitStack() as stack:
        for name in ("a", "b"):
            stack.enter_context(stage.dispatcher.submit(RequestId(name), 0, work(), ArrivalQueue(1 << 20)))
        stage.come("p1")  # alone it serves no request: both go on waiting
        await until(lambda: not stage.dispatcher._retry_queue)
        stage.come("d1")
        await until(lambda: not stage.dispatcher.waiting)
        assert [submit.request for submit in stage.submitted("d1")] == ["a", "b"]


async def test_what_was_tried_before_is_not_stranded() -> None:
    stage = Stage("p1", "d1")
    with stage.dispatcher.submit(RequestId("r"), 0, work(), ArrivalQueue(1 << 20)):
        stage.go("d1")
        assert (stage.dispatcher.waiting, stage.dispatcher.stranded("")) == (1, 0)


async def test_an_error_in_the_plan_ends_the_request_that_is_planned_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, first, second = Stage("p1", "d1"), ArrivalQueue(1 << 20), ArrivalQueue(1 << 20)
    stage.go("d1")
    with ExitStack() as stack:
        stack.enter_context(stage.dispatcher.submit(RequestId("a"), 0, work(), first))
        stack.enter_context(stage.dispatcher.submit(RequestId("b"), 0, work(), second))
        choose, calls = stage.retry_policy.choose, []

        def broken(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 1:
                raise RuntimeError("a bug in a policy")
            return choose(*arguments)

        monkeypatch.setattr(stage.retry_policy, "choose", broken)
        stage.come("d1")
        await until(lambda: not stage.dispatcher.waiting)
        assert isinstance(first.error, InternalError)
        assert second.error is None
        assert [submit.request for submit in stage.submitted("d1")] == ["b"]
