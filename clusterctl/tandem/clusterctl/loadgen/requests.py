"""Request bodies for an OpenAI endpoint: made-up arrivals and lengths, or those of a trace."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.clusterctl.loadgen.client import Due
from tandem.controlplane.simulator.traces import RequestLog, TraceRequest

_FIRST_TOKEN, _LAST_TOKEN = 300, 4000
"""Ids that every vocabulary has, and that are no control tokens in any we know."""
_WORDS = ("river", "stone", "cloud", "paper", "green", "seven", "music", "table", "light", "north", "bread", "clock")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForm:
    """Format of requests. `is_chat`: messages of words, where others have token ids; about a token a word."""

    model: str
    is_chat: bool = False
    ignores_eos: bool = True
    headers: Mapping[str, str]


def poisson(*, requests: int, rate: float, prompts: Sequence[int], outputs: Sequence[int], seed: int) -> RequestLog:
    """Make requests with Poisson arrivals at `rate` a second, each with one of these lengths; nothing is shared."""
    dice = random.Random(seed)  # noqa: S311 - no secrets
    made, at_s = [], 0.0
    for _ in range(requests):
        made.append(
            TraceRequest(arrival_s=at_s, prompt_tokens=dice.choice(prompts), output_tokens=dice.choice(outputs))
        )
        at_s += dice.expovariate(rate)
    return RequestLog(name=f"poisson-{seed}", requests=tuple(made))


def plan_of(trace: RequestLog, form: RequestForm, seed: int) -> list[Due]:
    """Return the requests as bodies. Blocks that are equal in the trace are equal here."""
    return [
        Due(request.arrival_s, _body(request, trace, form, f"{seed}/{number}"), form.headers)
        for number, request in enumerate(trace.requests)
    ]


def _body(request: TraceRequest, trace: RequestLog, form: RequestForm, own: str) -> dict[str, Any]:
    tokens = _tokens(request, trace.block_tokens, own)
    body: dict[str, Any] = {
        "model": form.model,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if form.ignores_eos:
        body["ignore_eos"] = True
    if form.is_chat:
        words = " ".join(_WORDS[token % len(_WORDS)] for token in tokens)
        return body | {"messages": [{"role": "user", "content": words}]}
    return body | {"prompt": tokens}


def _tokens(request: TraceRequest, block_tokens: int, own: str) -> list[int]:
    """Make a prompt of its length: a block's tokens follow from its id, those outside any block from `own`."""
    found: list[int] = []
    for block in request.blocks:
        found += _drawn(str(block), block_tokens)
    if len(found) < request.prompt_tokens:
        found += _drawn(f"own {own}", request.prompt_tokens - len(found))
    return found[: request.prompt_tokens]


def _drawn(seed: str, count: int) -> list[int]:
    dice = random.Random(seed)  # noqa: S311 - no secrets
    return [dice.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(count)]
