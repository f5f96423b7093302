"""With any failure and any order of arrival, the client gets each token once, in order, as without failures.

Workers here send tokens of an oracle, and nonsense about attempts that are over. A change of the order of raising
the attempt and cutting the forced tokens, or a dropped fence, makes this fail.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.config import Disaggregation
from tandem.core.errors import CancelledError, CapacityError, InternalError, TandemError, TransferError
from tandem.core.handoff import TokenLogprob
from tandem.core.ids import RequestId, WorkerId
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import FinishReason
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest, InFlightRequest
from tandem.router.workers.proto_convert import TokenChunk
from tandem.rpc.v1 import worker_pb2 as w
from tests.unit.router.stage import Stage

ERRORS: list[TandemError] = [
    TransferError("a link broke"), InternalError("a bug"), CapacityError("full"), CancelledError("registered anew"),
]  # fmt: skip
WORKERS = ("p1", "p2", "d1", "d2")


def oracle(request: str, choice: int, index: int) -> int:
    return random.Random(f"{request} {choice} {index}").randrange(4000)


def length(request: str, choice: int, max_tokens: int) -> int:
    return random.Random(f"{request} {choice}").randint(1, max_tokens)


@dataclass
class Leg:
    """A worker's part of an attempt, and its progress with each choice."""

    submit: w.Submit
    next: dict[int, int] = field(default_factory=dict)
    is_over: bool = False


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        mode = self.rng.choice([Disaggregation.ALWAYS, Disaggregation.AUTO])
        self.stage = Stage(*WORKERS, max_attempts=1000, worker_wait_s=1e6, disaggregation=mode)
        self.legs: dict[str, list[Leg]] = {worker: [] for worker in WORKERS}
        self.prefilled: set[tuple[str, int]] = set()
        self.flights: dict[str, InFlightRequest] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], int] = {}

    # ---- workers ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Workers take in what they were sent."""
        for worker in WORKERS:
            link = self.stage.table.link(WorkerId(worker))
            for message in self.stage.sent(worker) if link is not None else ():
                if message.HasField("submit"):
                    self.legs[worker].append(self._leg(message.submit))
                elif message.HasField("cancel"):
                    for leg in self.legs[worker]:
                        late = leg.submit.attempt <= message.cancel.attempt
                        leg.is_over |= leg.submit.request == message.cancel.request and late

    def _leg(self, submit: w.Submit) -> Leg:
        flight = self.flights[submit.request]
        assert submit.attempt <= flight.attempt
        forced = {state.choice: state for state in submit.forced}
        leg = Leg(submit)
        for choice in range(submit.sampling.n):
            known = list(forced[choice].tokens) if choice in forced else []
            assert known == [oracle(submit.request, choice, i) for i in range(len(known))], "forced another answer"
            whole = length(submit.request, choice, submit.sampling.max_tokens)
            is_done = choice in forced and forced[choice].finish != 0
            assert is_done == (len(known) == whole)
            if not is_done:
                leg.next[choice] = len(known)
        assert leg.next, "nothing is left to compute"
        return leg

    def step(self, worker: str) -> None:
        """Make a token of every choice that the worker can, and send them in any order, some twice."""
        for leg in self.legs[worker]:
            submit, key = leg.submit, (leg.submit.request, leg.submit.attempt)
            if submit.leg == w.LEG_DECODE and key not in self.prefilled:
                continue
            chunks = [self._chunk(leg, choice) for choice in list(leg.next)]
            if submit.leg == w.LEG_DECODE and self.rng.random() < 0.5:
                self.stage.goes_on(worker, *key)
            if submit.leg == w.LEG_PREFILL and chunks:
                self.prefilled.add(key)
                leg.next.clear()
            if leg.is_over:  # a worker that did not learn of the end yet, or lies
                for chunk in chunks:
                    chunk.tokens = [4095]
            chunks += self.rng.sample(chunks, self.rng.randint(0, len(chunks)))
            self.rng.shuffle(chunks)
            self.stage.say(worker, *chunks)

    def _chunk(self, leg: Leg, choice: int) -> TokenChunk:
        submit, index = leg.submit, leg.next[choice]
        forced = {state.choice: len(state.tokens) for state in submit.forced}
        if submit.leg == w.LEG_DECODE and index == forced.get(choice, 0):
            index += 1  # the prefill worker's
        whole = length(submit.request, choice, submit.sampling.max_tokens)
        index = min(index, whole - 1)
        leg.next[choice] = index + 1
        is_last = index + 1 >= whole
        if is_last:
            del leg.next[choice]
        token = oracle(submit.request, choice, index)
        return TokenChunk(
            request=submit.request, attempt=submit.attempt, choice=choice, index=index, tokens=[token],
            logprobs=[TokenLogprob(token=token, logprob=-1.0)], finish=FinishReason.LENGTH if is_last else None,
        )  # fmt: skip

    # ---- trouble ---------------------------------------------------------------------------------------------------

    def disturb(self) -> None:
        worker = self.rng.choice(WORKERS)
        if self.stage.table.link(WorkerId(worker)) is None:
            self.stage.come(worker)
        elif self.rng.random() < 0.4:
            self.stage.go(worker)
            self.legs[worker].clear()
        elif legs := self.legs[worker]:
            leg = self.rng.choice(legs)
            leg.is_over = True
            self.stage.fail(worker, leg.submit.request, leg.submit.attempt, self.rng.choice(ERRORS))

    async def take(self) -> None:
        """The client reads."""
        for request, flight in self.flights.items():
            inbox = flight.inbox
            if not inbox._arrivals:
                continue
            for arrival in await inbox.take():
                got = self.got.setdefault((request, arrival.choice), [])
                assert (request, arrival.choice) not in self.finished, "something after the end"
                for token, logprob in zip(arrival.tokens, arrival.logprobs, strict=True):
                    assert token == logprob.token == oracle(request, arrival.choice, len(got))
                    got.append(token)
                if arrival.finish is not None:
                    self.finished[request, arrival.choice] = len(got)


async def run(seed: int) -> None:
    world = World(seed)
    rng, stage = world.rng, world.stage
    with _fly(world, "a", rng.randint(1, 3)), _fly(world, "b", 1):
        for _ in range(120):
            world.look()
            for worker in rng.sample(WORKERS, rng.randint(0, len(WORKERS))):
                if stage.table.link(WorkerId(worker)) is not None:
                    world.step(worker)
            if rng.random() < 0.3:
                world.disturb()
            if rng.random() < 0.7:
                stage.wake()
            await world.take()
        for worker in WORKERS:  # and now it is quiet
            if stage.table.link(WorkerId(worker)) is None:
                stage.come(worker)
        for _ in range(60):
            stage.wake()
            world.look()
            for worker in WORKERS:
                world.step(worker)
            await world.take()
        for request, flight in world.flights.items():
            assert flight.inbox.error is None
            assert flight.is_finished, f"{request} hangs in {flight.phase}, attempt {flight.attempt}"
            for choice in range(flight.work.sampling.n):
                whole = length(request, choice, flight.work.sampling.max_tokens)
                assert world.finished[request, choice] == whole
    assert not stage.dispatcher.flights
    assert stage.dispatcher.waiting == 0
    assert all(not link.requests and not link.outstanding for link in stage.table.links)


@contextmanager
def _fly(world: World, request: str, n: int) -> Iterator[None]:
    work = GenerationRequest(prompt=list(range(40)), sampling=SamplingParams(max_tokens=12, n=n), timeout_s=600.0)
    with world.stage.dispatcher.submit(RequestId(request), 0, work, ArrivalQueue(1 << 20)) as flight:
        world.flights[request] = flight
        yield


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 1 << 30))
def test_the_client_gets_the_undisturbed_answer(seed: int) -> None:
    asyncio.run(run(seed))
