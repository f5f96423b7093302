"""Loads for a whole cluster: greedy completions of token ids, sent open-loop. Not a benchmark itself.

They are sent and timed by the code of `clusterctl bench`: tandem.clusterctl.loadgen.client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tandem.clusterctl.loadgen.client import Due, Target, TimedAnswer, complete, send_all

__all__ = ["Due", "TimedAnswer", "ask", "body_of", "check_served", "offer"]

_NONE: Mapping[str, str] = MappingProxyType({})


def body_of(prompt: Sequence[int], tokens: int, model: str = "tandem-tiny", **more: Any) -> dict[str, Any]:
    """A greedy streamed completion of that many tokens."""
    fixed = {"ignore_eos": True, "temperature": 0, "stream": True}
    return {"model": model, "prompt": list(prompt), "max_tokens": tokens, **fixed, **more}


async def ask(
    api: str, body: dict[str, Any], due_s: float, timeout_s: float, headers: Mapping[str, str] = _NONE
) -> TimedAnswer:
    """POST /v1/completions with stream; never raises, an error is part of the answer."""
    return await complete(Target.of(api), body, due_s, timeout_s, headers)


async def offer(api: str, plan: Sequence[Due], timeout_s: float) -> list[TimedAnswer]:
    """Send every request when it is due; returns their answers, in the order of the plan."""
    return await send_all(Target.of(api), plan, timeout_s)


def check_served(answers: Sequence[TimedAnswer], allowed: str = "") -> None:
    """SystemExit if a request failed, but for errors with these words."""
    failed = [answer.error for answer in answers if answer.error and not (allowed and allowed in answer.error)]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(answers)} requests failed, the first with: {failed[0]}")
