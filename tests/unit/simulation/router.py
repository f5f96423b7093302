"""A small router as ARCHITECTURE §3 has it: announces, submits, cancels, tries again with a raised attempt and the
tokens it has, drops messages of other attempts, and ends each request exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.core.sampling import SamplingParams
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tests.unit.engine.simulation import EOS, VOCAB

TIMEOUT_S = 30.0
RETRIED = frozenset({"transfer_failed", "cancelled", "worker_lost"})
"""Codes after which the model may try again."""
FINAL = frozenset({"deadline_exceeded", "context_length_exceeded"})
"""Codes that it passes on. Any other code is a bug of a worker."""


@dataclass(frozen=True)
class Ask:
    """A client's request. Prompts of one branch share prefixes."""

    tokens: int
    branch: int = 0
    max_tokens: int = 3
    n: int = 1

    @property
    def prompt(self) -> list[int]:
        return [(11 * i * i + 31 * i + (i > 7) * 17 * self.branch) % 4000 + 20 for i in range(self.tokens)]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, n=self.n, temperature=1.0 if self.n > 1 else 0.0, seed=5, ignore_eos=True
        )

    def expected(self, choice: int, groups: int) -> list[int]:
        return expected_tokens(
            self.prompt, self.max_tokens, VOCAB, eos_token_ids=EOS, sampling=self.sampling, choice=choice,
            groups=groups,
        )  # fmt: skip


@dataclass
class Flight:
    """A request as its router sees it."""

    id: str
    ask: Ask
    expected: list[list[int]]
    attempt: int = 0
    sources: tuple[w.WorkerRef, ...] = ()
    legs: dict[str, w.WorkerRef] = field(default_factory=dict)
    got: list[list[int]] = field(default_factory=list)
    early: dict[tuple[int, int], w.TokenChunk] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    unwanted: set[int] = field(default_factory=set)
    """Choices that the client wants no more of."""
    outcome: str = ""

    def take(self, chunk: w.TokenChunk) -> None:
        """In order of index, duplicates dropped; every token is the oracle's."""
        if chunk.choice in self.unwanted:
            return
        if chunk.index < len(self.got[chunk.choice]):
            told = self.got[chunk.choice][chunk.index : chunk.index + 1]
            assert told == list(chunk.tokens), "another token under the same index"
            return
        self.early[chunk.choice, chunk.index] = chunk
        got = self.got[chunk.choice]
        while (due := self.early.pop((chunk.choice, len(got)), None)) is not None:
            assert chunk.choice not in self.finished, "a token after the end"
            got.extend(due.tokens)
            wanted = self.expected[chunk.choice]
            assert got == wanted[: len(got)], f"{self.id}: {got} is not the answer {wanted}"
            if due.finish:
                assert got == wanted, f"{self.id} ended too soon"
                self.finished.add(chunk.choice)

    @property
    def ended(self) -> set[int]:
        return self.finished | self.unwanted

    def forced(self) -> list[g.ChoiceState]:
        def finish(choice: int) -> g.FinishReason.ValueType:
            if choice in self.unwanted:
                return g.FINISH_REASON_STOP
            return g.FINISH_REASON_LENGTH if choice in self.finished else g.FINISH_REASON_UNSPECIFIED

        return [
            g.ChoiceState(choice=choice, tokens=tokens, finish=finish(choice))
            for choice, tokens in enumerate(self.got)
            if tokens or choice in self.unwanted
        ]


class Router:
    """`send(worker, message)` puts a message into the stream to a worker; `replan(flight)` returns where to try a
    failed request again (prefill or None, decode), or None."""

    def __init__(self, groups: int, send: Callable[[str, w.RouterMessage], None]) -> None:
        self._groups, self._send = groups, send
        self.flights: dict[str, Flight] = {}
        self.replan: Callable[[Flight], tuple[w.WorkerRef | None, w.WorkerRef] | None] = lambda flight: None

    @property
    def running(self) -> list[Flight]:
        return [flight for flight in self.flights.values() if not flight.outcome]

    def submit(
        self, ask: Ask, prefill: w.WorkerRef | None, decode: w.WorkerRef, sources: Sequence[w.WorkerRef] = ()
    ) -> Flight:
        expected = [ask.expected(choice, self._groups) for choice in range(ask.n)]
        flight = Flight(f"r{len(self.flights)}", ask, expected, got=[[] for _ in range(ask.n)], sources=tuple(sources))
        self.flights[flight.id] = flight
        self._try(flight, prefill, decode)
        return flight

    def cancel(self, flight: Flight) -> None:
        """The client is gone."""
        self._end(flight, "cancelled")

    def end_choice(self, flight: Flight, choice: int) -> None:
        """The client wants no more of one choice; with the last one the request is over."""
        flight.unwanted.add(choice)
        if len(flight.ended) == flight.ask.n:
            self._end(flight, "finished")
            return
        message = w.EndChoices(request=flight.id, attempt=flight.attempt, choices=[choice])
        for worker in flight.legs:
            self._send(worker, w.RouterMessage(end_choices=message))

    def again(self, flight: Flight) -> None:
        """Plan anew without waiting for a failure (an estimate was too long)."""
        self._retry_or_fail(flight)

    def hear(self, worker: str, message: w.WorkerMessage) -> None:
        for chunk in message.tokens.chunks:
            flight = self.flights.get(chunk.request)
            if flight is None or flight.outcome or chunk.attempt != flight.attempt:
                continue
            flight.take(chunk)
            if len(flight.ended) == flight.ask.n:
                self._end(flight, "finished")
        if message.HasField("failed"):
            failed = message.failed
            assert failed.code in RETRIED | FINAL, failed
            flight = self.flights.get(failed.request)
            if flight is not None and not flight.outcome and failed.attempt == flight.attempt:
                if failed.code in FINAL:
                    self._end(flight, "failed")
                else:
                    self._retry_or_fail(flight)

    def lost(self, worker: str) -> None:
        """The stream to a worker broke."""
        for flight in self.running:
            if worker in flight.legs:
                self._retry_or_fail(flight)

    def _retry_or_fail(self, flight: Flight) -> None:
        plan = self.replan(flight)
        if plan is None:
            self._end(flight, "failed")
            return
        self._cancel_legs(flight)
        self._try(flight, *plan)

    def _try(self, flight: Flight, prefill: w.WorkerRef | None, decode: w.WorkerRef) -> None:
        """The attempt is raised before what is forced is cut; the announcement goes first, on another stream."""
        flight.attempt += 1
        flight.early.clear()
        flight.legs = {ref.worker: ref for ref in (prefill, decode) if ref is not None}
        sampling = flight.ask.sampling
        common: dict[str, Any] = {
            "request": flight.id,
            "attempt": flight.attempt,
            "prompt": flight.ask.prompt,
            "sampling": g.SamplingParams(
                max_tokens=sampling.max_tokens, n=sampling.n, temperature=sampling.temperature, seed=sampling.seed,
                top_p=1.0, repetition_penalty=1.0, ignore_eos=True,
            ),
            "timeout_s": TIMEOUT_S,
            "forced": flight.forced(),
        }  # fmt: skip
        computing = prefill or decode
        sources = [
            w.PrefixSource(worker=ref, tokens=flight.ask.tokens)
            for ref in flight.sources
            if ref.worker != computing.worker
        ]
        if prefill is None:
            self._send(decode.worker, w.RouterMessage(submit=w.Submit(leg=w.LEG_FULL, sources=sources, **common)))
            return
        self._send(decode.worker, w.RouterMessage(submit=w.Submit(leg=w.LEG_DECODE, peer=prefill, **common)))
        submit = w.Submit(leg=w.LEG_PREFILL, peer=decode, sources=sources, **common)
        self._send(prefill.worker, w.RouterMessage(submit=submit))

    def _end(self, flight: Flight, outcome: str) -> None:
        assert not flight.outcome, f"{flight.id} was {flight.outcome} and is now {outcome}"
        flight.outcome = outcome
        self._cancel_legs(flight)

    def _cancel_legs(self, flight: Flight) -> None:
        for worker in flight.legs:
            cancel = w.Cancel(request=flight.id, attempt=flight.attempt, reason="over")
            self._send(worker, w.RouterMessage(cancel=cancel))
