"""Test migrations of requests and of prefixes."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager

from tandem.core.block_hash import BlockHash
from tandem.core.clock import ManualClock
from tandem.core.errors import CapacityError
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.ids import RequestId, WorkerId, new_request_id
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import FinishReason, WorkerState
from tandem.router.dispatch.drain_prefix_migration import PrefixMigration
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest
from tandem.router.dispatch.migration import MigrationQueue
from tandem.router.routing.observed_traffic import Popularity
from tandem.router.workers.connection import WorkerLink
from tandem.router.workers.prefix_lookup import PrefixFinder
from tandem.router.workers.proto_convert import BlockCounts, ReportedLoad, TokenChunk
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.proto_convert import prompt_from_wire
from tests.unit.router.facts import facts
from tests.unit.router.stage import Stage, chunk, work
from tools.waiting import wait_for_async

R = RequestId("r")


def tell(stage: Stage, worker: str, state: WorkerState, *, hands_back: bool = False, sequence: int = 1) -> None:
    """The worker reports so over its stream."""
    said = w.WorkerState(sequence=sequence, state=state.value, hands_back=hands_back)
    stage.link(worker)._hear(w.WorkerMessage(state=said))


def kinds(messages: list[w.RouterMessage]) -> list[str | None]:
    return [message.WhichOneof("kind") for message in messages]


async def test_nothing_is_planned_on_a_worker_that_drains_until_it_is_ready_again() -> None:
    stage = Stage("p1", "d1", "d2")
    tell(stage, "d1", WorkerState.DRAINING)
    for number in range(4):
        with stage.dispatcher.submit(RequestId(f"r{number}"), 0, work(), ArrivalQueue(1 << 20)) as flight:
            assert flight.plan.decode == "d2"
    assert [link.worker for link in stage.table.usable()] == ["p1", "d2"]
    tell(stage, "d1", WorkerState.DRAINED)
    assert [link.worker for link in stage.table.usable()] == ["p1", "d2"]
    tell(stage, "d1", WorkerState.READY)
    assert [link.worker for link in stage.table.usable()] == ["p1", "d1", "d2"]


async def test_nothing_is_planned_on_a_worker_whose_step_does_not_end_and_what_it_has_stays() -> None:
    stage = Stage("p1", "d1", "d2")
    with stage.dispatcher.submit(R, 0, work(), ArrivalQueue(1 << 20)) as flight:
        decode = flight.plan.decode
        assert decode is not None
        other = "d2" if decode == "d1" else "d1"
        stage.sent(decode)
        tell(stage, decode, WorkerState.STALLED, sequence=0)
        assert [link.worker for link in stage.table.usable()] == ["p1", other]
        assert stage.sent(decode) == [], "it is neither cancelled nor handed back"
        tell(stage, decode, WorkerState.READY, sequence=0)
        assert [link.worker for link in stage.table.usable()] == ["p1", "d1", "d2"]


async def test_a_state_is_acknowledged_behind_what_was_sent_before() -> None:
    stage = Stage("p1", "d1")
    with stage.dispatcher.submit(R, 0, work(), ArrivalQueue(1 << 20)):
        tell(stage, "d1", WorkerState.DRAINING, sequence=7)
        messages = stage.sent("d1")
        assert kinds(messages) == ["submit", "state_heard"]
        assert messages[1].state_heard.sequence == 7


async def test_a_request_stays_where_it_is_while_its_worker_drains() -> None:
    stage = Stage("p1", "d1", "d2")
    with stage.dispatcher.submit(R, 0, work(), ArrivalQueue(1 << 20)) as flight:
        decode = flight.plan.decode
        stage.say("p1", chunk(0, 0, 10), chunk(1, 0, 20))
        stage.goes_on(decode, "r", 1)
        stage.sent(decode)
        tell(stage, decode, WorkerState.DRAINING)
        stage.dispatcher.sweep()
        assert (flight.attempt, flight.plan.decode) == (1, decode)
        assert kinds(stage.sent(decode)) == ["state_heard"]


async def test_a_sequence_that_is_handed_back_goes_on_from_the_blocks_that_are_there() -> None:
    stage = Stage("p1", "d1", "d2")
    with stage.dispatcher.submit(R, 0, work(n=1), ArrivalQueue(1 << 20)) as flight:
        first = flight.plan.decode
        other = "d2" if first == "d1" else "d1"
        stage.say("p1", chunk(0, 0, 10))
        stage.goes_on(first, "r", 1)
        stage.say(first, chunk(0, 1, 11))
        for worker in ("p1", "d1", "d2"):
            stage.sent(worker)
        tokens = stage.retry_policy.budget.tokens
        tell(stage, first, WorkerState.DRAINING, hands_back=True)
        assert flight.attempt == 2
        assert (flight.history.failures, flight.history.suspects) == (0, set())
        assert stage.retry_policy.budget.tokens == tokens
        assert kinds(stage.sent(first)) == ["state_heard", "cancel"]
        assert stage.sent("p1") == []
        (submit,) = stage.submitted(other)
        assert (submit.leg, submit.attempt) == (w.LEG_FULL, 2)
        assert [list(state.tokens) for state in submit.forced] == [[10, 11]]
        ((source, tokens_there),) = [(source.worker.worker, source.tokens) for source in submit.sources]
        assert (source, tokens_there) == (first, 3 + 2)
        stage.say(first, chunk(0, 2, 12))
        stage.say(other, chunk(0, 2, 12, attempt=2))
        assert flight.output_tokens == 3
    assert stage.meter.counts["again moved"] == 1
    assert stage.meter.counts["dropped unknown"] == 1


async def test_a_machine_on_which_it_was_lost_after_a_move_is_remembered() -> None:
    stage = Stage("p1", "d1", "d2")
    with stage.dispatcher.submit(R, 0, work(n=1), ArrivalQueue(1 << 20)) as flight:
        first = flight.plan.decode
        other = "d2" if first == "d1" else "d1"
        stage.say("p1", chunk(0, 0, 10))
        stage.goes_on(first, "r", 1)
        stage.say(first, chunk(0, 1, 11))
        tell(stage, first, WorkerState.DRAINING, hands_back=True)
        assert flight.plan.workers == (other,)
        stage.go(other)
        assert flight.history.lost_on == {"here": 1}


async def test_of_several_choices_the_prompt_is_fetched() -> None:
    stage = Stage("p1", "d1", "d2")
    with stage.dispatcher.submit(R, 0, work(n=2), ArrivalQueue(1 << 20)) as flight:
        first = flight.plan.decode
        stage.say("p1", chunk(0, 0, 10), chunk(1, 0, 20))
        stage.goes_on(first, "r", 1)
        tell(stage, first, WorkerState.DRAINING, hands_back=True)
        (submit,) = [s for s in stage.submitted("d2" if first == "d1" else "d1") if s.attempt == 2]
        assert [source.tokens for source in submit.sources] == [3]
        assert flight.attempt == 2


async def test_where_nobody_can_take_it_it_goes_on_where_it_is_until_somebody_comes() -> None:
    stage = Stage("p1", "d1")
    with stage.dispatcher.submit(R, 0, work(n=1), ArrivalQueue(1 << 20)) as flight:
        stage.say("p1", chunk(0, 0, 10))
        stage.goes_on("d1", "r", 1)
        tell(stage, "d1", WorkerState.DRAINING, hands_back=True)
        stage.dispatcher.sweep()
        stage.say("d1", chunk(0, 1, 11))
        assert (flight.attempt, flight.output_tokens, flight.inbox.error) == (1, 2, None)
        stage.come("d2")
        stage.dispatcher.sweep()
        assert (flight.attempt, flight.plan.decode) == (2, "d2")


async def test_a_prompt_that_is_handed_back_is_planned_anew_with_what_was_computed_of_it() -> None:
    stage = Stage("p1", "p2", "d1")
    with stage.dispatcher.submit(R, 0, work(n=1), ArrivalQueue(1 << 20)) as flight:
        first = flight.plan.prefill
        assert first is not None
        other = "p2" if first == "p1" else "p1"
        for worker in ("p1", "p2", "d1"):
            stage.sent(worker)
        tell(stage, first, WorkerState.DRAINING, hands_back=True)
        assert (flight.attempt, flight.plan.prefill, flight.plan.decode) == (2, other, "d1")
        (submit,) = stage.submitted(other)
        assert [(source.worker.worker, source.tokens) for source in submit.sources] == [(first, 3)]


async def test_what_waited_for_a_worker_goes_on_when_one_is_ready_again() -> None:
    stage = Stage("p1", "d1", "d2", worker_wait_s=30.0)
    tell(stage, "d2", WorkerState.DRAINING)
    stage.go("d1")
    with stage.dispatcher.submit(R, 0, work(), ArrivalQueue(1 << 20)) as flight:
        assert stage.dispatcher.waiting == 1
        tell(stage, "d2", WorkerState.READY)
        assert (stage.dispatcher.waiting, flight.plan.decode) == (0, "d2")


async def test_a_move_that_breaks_does_not_stop_the_others() -> None:
    """Sequences that are still there are shown again at the next look."""
    stage, requests = Stage("p1", "d1"), {RequestId(f"r{number}") for number in range(3)}
    shown: list[RequestId] = []
    broken: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))

    def move(link: WorkerLink, request: RequestId) -> None:
        shown.append(request)
        if len(shown) == 2:
            raise RuntimeError("a bug")

    with ExitStack() as flights:
        for request in requests:
            flights.enter_context(stage.dispatcher.submit(request, 0, work(n=1), ArrivalQueue(1 << 20)))
        tell(stage, "d1", WorkerState.DRAINING, hands_back=True)
        handed_back = MigrationQueue(move, spacing_s=0.0)
        handed_back.add(stage.link("d1"))
        await wait_for_async(lambda: bool(broken))
        handed_back.look_again([stage.link("d1")])
        await wait_for_async(lambda: set(shown[2:]) == requests)


PROMPT, OTHER = list(range(1601)), list(range(2000, 3601))
BLOCKS = BlockCounts(group=0, total=4000, free=4000, cached=0, request=0, pushing=0, reserved=0)


class Holdings:
    """An index: the holders of so many leading blocks of everything."""

    def __init__(self, **blocks: int) -> None:
        self.blocks = blocks

    def lookup(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        return {WorkerId(worker): min(blocks, len(hashes)) for worker, blocks in self.blocks.items()}


class Book:
    def __init__(self) -> None:
        self.events: list[ClusterEvent] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def append(self, events: Sequence[ClusterEvent]) -> None:
        await self.answers.wait()
        self.events += events


class Scene:
    """m1 holds all of `prompts`, 100 blocks each, which were asked for three times, the last one last."""

    def __init__(self, *workers: str, prompts: Sequence[list[int]] = (PROMPT,)) -> None:
        self.stage, self.book = Stage(*workers, finder=finder), Book()
        for link in self.stage.table.links:
            assert link.facts is not None
            link.facts = facts(link.worker, link.facts.role, incarnation=int(link.facts.incarnation))
            link.load = ReportedLoad(blocks=(BLOCKS,))
        for prompt in prompts:
            for _ in range(3):
                self.ask(prompt)
        for name in workers:
            self.stage.sent(name)
        self.carrying = PrefixMigration(
            self.stage.dispatcher, self.stage.table, self.stage.prefixes, self.stage.clock, self.book, lambda: 7.0
        )
        self.stage.dispatcher.on_state_change = self.carrying.on_state

    def ask(self, prompt: list[int]) -> None:
        """A client asks, and goes away."""
        work = GenerationRequest(prompt=prompt, sampling=SamplingParams(max_tokens=1), timeout_s=60.0, model="m")
        with self.stage.dispatcher.submit(new_request_id("r"), 0, work, ArrivalQueue(1 << 20)):
            pass

    def followers(self) -> list[tuple[bytes, float]]:
        """Return the followers of every remembered prefix, the last first."""
        hot = self.stage.dispatcher.hot.latest("m")
        return [(one.key, self.stage.prefixes.followers(one.key)) for one in hot]

    def tell(self, state: WorkerState, sequence: int = 1, **more: bool) -> None:
        said = w.WorkerState(sequence=sequence, state=state.value, **more)
        self.stage.link("m1")._hear(w.WorkerMessage(state=said))

    def heard(self) -> list[int]:
        """Return the sequence numbers of m1's states acknowledged so far."""
        return [one.state_heard.sequence for one in self.stage.link("m1")._unsent if one.HasField("state_heard")]

    def fetches(self) -> list[w.Submit]:
        """The requests by which m2 fetches, so far."""
        return [message.submit for message in self.stage.link("m2")._unsent if message.HasField("submit")]

    async def asked(self, count: int = 1) -> w.Submit:
        """The last of so many fetches."""
        await wait_for_async(lambda: len(self.fetches()) == count)
        return self.fetches()[-1]

    def answer(self, submit: w.Submit, cached_tokens: int = 1600) -> None:
        self.stage.say(
            "m2",
            TokenChunk(
                request=submit.request, attempt=1, choice=0, index=0, tokens=(5,), cached_tokens=cached_tokens,
                finish=FinishReason.LENGTH,
            ),
        )  # fmt: skip


def finder(clock: ManualClock) -> PrefixFinder:
    return PrefixFinder(Holdings(m1=100), b"", popularity=Popularity(clock))


@asynccontextmanager
async def scene(*workers: str, prompts: Sequence[list[int]] = (PROMPT,)) -> AsyncIterator[Scene]:
    found = Scene(*workers, prompts=prompts)
    run = asyncio.create_task(found.carrying.run())
    await asyncio.sleep(0)
    try:
        yield found
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


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


async def test_a_worker_that_works_again_is_acknowledged_at_once() -> None:
    async with scene("m1", "m2") as s:
        s.tell(WorkerState.DRAINING, sequence=3)
        await s.asked()
        s.tell(WorkerState.READY, sequence=4)
        assert s.heard() == [4]
        await wait_for_async(lambda: not s.stage.dispatcher.flights)
        assert s.heard() == [4]


async def test_what_cannot_be_fetched_stays_behind() -> None:
    async with scene("m1", "m2") as s:
        s.tell(WorkerState.DRAINING, sequence=3)
        submit = await s.asked()
        s.stage.fail("m2", submit.request, 1, CapacityError("no room"))
        await wait_for_async(lambda: s.heard())
        assert (s.heard(), s.book.events) == ([3], [])


async def test_nobody_is_there_to_take_it() -> None:
    async with scene("m1") as s:
        s.tell(WorkerState.DRAINING, sequence=3)
        await wait_for_async(lambda: s.heard())
        assert s.heard() == [3]


async def test_whoever_keeps_its_blocks_is_not_waited_for() -> None:
    async with scene("m1", "m2") as s:
        s.tell(WorkerState.DRAINING, sequence=3, keeps_blocks=True)
        assert s.heard() == [3]


async def test_what_is_not_asked_for_any_more_is_not_waited_for() -> None:
    async with scene("m1", "m2") as s:
        s.stage.clock.advance(600.0)
        s.tell(WorkerState.DRAINING, sequence=3)
        assert s.heard() == [3]


async def test_what_is_saved_is_not_asked_for() -> None:
    """Else a prefix would stay hot by being saved, drain after drain."""
    async with scene("m1", "m2", prompts=(PROMPT, OTHER)) as s:
        before = s.followers()
        assert [count for _, count in before] == [3.0, 3.0]
        s.tell(WorkerState.DRAINING, sequence=3)
        s.answer(await s.asked())
        s.answer(await s.asked(2))
        await wait_for_async(lambda: s.heard())
        assert s.followers() == before


async def test_nothing_is_saved_after_what_could_not_be_fetched() -> None:
    """The worker that was to fetch it computed all of it; it is not made to do so again."""
    async with scene("m1", "m2", prompts=(PROMPT, OTHER)) as s:
        s.tell(WorkerState.DRAINING, sequence=3)
        s.answer(await s.asked(), cached_tokens=0)
        await wait_for_async(lambda: s.heard())
        assert (s.heard(), len(s.fetches()), s.book.events) == ([3], 1, [])


async def test_a_slow_book_delays_no_drain() -> None:
    """Saved prefixes are acknowledged, and the next drain saves again; both are entered into the book."""
    async with scene("m1", "m2") as s:
        s.book.answers.clear()
        s.tell(WorkerState.DRAINING, sequence=3)
        s.answer(await s.asked())
        await wait_for_async(lambda: s.heard())
        s.tell(WorkerState.READY, sequence=4)
        s.tell(WorkerState.DRAINING, sequence=5)
        s.answer(await s.asked(2))
        await wait_for_async(lambda: len(s.heard()) == 3)
        assert (s.heard(), s.book.events) == ([3, 4, 5], [])
        s.book.answers.set()
        await wait_for_async(lambda: len(s.book.events) == 2)


async def test_the_book_hears_of_what_was_saved_before_the_rest_was_cut() -> None:
    async with scene("m1", "m2", prompts=(PROMPT, OTHER)) as s:
        s.tell(WorkerState.DRAINING, sequence=3)
        s.answer(await s.asked())
        await s.asked(2)
        s.tell(WorkerState.DRAINING, sequence=3, hands_back=True)
        await wait_for_async(lambda: s.book.events)
        assert s.heard() == [3]
        (happened,) = s.book.events
        assert "1 prefix of it" in happened.reason


async def test_a_worker_that_drains_again_at_once_is_waited_for() -> None:
    """The first saving has not ended by then; the second one is what the acknowledgement waits for."""
    async with scene("m1", "m2") as s:
        s.tell(WorkerState.DRAINING, sequence=3)
        await s.asked()
        s.tell(WorkerState.READY, sequence=4)
        s.tell(WorkerState.DRAINING, sequence=5)
        submit = await s.asked(2)
        assert s.heard() == [4]
        s.answer(submit)
        await wait_for_async(lambda: len(s.heard()) == 2)
        assert s.heard() == [4, 5]


async def test_a_turn_of_a_conversation_is_not_remembered() -> None:
    """No other request has begun with it; a worker that leaves leaves it behind."""
    async with scene("m1", "m2") as s:
        s.ask(OTHER)
        assert len(s.followers()) == 1
        s.ask(OTHER)
        assert len(s.followers()) == 2
