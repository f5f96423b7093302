"""Round robin: the default of most public routers. Equal scores take turns."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.router.routing.plan import Candidate, Job


def prefill_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """All equal."""
    return [0.0 for _ in candidates]


def decode_scores(job: Job, candidates: Sequence[Candidate]) -> list[float]:
    """All equal."""
    return [0.0 for _ in candidates]
