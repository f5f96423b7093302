"""Made-up traces for tests and questions that no real trace asks; seeded, so that every run gets the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from tandem.controlplane.simulator.traces import MOONCAKE_BLOCK_TOKENS, RequestLog, TraceRequest

_SPREAD = 0.5
"""Standard deviation of the logarithm of a length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationWorkload:
    """Conversations of growing prompts, after the statistics of Mooncake's conversation trace.

    One block is common to all prompts. A conversation's first prompt is log-normal around `first_tokens`; every further
    turn (`turns` on average) has the one before, its answer and about `more_tokens` new ones. Answers are exponential
    around `output_tokens`. Conversations begin at random; between turns pass about `pause_s`.
    """

    requests: int = 2000
    rate: float = 3.4
    first_tokens: int = 5000
    spread: float = 1.35
    turns: float = 1.6
    more_tokens: int = 1500
    output_tokens: int = 343
    pause_s: float = 60.0
    max_tokens: int = 120_000


def conversations(shape: ConversationWorkload, seed: int) -> RequestLog:
    """Make the trace; see `ConversationWorkload`. The last ones are cut off where `requests` are reached."""
    dice, blocks = random.Random(seed), count(1)  # noqa: S311 - no secrets
    requests: list[TraceRequest] = []
    start_s = 0.0
    while len(requests) < 2 * shape.requests:
        start_s += dice.expovariate(shape.rate / shape.turns)
        requests += _conversation(shape, dice, start_s, blocks)
    first = sorted(requests, key=lambda r: r.arrival_s)[: shape.requests]
    return RequestLog(name=f"conversations-{seed}", requests=tuple(first))


def _conversation(
    shape: ConversationWorkload, dice: random.Random, start_s: float, blocks: Iterator[int]
) -> Iterator[TraceRequest]:
    size, at_s = MOONCAKE_BLOCK_TOKENS, start_s
    tokens, held = int(shape.first_tokens * dice.lognormvariate(0.0, shape.spread)) + size, [0]
    while tokens <= shape.max_tokens:
        output = 1 + min(2000, int(dice.expovariate(1 / shape.output_tokens)))
        full = tokens // size
        held += [next(blocks) for _ in range(full - len(held))]
        partial = [next(blocks)] if tokens % size else []
        yield TraceRequest(arrival_s=at_s, prompt_tokens=tokens, output_tokens=output, blocks=(*held, *partial))
        if dice.random() < 1 / shape.turns:
            return
        at_s += dice.expovariate(1 / shape.pause_s)
        tokens += output + 1 + int(dice.expovariate(1 / shape.more_tokens))


def shared_prompt(
    *, requests: int, rate: float, shared_tokens: int, own_tokens: int, output_tokens: int, seed: int
) -> RequestLog:
    """Make a trace of Poisson arrivals: a common system prompt, then about `own_tokens` tokens of each prompt's own.

    Lengths are exponential, so that requests differ in work.
    """
    dice, blocks, size = random.Random(seed), count(1), MOONCAKE_BLOCK_TOKENS  # noqa: S311 - no secrets
    shared = [next(blocks) for _ in range(shared_tokens // size)]
    made, at_s = [], 0.0
    for _ in range(requests):
        own = 1 + int(dice.expovariate(1 / own_tokens))
        tokens = len(shared) * size + own
        ids = (*shared, *(next(blocks) for _ in range(-(-own // size))))
        output = 1 + min(2000, int(dice.expovariate(1 / output_tokens)))
        made.append(TraceRequest(arrival_s=at_s, prompt_tokens=tokens, output_tokens=output, blocks=ids))
        at_s += dice.expovariate(rate)
    return RequestLog(name=f"shared-prompt-{seed}", requests=tuple(made))


def varied(*, requests: int, rate: float, prompt_tokens: int, output_tokens: int, seed: int) -> RequestLog:
    """Make a trace of Poisson arrivals; nothing is shared. Lengths are log-normal with these means, usually half to
    twice them."""
    dice = random.Random(seed)  # noqa: S311 - no secrets
    made, at_s = [], 0.0
    for _ in range(requests):
        prompt, output = (
            max(1, round(mean * dice.lognormvariate(-_SPREAD * _SPREAD / 2, _SPREAD)))
            for mean in (prompt_tokens, output_tokens)
        )
        made.append(TraceRequest(arrival_s=at_s, prompt_tokens=prompt, output_tokens=output))
        at_s += dice.expovariate(rate)
    return RequestLog(name=f"{rate:g}/s of {prompt_tokens}+{output_tokens} tokens", requests=tuple(made))
