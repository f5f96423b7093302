"""Pairs that a router tries: all of a few, and so many of many that every worker has been in some."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tandem.core.config import Disaggregation
from tandem.core.errors import WorkerLostError
from tandem.router.dispatch.readiness import AT_ONCE, LOOK_S, PAIRS_EACH, PROBE_S, enough, pair_plans
from tandem.router.routing.plan import Candidate
from tandem.router.storage.batches import concurrency
from tests.unit.router.candidates import d, p
from tests.unit.router.stage import Stage


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (3, 2), (4, 4), (1, 40), (40, 1)])
def test_few_pairs_are_all_tried(prefills: int, decodes: int) -> None:
    every = pair_plans(_workers(prefills, decodes))
    assert len(every) == prefills * decodes
    assert enough(every) == every


@pytest.mark.parametrize(("prefills", "decodes"), [(64, 64), (10, 90), (33, 7)])
def test_of_many_pairs_each_worker_is_in_some(prefills: int, decodes: int) -> None:
    every = pair_plans(_workers(prefills, decodes))
    tried = enough(every)
    counts = Counter(worker for plan in tried.values() for worker in plan.workers)
    assert len(counts) == prefills + decodes
    assert min(counts.values()) >= min(PAIRS_EACH, prefills, decodes)
    assert len(tried) <= PAIRS_EACH * (prefills + decodes)
    assert set(tried) <= set(every)


def _workers(prefills: int, decodes: int) -> list[Candidate]:
    return [*(p(f"p{number}") for number in range(prefills)), *(d(f"d{number}") for number in range(decodes))]


@asynccontextmanager
async def running(stage: Stage) -> AsyncIterator[None]:
    task = asyncio.create_task(stage.readiness.run(stage.dispatcher))
    try:
        async with asyncio.timeout(PROBE_S / 2):
            yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def tried(stage: Stage, worker: str) -> None:
    """Wait until a probe is at the worker."""
    while not stage.link(worker).requests:
        await asyncio.sleep(0.01)


async def test_a_probe_that_hangs_keeps_no_other_pair_waiting() -> None:
    stage = Stage("p1", "d1")
    async with running(stage):
        await tried(stage, "d1")
        stage.come("d2")
        await tried(stage, "d2")
        assert len(stage.dispatcher.flights) == 2


async def test_no_more_probes_at_once_than_a_few() -> None:
    stage = Stage("p1", *(f"d{number}" for number in range(9)))
    async with running(stage):
        await tried(stage, "d0")
        assert len(stage.dispatcher.flights) == AT_ONCE
        stage.come("p2")
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(stage.dispatcher.flights) == AT_ONCE


async def test_a_probe_is_no_client_that_waits() -> None:
    stage = Stage("p1", "d1")
    async with running(stage):
        await tried(stage, "d1")
        stage.clock.advance(1.0)
        assert concurrency.waiting(stage.dispatcher.flights, stage.table.links, stage.clock.now_s()) == 0


async def test_what_failed_and_is_not_tried_any_more_is_not_looked_at_again_and_again() -> None:
    stage = Stage("d1", disaggregation=Disaggregation.NEVER)
    readiness = stage.readiness
    async with running(stage):
        await tried(stage, "d1")
        (flight,) = stage.dispatcher.flights
        flight.inbox.fail(WorkerLostError("it failed"))
        while not readiness._trials:
            await asyncio.sleep(0.01)
    readiness._mode = Disaggregation.AUTO  # as once a prefill worker is here: alone it is not tried
    stage.come("p1")
    readiness._look()
    readiness._trials = {key: replace(trial, retry_at_s=0.0) for key, trial in readiness._trials.items()}
    assert len(readiness._trials) == 1
    assert readiness._pause_s() == LOOK_S
