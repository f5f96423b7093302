"""A policy that chooses the prefill worker by one score and the decode worker by another, as published routers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.core.config import Disaggregation, PolicyName
from tandem.core.state_enums import RoleName
from tandem.router.routing.plan import Candidate, Job, Plan, chosen, option_of, refusal, single_worker_candidates


class Formula(Protocol):
    """Two pure functions; a module is one, or a `WorkerScore`. Smaller scores are better, equals take turns."""

    def prefill_scores(self, job: Job, candidates: Sequence[Candidate]) -> list[float]:
        """One score a candidate: how good it would be to compute the prompt there."""

    def decode_scores(self, job: Job, candidates: Sequence[Candidate]) -> list[float]:
        """One score a candidate: how good it would be to decode the answer there."""


@dataclass(frozen=True, slots=True)
class WorkerScore:
    """A formula that scores each worker by itself."""

    prefill: Callable[[Job, Candidate], float]
    decode: Callable[[Job, Candidate], float]

    def prefill_scores(self, job: Job, candidates: Sequence[Candidate]) -> list[float]:
        return [self.prefill(job, one) for one in candidates]

    def decode_scores(self, job: Job, candidates: Sequence[Candidate]) -> list[float]:
        return [self.decode(job, one) for one in candidates]


LEAST_LOADED = WorkerScore(lambda _, one: float(one.queued_tokens), lambda _, one: float(one.in_flight))
"""Fewest prompt tokens in the queue; fewest requests to decode. Looks at no prefix."""
ROUND_ROBIN = WorkerScore(lambda _, one: 0.0, lambda _, one: 0.0)
"""The default of most public routers. Equal scores take turns."""
PREFIX_ONLY = WorkerScore(
    lambda job, one: float(job.prompt_tokens - one.reusable_tokens),
    lambda job, one: float(job.prompt_tokens - one.held_tokens),
)
"""The worker that holds most of the prompt, however busy: pure affinity, the upper bound of hit rates. Scores are
prompt tokens that it would compute, or that would be moved to it."""


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
            option_of(one, None, f"{self.name}: one worker", score)
            for one, score in zip(computing, scores, strict=True)
        ]
        best = min(options, key=lambda option: option.order, default=None)
        prefill = next((one for one in crossing if best is not None and one.worker == best.decode), None)
        if prefill is not None:
            options = self._pairs(job, prefill, decodes)
        return chosen(self.name, self._mode, options, candidates)

    def _pairs(self, job: Job, prefill: Candidate, decodes: Sequence[Candidate]) -> list[Plan]:
        able = [other for other in decodes if not refusal(prefill, other)]
        scores = self._formula.decode_scores(job, able)
        return [
            option_of(decode, prefill, f"{self.name}: pair", score) for decode, score in zip(able, scores, strict=True)
        ]
