"""Loads of the comparison, the same for every server: streamed completions of token ids, and the times they take.

Prompts are random, so that caches share nothing of them but the prefix that a case gives them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from bench.load import Due, TimedAnswer, ask, body_of, check_served, offer
from tandem.clusterctl.loadgen.client import Target, complete

MODEL = "smollm2"
TIMEOUT_S = 300.0
_FIRST, _LAST = 300, 40_000
"""Range of token ids: ordinary text, no special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests of one kind. Closed loop: each of `clients` sends its next one when the last has ended. Open loop,
    without clients: `rate` a second. Of a prompt all share the first `shared_tokens`, which are in the caches."""

    prompt_tokens: int
    requests: int
    clients: int = 0
    rate: float = 0.0
    shared_tokens: int = 0

    def words(self, tokens: int) -> str:
        """The name in rows, with `tokens` generated."""
        load = f"{self.clients} client{'s' * (self.clients > 1)}" if self.clients else f"{self.rate:g} requests/s"
        shared = f"{self.shared_tokens} shared + " if self.shared_tokens else ""
        return f"{load}, {shared}{self.prompt_tokens} + {tokens} tokens"


CASES = {
    "1x400": Case(clients=1, prompt_tokens=400, requests=6),
    "1x2000": Case(clients=1, prompt_tokens=2000, requests=4),
    "4x400": Case(clients=4, prompt_tokens=400, requests=12),
    "4x2000": Case(clients=4, prompt_tokens=2000, requests=8),
    "16x400": Case(clients=16, prompt_tokens=400, requests=32),
    "16x2000": Case(clients=16, prompt_tokens=2000, requests=16),
    "1xshared": Case(clients=1, prompt_tokens=100, requests=6, shared_tokens=1500),
    "4xshared": Case(clients=4, prompt_tokens=100, requests=12, shared_tokens=1500),
    "open": Case(rate=0.5, prompt_tokens=400, requests=16),
}
SLOTS = max(case.clients for case in CASES.values())
PROMPT_TOKENS = max(case.prompt_tokens + case.shared_tokens for case in CASES.values())


@dataclass(slots=True)
class Figures:
    """Times of a case: milliseconds to each first token, and for each token after it, by request."""

    ttft_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def add(self, answers: Sequence[TimedAnswer], tokens: int) -> None:
        """Add a turn's answers of that many tokens each. An event too many behind the last token changes nothing."""
        self.ttft_ms += [answer.ttft_s * 1000 for answer in answers]
        self.token_ms += [(one.token_s[-1] - one.token_s[0]) * 1000 / (tokens - 1) for one in answers]
        self.tokens += tokens * len(answers)
        self.seconds += max(one.token_s[-1] for one in answers) - min(one.due_s for one in answers)

    def medians(self) -> dict[str, tuple[float, str]]:
        """Metric → value and unit."""
        return {
            "TTFT p50": (statistics.median(self.ttft_ms), "ms"),
            "time per token p50": (statistics.median(self.token_ms), "ms"),
            "tokens": (self.tokens / self.seconds, "tokens/s"),
        }


def prompts(case: Case, seed: int) -> list[list[int]]:
    """The prompts of a turn, after one for the shared prefix if there is one."""
    dice = Random(f"{seed} {case}")

    def ids(count: int) -> list[int]:
        return [dice.randrange(_FIRST, _LAST) for _ in range(count)]

    shared = ids(case.shared_tokens)
    return [shared + ids(case.prompt_tokens) for _ in range(case.requests + bool(shared))]


async def measure(api: str, case: Case, seed: int, tokens: int) -> list[TimedAnswer]:
    """Send the case's requests to a server. SystemExit if one fails."""
    bodies = [body_of(prompt, tokens, MODEL) for prompt in prompts(case, seed)]
    if case.shared_tokens:
        check_served([await ask(api, bodies.pop(0), time.monotonic(), TIMEOUT_S)])
    if case.clients:
        waiting, answers = iter(bodies), []

        async def client() -> None:
            for body in waiting:
                answers.append(await ask(api, body, time.monotonic(), TIMEOUT_S))

        await asyncio.gather(*[client() for _ in range(case.clients)])
    else:
        dice, at_s, plan = Random(seed), 0.0, []
        for body in bodies:
            plan.append(Due(at_s, body))
            at_s += dice.expovariate(case.rate)
        answers = await offer(api, plan, TIMEOUT_S)
    check_served(answers)
    return answers


async def warm(api: str, tokens: int) -> None:
    """Send a short and a long prompt that are not counted. SystemExit if a server makes another number of tokens."""
    for length in (8, PROMPT_TOKENS):
        (prompt,) = prompts(Case(clients=1, prompt_tokens=length, requests=1), -1)
        body = body_of(prompt, tokens, MODEL, stream_options={"include_usage": True})
        answer = await complete(Target.of(api, is_strict=True), body, time.monotonic(), TIMEOUT_S)
        check_served([answer])
        made = (answer.usage or {}).get("completion_tokens")
        if made != tokens:
            raise SystemExit(f"{api} made {made} tokens where {tokens} were asked for")
