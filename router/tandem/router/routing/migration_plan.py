"""Chooses the worker that takes over a sequence from a draining one with its KV. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core import kv_compatibility
from tandem.core.ids import WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.lifecycle import RoleName
from tandem.router.routing.plan import Candidate, FetchSource, Job, Plan


def plan_migration(
    job: Job, holder: WorkerId, profile: KVProfile, held_tokens: int, candidates: Sequence[Candidate]
) -> Plan | None:
    """Plan that another worker fetches `held_tokens` from `holder` and generates the rest, without a prefill worker:
    computing is left for the last, partial block alone. None if no worker that decodes can take its blocks.

    Workers with room come first, then those with least to do.
    """
    able = [
        one
        for one in candidates
        if one.role is not RoleName.PREFILL
        and one.worker != holder
        and one.profile is not None
        and not kv_compatibility.refusal(profile, one.profile)
    ]
    if not able:
        return None
    chosen = min(able, key=lambda one: (not _has_room(one, job), one.in_flight, one.last_used, one.worker))
    source = FetchSource(worker=holder, tokens=held_tokens)
    return Plan(decode=chosen.worker, prefill=None, reason=f"{holder} drains", sources=(source,))


def _has_room(candidate: Candidate, job: Job) -> bool:
    specs = () if candidate.profile is None else candidate.profile.layout.groups
    return candidate.free_blocks > max((spec.blocks_for(job.prompt_tokens) for spec in specs), default=0)
