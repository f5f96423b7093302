"""Whether the worker that computes a prompt should first fetch what others hold of it. Pure arithmetic over a plan.

fetching   FETCH_SETUP_S + bytes / measured link speed
computing  tokens / measured prefill rate

A plan is made with the same estimates (policy `cost`): who can be fetched from has counted where the prompt goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tandem.router.routing.cost_model import Estimates
from tandem.router.routing.plan import Candidate, Job, Plan, Source


def with_sources(plan: Plan, job: Job, candidates: Sequence[Candidate]) -> Plan:
    """The plan, with the workers whose blocks come sooner than they are computed, the one that saves most first."""
    if not any(one.held_tokens for one in candidates):
        return plan
    wanted = plan.decode if plan.prefill is None else plan.prefill
    chosen = next((one for one in candidates if one.worker == wanted), None)
    if chosen is None:
        return plan
    found = Estimates(job, candidates).sources(chosen)
    sources = tuple(Source(worker=other.worker, tokens=other.held_tokens) for _, other in found)
    return dataclasses.replace(plan, sources=sources)
