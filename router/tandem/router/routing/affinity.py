"""Session affinity: one `prompt_cache_key` prefers the same workers at every router, without any state.

A key has a home among the workers of each role. All other workers are shown to the policy as busier than they are, by
so much work as it is worth to keep the key's requests together. The rest is the policy's own cost.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName
from tandem.router.routing.plan import Candidate

AFFINITY_TOKENS = 2048
"""Prompt tokens to compute that a home may have ahead of others."""
AFFINITY_REQUESTS = 4
"""Requests that a home may serve more than others."""


def with_affinity(key: str, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates as a request with `key` is to see them; an empty key sees them as they are."""
    if not key:
        return candidates
    homes = {_home(key, [c.worker for c in candidates if c.role is role]) for role in RoleName}
    return [candidate if candidate.worker in homes else _penalized(candidate) for candidate in candidates]


def _home(key: str, workers: Sequence[WorkerId]) -> WorkerId | None:
    """By rendezvous hashing: when a worker comes or leaves, no key moves but to it or from it."""
    return max(workers, key=lambda worker: _weight(key, worker), default=None)


def _weight(key: str, worker: WorkerId) -> bytes:
    return hashlib.blake2b(f"{key}\0{worker}".encode(), digest_size=8).digest()


def _penalized(candidate: Candidate) -> Candidate:
    return dataclasses.replace(
        candidate,
        queued_tokens=candidate.queued_tokens + AFFINITY_TOKENS,
        in_flight=candidate.in_flight + AFFINITY_REQUESTS,
    )
