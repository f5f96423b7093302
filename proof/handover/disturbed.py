"""Random requests on two small pools, disturbed at random; every answer that ends is the undisturbed one.

Messages between the ranks are delayed, doubled and dropped, links and channels break, workers register anew, requests
are cancelled at one end first. A router that behaves like ours drives them: it cancels failed requests, retries some
with the tokens that it has, and gives up on those without progress.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.core.ids import new_incarnation
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.loopback import Loopback, Rank
from tests.integration.worker.pair import MODEL

MAX_TOKENS = 20
PATIENCE_TURNS = 150
SETTINGS: dict[str, Any] = {"transport": "shm", "is_deterministic": True, "chunk_tokens": 32, "max_model_len": 160}


REQUESTS = 40
POOL_BLOCKS = (13, 16, 32)


@dataclass(frozen=True)
class Outcome:
    """Counts of one seed: requests, attempts of them, those answered whole, breakages on purpose, turns of the
    loops."""

    requests: int
    attempts: int
    completed: int
    breakages: int
    turns: int


@dataclass(frozen=True)
class Ask:
    """A request; prompts share prefixes."""

    tokens: int
    branch: int
    n: int = 1
    seed: int = 0

    @property
    def prompt(self) -> list[int]:
        return [(11 * i * i + 31 * i + (i > 33) * 17 * self.branch) % 4000 + 10 for i in range(self.tokens)]

    @property
    def sampling(self) -> dict[str, Any]:
        return {"n": self.n, "temperature": 1.0 if self.seed else 0.0, "seed": self.seed, "ignore_eos": True}


ASKS = [
    Ask(1, 0), Ask(16, 0), Ask(32, 0), Ask(48, 1), Ask(70, 1), Ask(70, 2), Ask(96, 2), Ask(100, 0),
    Ask(33, 0, n=3, seed=5), Ask(64, 1, n=3, seed=6), Ask(75, 2, n=2, seed=7), Ask(20, 3, n=2),
]  # fmt: skip


def undisturbed(folder: Path) -> dict[Ask, list[list[int]]]:
    """Every request's answer when nothing goes wrong."""
    pair = Loopback(folder, MODEL, **SETTINGS | {"transport": "grpc"})
    for index, ask in enumerate(ASKS):
        pair.submit(f"u{index}", ask.prompt, max_tokens=MAX_TOKENS, **ask.sampling)
        pair.run_until_rest(5000)
    answers = {ask: [pair.tokens(f"u{i}", c) for c in range(ask.n)] for i, ask in enumerate(ASKS)}
    pair.close()
    return answers


@dataclass
class Flight:
    """One request as its router sees it."""

    id: str
    ask: Ask
    expected: list[list[int]]
    max_tokens: int
    stop: tuple[int, ...]
    attempt: int = 1
    got: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: set[int] = field(default_factory=set)
    is_over: bool = False
    idle_turns: int = 0

    def take(self, chunk: w.TokenChunk) -> None:
        got = self.got[chunk.choice]
        assert chunk.index == len(got), "a gap or a repetition"
        assert chunk.choice not in self.finished, "a token after the end"
        got += chunk.tokens
        self.idle_turns = 0
        assert got == self.expected[chunk.choice][: len(got)], "not the undisturbed answer"
        if chunk.finish:
            self.finished.add(chunk.choice)
            assert got == self.expected[chunk.choice], "it ended too soon"

    def forced(self) -> list[g.ChoiceState]:
        return [
            g.ChoiceState(
                choice=choice,
                tokens=tokens,
                finish=g.FINISH_REASON_LENGTH if choice in self.finished else g.FINISH_REASON_UNSPECIFIED,
            )
            for choice, tokens in self.got.items()
        ]


class Disturbed(Loopback):
    """A pair with a router, and trouble drawn from `rng`."""

    def __init__(self, folder: Path, rng: random.Random, answers: dict[Ask, list[list[int]]], **settings: Any) -> None:
        super().__init__(folder, MODEL, **settings)
        self.rng, self.answers = rng, answers
        self.flights: dict[str, Flight] = {}
        self.delayed: list[tuple[int, Rank, e.HostToRank]] = []
        self.cancels: list[tuple[int, Rank, w.Cancel]] = []
        self.turns = 0
        self.trouble = 1.0

    def start(self) -> None:
        ask = self.rng.choice(ASKS)
        max_tokens = self.rng.choice([1, 2, 5, MAX_TOKENS])
        whole = self.answers[ask]
        stop = (self.rng.choice(whole[0][:4]),) if self.rng.random() < 0.3 else ()
        expected = [_cut(tokens[:max_tokens], stop) for tokens in whole]
        flight = Flight(f"r{len(self.flights)}", ask, expected, max_tokens, stop)
        self.flights[flight.id] = flight
        self._send(flight)

    def _send(self, flight: Flight) -> None:
        sampling = flight.ask.sampling | {"max_tokens": flight.max_tokens, "stop_token_ids": flight.stop}
        place: dict[str, Any] = {"attempt": flight.attempt, "is_whole": self.rng.random() < 0.15}
        self.submit(flight.id, flight.ask.prompt, forced=flight.forced(), **place, **sampling)

    def end(self, flight: Flight, lag: int = 0) -> None:
        """The router is done with it: both ends get its cancel, one perhaps later."""
        flight.is_over = True
        cancel = w.Cancel(request=flight.id, attempt=flight.attempt, reason="done")
        ranks = [self.p, self.d]
        self.rng.shuffle(ranks)
        self.cancels += [(self.turns, ranks[0], cancel), (self.turns + lag, ranks[1], cancel)]

    def turn(self) -> None:
        self.turns += 1
        for queue in (self.delayed, self.cancels):
            due = [item for item in queue if item[0] <= self.turns]
            queue[:] = [item for item in queue if item[0] > self.turns]  # type: ignore[misc]
            for _, rank, message in due:
                if isinstance(message, w.Cancel):
                    rank.from_router(cancel=message)
                else:
                    rank.deliver(message)
        super().turn()
        for flight in self.flights.values():
            flight.idle_turns += 1
            if not flight.is_over and flight.idle_turns > PATIENCE_TURNS:
                self.end(flight)

    def carry(self, rank: Rank) -> None:
        other = self.d if rank is self.p else self.p
        said, rank.sent[:] = list(rank.sent), [m for m in rank.sent if not m.HasField("peer")]
        super().carry(rank)
        for message in said:
            if not message.HasField("peer"):
                continue
            stamped = e.FromPeer(
                worker=rank.name, incarnation=rank.incarnation, message=message.peer.message, received_s=0.0
            )
            chance, copies, lag = self.rng.random() / max(self.trouble, 1e-9), 1, 0
            if chance < 0.02:
                copies = 0
            elif chance < 0.06:
                copies = 2
            elif chance < 0.15:
                lag = self.rng.randrange(1, 12)
            for copy in range(copies):
                self.delayed.append((self.turns + lag + 3 * copy, other, e.HostToRank(peer=stamped)))

    def _collect(self, message: w.WorkerMessage) -> None:
        for chunk in message.tokens.chunks:
            flight = self.flights[chunk.request]
            if not flight.is_over and chunk.attempt == flight.attempt:
                flight.take(chunk)
                if len(flight.finished) == flight.ask.n:
                    self.end(flight)
        failed = message.failed
        flight_or_none = self.flights.get(failed.request)
        if flight_or_none is not None and not flight_or_none.is_over and failed.attempt == flight_or_none.attempt:
            self._failed(flight_or_none, failed)

    def _failed(self, flight: Flight, failed: w.RequestFailed) -> None:
        assert failed.code in ("transfer_failed", "cancelled"), failed
        self.end(flight, lag=self.rng.randrange(3))
        if self.rng.random() < 0.7:
            flight.attempt, flight.is_over, flight.idle_turns = flight.attempt + 1, False, 0
            self._send(flight)

    def disturb(self) -> None:
        """Break something now."""
        kind, (rank, other) = self.rng.randrange(4), self.rng.choice([(self.p, self.d), (self.d, self.p)])
        if kind == 0:
            self._channel_breaks(rank, other)
        elif kind == 1:
            for link in list(self.p.sender._links.values()):
                link.close()
        elif kind == 2:
            rank.incarnation = new_incarnation()
            rank.deliver(e.HostToRank(incarnation=e.NewIncarnation(incarnation=rank.incarnation)))
            self._channel_breaks(rank, other)
        else:
            running = [flight for flight in self.flights.values() if not flight.is_over]
            if running:
                self.end(self.rng.choice(running), lag=self.rng.randrange(4))

    def _channel_breaks(self, rank: Rank, other: Rank) -> None:
        self.delayed.clear()
        for one, gone in ((rank, other), (other, rank)):
            one.deliver(e.HostToRank(peer_gone=e.PeerGone(worker=gone.name, reason="a test")))


def _cut(tokens: list[int], stop: tuple[int, ...]) -> list[int]:
    ends = [index + 1 for index, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0]] if ends else tokens


def run_seed(seed: int, folder: Path, answers: dict[Ask, list[list[int]]], transport: str) -> Outcome:
    """One seed: `REQUESTS` requests under trouble, then quiet. Raises AssertionError at the first broken promise."""
    memory = POOL_BLOCKS[seed % len(POOL_BLOCKS)] * 16 * 5120
    settings = SETTINGS | {"transport": transport, "kv_memory_bytes": memory, "max_sequences": 6}
    pair = Disturbed(folder, random.Random(seed), answers, **settings)
    try:
        return _run(pair)
    finally:
        pair.close()


def _run(disturbed: Disturbed) -> Outcome:
    rng, broken = disturbed.rng, 0
    for _ in range(REQUESTS):
        disturbed.start()
        for _ in range(rng.randrange(5)):
            disturbed.turn()
        if rng.random() < 0.25:
            disturbed.disturb()
            broken += 1
    disturbed.trouble = 0.0
    for _ in range(REQUESTS * PATIENCE_TURNS):
        disturbed.turn()
        if disturbed.p.is_at_rest() and disturbed.d.is_at_rest() and not disturbed.delayed and not disturbed.cancels:
            break
    else:
        raise AssertionError("the pair does not come to rest")
    assert all(flight.is_over for flight in disturbed.flights.values())
    completed = [flight for flight in disturbed.flights.values() if len(flight.finished) == flight.ask.n]
    assert len(completed) >= len(disturbed.flights) // 3
    disturbed.p.check_baseline()
    disturbed.d.check_baseline()
    assert disturbed.p.context.receiver.counters()["open"] == disturbed.d.context.receiver.counters()["open"] == 0
    assert disturbed.p.role._quiescing == {}  # type: ignore[attr-defined]
    assert disturbed.d.role._handoffs == {}  # type: ignore[attr-defined]
    attempts = sum(flight.attempt for flight in disturbed.flights.values())
    return Outcome(len(disturbed.flights), attempts, len(completed), broken, disturbed.turns)
