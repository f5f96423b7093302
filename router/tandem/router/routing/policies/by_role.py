"""A policy that chooses the prefill worker by one score and the decode worker by another, as published routers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.core.config import Disaggregation, PolicyName
from tandem.core.lifecycle import RoleName
from tandem.router.routing.plan import Candidate, Job, Option, Plan, chosen, refusal, single_worker_candidates


class Formula(Protocol):
    """Two pure functions; a module is one. Smaller scores are better, equals take turns."""

    def prefill_scores(self, job: Job, candidates: Sequence[Candidate]) -> list[float]:
        """One score a candidate: how good it would be to compute the prompt there."""

    def decode_scores(self, job: Job, candidates: Sequence[Candidate]) -> list[float]:
        """One score a candidate: how good it would be to decode the answer there."""


class ByRole:
    """Prefill and mixed workers compete by `prefill_scores`; a prefill worker that wins gets the decode worker that is
    best by `decode_scores`. Decode workers compute prompts only where no other can."""

    def __init__(self, name: PolicyName, mode: Disaggregation, formula: Formula) -> None:
        self.name, self._mode, self._formula = name, mode, formula

    def plan(self, job: Job, candidates: Sequence[Candidate]) -> Plan:
        alone = single_worker_candidates(self._mode, job, candidates)
        able = [one for one in alone if one.role is not RoleName.DECODE]
        decodes = [one for one in candidates if one.role is RoleName.DECODE]
        crossing: list[Candidate] = []
        if job.max_tokens > 1 and self._mode is not Disaggregation.NEVER:
            prefills = (one for one in candidates if one.role is RoleName.PREFILL)
            crossing = [one for one in prefills if any(not refusal(one, other) for other in decodes)]
        computing = [*able, *crossing] or alone
        scores = self._formula.prefill_scores(job, computing)
        options = [
            Option(decode=one, prefill=None, reason=f"{self.name}: one worker", score=score)
            for one, score in zip(computing, scores, strict=True)
        ]
        best = min(options, key=lambda option: option.order, default=None)
        if best is not None and any(best.decode is one for one in crossing):
            options = self._pairs(job, best.decode, decodes)
        return chosen(self.name, self._mode, options, candidates)

    def _pairs(self, job: Job, prefill: Candidate, decodes: Sequence[Candidate]) -> list[Option]:
        able = [other for other in decodes if not refusal(prefill, other)]
        scores = self._formula.decode_scores(job, able)
        return [
            Option(decode=decode, prefill=prefill, reason=f"{self.name}: pair", score=score)
            for decode, score in zip(able, scores, strict=True)
        ]
