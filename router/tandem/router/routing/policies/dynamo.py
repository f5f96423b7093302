"""NVIDIA Dynamo 1.6, mode `kv`: overlap weight × blocks to prefill + blocks to decode, argmin (temperature 0).

Blocks to prefill are those in the worker's queue and those of this prompt that it lacks; blocks to decode those of its
active requests with this one. In prefill/decode mode the prefill worker is chosen by this cost, the decode worker by
load alone (overlap off). Host, disk and shared tiers, which have credits there, do not exist here.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.router.routing.plan import Candidate, Job

OVERLAP_WEIGHT = 1.0
BLOCK_TOKENS = 16


def prefill_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """Blocks."""
    return [OVERLAP_WEIGHT * _prefill_blocks(job, one) + _decode_blocks(job, one) for one in candidates]


def decode_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """Blocks of active requests; the prompt's own are the same everywhere."""
    return [_decode_blocks(job, one) for one in candidates]


def _prefill_blocks(job: Job, one: Candidate) -> float:
    return (one.queued_tokens + max(0, job.prompt_tokens - one.reusable_tokens)) / BLOCK_TOKENS


def _decode_blocks(job: Job, one: Candidate) -> float:
    return max(0, one.total_blocks - one.free_blocks) + job.prompt_tokens / BLOCK_TOKENS
