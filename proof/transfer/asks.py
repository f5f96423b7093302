"""Requests as their router sees them: every token is the oracle's, each comes once, each request ends once."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w

VOCAB, EOS = 4096, (1,)


@dataclass
class Ask:
    """One request. `got`: tokens in order, over all attempts. `phases`: (worker, phase) → when."""

    id: str
    prompt: list[int]
    max_tokens: int
    leg: Any = w.LEG_DECODE
    attempt: int = 1
    got: list[int] = field(default_factory=list)
    early: dict[int, int] = field(default_factory=dict)
    phases: dict[tuple[str, str], float] = field(default_factory=dict)
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    finished: set[tuple[str, int]] = field(default_factory=set)
    ended_s: float | None = None
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.expected = expected_tokens(self.prompt, self.max_tokens, VOCAB, eos_token_ids=EOS)

    def submit(self, leg: Any, peer: w.WorkerRef | None) -> w.Submit:
        """A request for one worker, with the tokens of earlier attempts as forced ones."""
        sampling = g.SamplingParams(
            max_tokens=self.max_tokens, n=1, temperature=0.0, top_p=1.0, repetition_penalty=1.0, ignore_eos=True
        )
        forced = [g.ChoiceState(choice=0, tokens=self.got)] if self.got else []
        return w.Submit(
            request=self.id, attempt=self.attempt, leg=leg, peer=peer, prompt=self.prompt, sampling=sampling,
            timeout_s=60, forced=forced,
        )  # fmt: skip

    def try_again(self) -> None:
        """Begin the next attempt: tokens of an older one are dropped from now on."""
        self.attempt += 1
        self.early.clear()
        self.phases.clear()
        self.ended_s = None

    def take(self, worker: str, chunk: w.TokenChunk) -> None:
        where = f"{self.id} attempt {chunk.attempt} from {worker}"
        if (worker, chunk.attempt) in self.failed:
            self.violations.append(f"{where}: a token after it failed")
        for offset, token in enumerate(chunk.tokens):
            index = chunk.index + offset
            if index >= self.max_tokens or token != self.expected[index]:
                self.violations.append(f"{where}: token {index} is {token}, not what the prompt says")
                continue
            if chunk.attempt != self.attempt:
                continue
            if index in self.early or index < len(self.got):
                self.violations.append(f"{where}: token {index} came twice")
            self.early[index] = token
        while len(self.got) in self.early:
            self.got.append(self.early.pop(len(self.got)))
        if chunk.finish:
            if (worker, chunk.attempt) in self.finished:
                self.violations.append(f"{where}: finished twice")
            self.finished.add((worker, chunk.attempt))
        if len(self.got) == self.max_tokens and self.ended_s is None:
            self.ended_s = time.monotonic()

    def fail(self, worker: str, failed: w.RequestFailed) -> None:
        key = (worker, failed.attempt)
        if key in self.failed or (key in self.finished and failed.code != "cancelled"):
            self.violations.append(f"{self.id}: {worker} ended attempt {failed.attempt} twice: {failed.message}")
        self.failed[key] = failed.code
        if failed.attempt == self.attempt and self.ended_s is None:
            self.ended_s = time.monotonic()

    @property
    def is_whole(self) -> bool:
        return len(self.got) == self.max_tokens

    def state(self) -> str:
        """The furthest phase of the current attempt that either worker reported."""
        for phase in ("decode", "transfer", "prefill", "queued"):
            if any(said == phase for _, said in self.phases):
                return phase
        return "sent"


def draw_prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(10, VOCAB) for _ in range(tokens)]
