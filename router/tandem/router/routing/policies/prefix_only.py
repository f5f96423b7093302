"""The worker that holds most of the prompt, however busy: pure affinity, the upper bound of hit rates."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.router.routing.plan import Candidate, Job


def prefill_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """Prompt tokens that it would compute."""
    return [float(job.prompt_tokens - one.reusable_tokens) for one in candidates]


def decode_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """Prompt tokens that would be moved to it."""
    return [float(job.prompt_tokens - one.held_tokens) for one in candidates]
