"""llm-d router, its default profile: a weighted sum of scorers in [0, 1], the greatest wins (max-score picker).

    2 × queue     1 for the shortest queue of waiting requests, 0 for the longest
    2 × kv-util   the part of the KV blocks that is free
    3 × prefix    the part of the prompt's blocks that the worker holds

The same profile picks the decode worker and the prefill worker, each on its own. Scores here are negative sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.router.routing.plan import Candidate, Job

QUEUE_WEIGHT, KV_WEIGHT, PREFIX_WEIGHT = 2.0, 2.0, 3.0


def prefill_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """Minus the weighted sums."""
    held = [one.reusable_tokens for one in candidates]
    return _scores(job, candidates, held)


def decode_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """Minus the weighted sums."""
    held = [one.held_tokens for one in candidates]
    return _scores(job, candidates, held)


def _scores(job: Job, candidates: Sequence[Candidate], held: Sequence[int]) -> list[float]:
    waiting = [one.queued_requests for one in candidates]
    low, high = min(waiting, default=0), max(waiting, default=0)
    return [
        -QUEUE_WEIGHT * ((high - queued) / (high - low) if high > low else 1.0)
        - KV_WEIGHT * (one.free_blocks / one.total_blocks if one.total_blocks else 1.0)
        - PREFIX_WEIGHT * min(1.0, tokens / max(1, job.prompt_tokens))
        for one, queued, tokens in zip(candidates, waiting, held, strict=True)
    ]
