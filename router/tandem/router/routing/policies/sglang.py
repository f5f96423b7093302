"""sglang-router, `cache_aware`: the longest match if it is long enough, unless loads are out of balance.

    max − min > 64 and max > 1.5 × min     →  fewest requests
    longest match ÷ prompt > 0.3           →  that worker
    else                                   →  fewest requests

Load is requests in flight. Each role has its own policy of this kind. sglang-router approximates cached prefixes by a
tree of what it has routed; here the index knows them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.router.routing.plan import Candidate, Job

ABSOLUTE, RELATIVE, MATCH = 64, 1.5, 0.3


def prefill_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """Load, or minus the tokens that match."""
    return _scores(job, candidates, [one.reusable_tokens for one in candidates])


def decode_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """Load, or minus the tokens that match."""
    return _scores(job, candidates, [one.held_tokens for one in candidates])


def _scores(job: Job, candidates: Sequence[Candidate], held: Sequence[int]) -> list[float]:
    loads = [one.in_flight for one in candidates]
    low, high = min(loads, default=0), max(loads, default=0)
    is_unbalanced = high - low > ABSOLUTE and high > RELATIVE * low
    if not is_unbalanced and max(held, default=0) > MATCH * job.prompt_tokens:
        return [-float(tokens) for tokens in held]
    return [float(load) for load in loads]
