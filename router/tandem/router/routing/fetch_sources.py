"""Chooses workers from which the one that computes a prompt first fetches cached blocks. Pure arithmetic over a plan.

fetching   FETCH_SETUP_S + bytes / measured link speed
computing  tokens / measured prefill rate

A plan is made with the same estimates (policy `cost`): the choice of the prefill worker has counted possible sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tandem.router.routing.cost_model import Estimates
from tandem.router.routing.plan import Candidate, FetchSource, Job, Plan


def with_sources(plan: Plan, job: Job, candidates: Sequence[Candidate]) -> Plan:
    """Add the workers that deliver blocks sooner than they are computed, the one that saves most first."""
    if not any(one.held_tokens for one in candidates):
        return plan
    wanted = plan.decode if plan.prefill is None else plan.prefill
    chosen = next((one for one in candidates if one.worker == wanted), None)
    if chosen is None:
        return plan
    found = Estimates(job, candidates).sources(chosen)
    sources = tuple(FetchSource(worker=other.worker, tokens=other.held_tokens) for _, other in found)
    return dataclasses.replace(plan, sources=sources)
