"""Events of one request and their times, on the router's monotonic clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.core.admin_schema import Constraint

MAX_MOMENTS = 64
"""Moments of one request: attempts are few, so that this is for requests that something is wrong with."""


@dataclass(slots=True)
class Moment:
    """Something that happened to an attempt: it was "sent", a worker reported a phase, the "first_token" came, it
    "failed", or "moved" to another worker.

    `prefill` and `decode` are the workers that it was planned on then; "" = none.
    """

    attempt: int
    what: str
    at_s: float
    prefill: str
    decode: str
    why: str


@dataclass(slots=True, kw_only=True)  # never changed, but frozen it would take four times as long to make
class RequestTrace:
    """A request's moments. `ended_s` None = it runs. `error` is what its client got, `reason` the last plan's.
    `constraint`: the grammar that the answer follows."""

    request: str
    model: str
    outcome: str
    error: str
    reason: str
    arrived_s: float
    ended_s: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    constraint: Constraint | None
    handoff: Mapping[str, float] | None
    moments: Sequence[Moment]
