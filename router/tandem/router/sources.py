"""Whether the worker that computes a prompt should first fetch what others hold of it. Pure arithmetic over a plan.

fetching   SETUP_S + bytes / measured link speed
computing  tokens / measured prefill rate

The worker that computes is chosen before; here it only learns who can save it work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tandem.core import pairing
from tandem.router.plan import Candidate, Job, Plan, Source

SETUP_S = 0.01
"""Question, offer and ticket, each of which waits for a step in progress."""
ASSUMED_BYTES_PER_S = 100e6
"""Of a link that nobody measured: a gigabit."""
ASSUMED_TOKENS_PER_S = 5000.0
"""Of a worker that has not computed a prompt yet."""
MAX_SOURCES = 3


def with_sources(plan: Plan, job: Job, candidates: Sequence[Candidate]) -> Plan:
    """The plan, with the workers whose blocks come sooner than they are computed, the one that saves most first."""
    wanted = plan.decode if plan.prefill is None else plan.prefill
    chosen = next((one for one in candidates if one.worker == wanted), None)
    if chosen is None:
        return plan
    saved = [(_saved_s(job, chosen, other), other) for other in candidates if other.worker != wanted]
    useful = sorted(((s, other) for s, other in saved if s > 0), key=lambda pair: (-pair[0], pair[1].worker))
    sources = tuple(Source(worker=other.worker, tokens=other.held_tokens) for _, other in useful[:MAX_SOURCES])
    return dataclasses.replace(plan, sources=sources)


def _saved_s(job: Job, chosen: Candidate, other: Candidate) -> float:
    """Seconds by which fetching the prefix from `other` is sooner than computing it; 0 where it cannot be fetched."""
    ours, theirs = chosen.profile, other.profile
    if ours is None or theirs is None or not ours.layout.groups:
        return 0.0
    size = ours.layout.groups[0].block_tokens
    gained = min(other.held_tokens, job.prompt_tokens - 1) // size * size - chosen.reusable_tokens
    if gained <= 0 or pairing.refusal(theirs, ours):
        return 0.0
    speed = other.link_speed(chosen.worker)
    if pairing.lossy_name(theirs, ours, offered=pairing.offers_for(theirs, speed)):
        return 0.0  # what is computed upon it, and handed over, would not be exact
    token_bytes = sum(group.block_bytes() / group.block_tokens for group in ours.layout.groups)
    fetch_s = SETUP_S + gained * token_bytes / (speed or ASSUMED_BYTES_PER_S)
    return gained / (chosen.prefill_rate or ASSUMED_TOKENS_PER_S) - fetch_s
