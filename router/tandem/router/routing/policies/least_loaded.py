"""Fewest prompt tokens in the queue; fewest requests to decode. Looks at no prefix."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.router.routing.plan import Candidate, Job


def prefill_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """Queued tokens."""
    return [float(one.queued_tokens) for one in candidates]


def decode_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """Requests in flight."""
    return [float(one.in_flight) for one in candidates]
