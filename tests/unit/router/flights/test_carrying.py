"""A worker that drains is acknowledged once its hot prefixes are elsewhere, and never later than it has time for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from tandem.core.blockhash import BlockHash
from tandem.core.errors import CapacityError
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.ids import WorkerId
from tandem.core.lifecycle import FinishReason, WorkerState
from tandem.router.flights.carrying import Carrying
from tandem.router.planning.popularity import Popularity
from tandem.router.workers.prefix import PrefixFinder
from tandem.router.workers.wire import GroupBlocks, Load, TokenChunk
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.wire import prompt_from_wire
from tests.unit.router.facts import facts
from tests.unit.router.stage import Stage, in_loop
from tools.waiting import wait_for_async

PROMPT = list(range(1601))
BLOCKS = GroupBlocks(group=0, total=4000, free=4000, cached=0, request=0, pushing=0, reserved=0)


class Holdings:
    """An index: who holds so many leading blocks of everything."""

    def __init__(self, **blocks: int) -> None:
        self.blocks = blocks

    def lookup(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        return {WorkerId(worker): min(blocks, len(hashes)) for worker, blocks in self.blocks.items()}


class Book:
    def __init__(self) -> None:
        self.events: list[ClusterEvent] = []

    async def append(self, events: Sequence[ClusterEvent]) -> None:
        self.events += events


class Scene:
    """m1 holds a prefix of 100 blocks that was asked for three times."""

    def __init__(self, *workers: str) -> None:
        self.stage, self.book = Stage(*workers), Book()
        for link in self.stage.table.links:
            assert link.facts is not None
            link.facts = facts(link.worker, link.facts.role, incarnation=int(link.facts.incarnation))
            link.load = Load(blocks=(BLOCKS,))
        popularity = Popularity(self.stage.clock)
        prefixes = PrefixFinder(Holdings(m1=100), b"", popularity=popularity)
        for _ in range(3):
            popularity.count(b"k")
        self.stage.dispatcher.hot.note(b"k", PROMPT, 1600, b"", "m")
        self.carrying = Carrying(
            self.stage.dispatcher, self.stage.table, prefixes, self.stage.clock, self.book, lambda: 7.0
        )
        self.stage.dispatcher.on_said = self.carrying.on_state

    def tell(self, state: WorkerState, sequence: int = 1, **more: bool) -> None:
        said = w.WorkerState(sequence=sequence, state=state.value, **more)
        self.stage.link("m1")._hear(w.WorkerMessage(state=said))

    def heard(self) -> list[int]:
        """What was acknowledged to m1 so far."""
        return [one.state_heard.sequence for one in self.stage.link("m1")._unsent if one.HasField("state_heard")]

    async def asked(self) -> w.Submit:
        """The request by which m2 fetches."""
        unsent = self.stage.link("m2")._unsent
        await wait_for_async(lambda: any(message.HasField("submit") for message in unsent))
        (submit,) = [message.submit for message in unsent if message.HasField("submit")]
        return submit

    def answer(self, submit: w.Submit, cached_tokens: int = 1600) -> None:
        self.stage.say(
            "m2",
            TokenChunk(
                request=submit.request, attempt=1, choice=0, index=0, tokens=(5,), cached_tokens=cached_tokens,
                finish=FinishReason.LENGTH,
            ),
        )  # fmt: skip


@asynccontextmanager
async def scene(*workers: str) -> AsyncIterator[Scene]:
    found = Scene(*workers)
    run = asyncio.create_task(found.carrying.run())
    await asyncio.sleep(0)
    try:
        yield found
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


@in_loop
async def test_it_is_acknowledged_when_another_has_its_prefix() -> None:
    async with scene("m1", "m2") as s:
        s.tell(WorkerState.DRAINING, sequence=3)
        submit = await s.asked()
        assert s.heard() == []
        assert (submit.leg, len(prompt_from_wire(submit)), submit.sampling.max_tokens) == (w.LEG_FULL, 1601, 1)
        assert [(one.worker.worker, one.tokens) for one in submit.sources] == [("m1", 1600)]
        s.answer(submit)
        await wait_for_async(lambda: s.heard())
        assert s.heard() == [3]
        await wait_for_async(lambda: s.book.events)
        (happened,) = s.book.events
        assert (happened.kind, happened.subject, happened.time_s) == (EventKind.PREFIXES_SAVED, "m1", 7.0)
        assert "1 prefix of it, 204,800 bytes, in 0.00 s" in happened.reason


@in_loop
async def test_its_deadline_ends_the_waiting() -> None:
    async with scene("m1", "m2") as s:
        s.tell(WorkerState.DRAINING, sequence=3)
        submit = await s.asked()
        s.tell(WorkerState.DRAINING, sequence=3, hands_back=True)
        await wait_for_async(lambda: s.heard())
        assert s.heard() == [3]
        cancelled = [one.cancel.request for one in s.stage.link("m2")._unsent if one.HasField("cancel")]
        assert cancelled == [submit.request]
        assert s.book.events == []


@in_loop
async def test_a_worker_that_works_again_is_acknowledged_at_once() -> None:
    async with scene("m1", "m2") as s:
        s.tell(WorkerState.DRAINING, sequence=3)
        await s.asked()
        s.tell(WorkerState.READY, sequence=4)
        assert s.heard() == [4]
        await wait_for_async(lambda: not s.stage.dispatcher.flights)
        assert s.heard() == [4]


@in_loop
async def test_what_cannot_be_fetched_stays_behind() -> None:
    async with scene("m1", "m2") as s:
        s.tell(WorkerState.DRAINING, sequence=3)
        submit = await s.asked()
        s.stage.fail("m2", submit.request, 1, CapacityError("no room"))
        await wait_for_async(lambda: s.heard())
        assert (s.heard(), s.book.events) == ([3], [])


@in_loop
async def test_nobody_is_there_to_take_it() -> None:
    async with scene("m1") as s:
        s.tell(WorkerState.DRAINING, sequence=3)
        await wait_for_async(lambda: s.heard())
        assert s.heard() == [3]


@in_loop
async def test_whoever_keeps_its_blocks_is_not_waited_for() -> None:
    async with scene("m1", "m2") as s:
        s.tell(WorkerState.DRAINING, sequence=3, keeps_blocks=True)
        assert s.heard() == [3]


@in_loop
async def test_what_is_not_asked_for_any_more_is_not_waited_for() -> None:
    async with scene("m1", "m2") as s:
        s.stage.clock.advance(600.0)
        s.tell(WorkerState.DRAINING, sequence=3)
        assert s.heard() == [3]
