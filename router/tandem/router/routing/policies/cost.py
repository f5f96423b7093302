"""The default policy: one cost in seconds for every pair and for every worker alone; the smallest is taken.

Affinity is part of the cost and nothing else: a cached prefix saves the seconds that computing it takes, and a queue in
front of it costs the seconds that it takes. See docs/routing.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from tandem.core.config import Disaggregation, PolicyName
from tandem.core.state_enums import RoleName
from tandem.router.routing.cost_model import Estimates, Prefill
from tandem.router.routing.plan import Candidate, Job, Plan, chosen, option_of, pairs, single_worker_candidates

TOP = 4
"""So many of the cheapest of each side are paired; of decode workers as many again that hold most of the prompt."""
ALIKE_S = 0.005
"""Costs that differ by less are taken for equal: no estimate is better, and the worker that seems fastest by a hair
would get everything until it has a queue."""
_REASONS = {
    RoleName.MIXED: "a mixed worker costs least",
    RoleName.DECODE: "a decode worker that extends its own prefix costs least",
    RoleName.PREFILL: "one token needs no decode worker",
}
_DECODED_BY_PREFILL = "a prefill worker that writes the answer too costs least"


class CostPolicy:
    """Costs of `Estimates`. Pairs are weighed over the best candidates of each side, so that many workers stay fast."""

    name = PolicyName.COST

    def __init__(self, mode: Disaggregation) -> None:
        self._mode = mode

    def plan(self, job: Job, candidates: Sequence[Candidate]) -> Plan:
        estimates = Estimates(job, candidates)
        alike = 0.0 if job.is_kept_together else ALIKE_S
        alone = _best_prefills(
            estimates, single_worker_candidates(self._mode, job, candidates), alike, estimates.decode_s
        )
        options = [_option(None, worker, estimates, done) for worker, done in alone]
        if job.max_tokens > 1 and self._mode is not Disaggregation.NEVER:
            options += _pairs(estimates, candidates, alike, is_role_a_leaning=self._mode is Disaggregation.AUTO)
        return chosen(self.name, self._mode, options, candidates, alike=alike)


def _pairs(
    estimates: Estimates, candidates: Sequence[Candidate], alike: float, *, is_role_a_leaning: bool
) -> list[Plan]:
    """Pairs, and their prefill workers writing the answers themselves where `is_role_a_leaning`. Without any decode
    worker they do not: an answer waits for one that was lost."""
    decodes = [one for one in candidates if one.role is RoleName.DECODE]
    prefills = [one for one in candidates if one.role is RoleName.PREFILL] if decodes else []
    best_prefills = _best_prefills(estimates, prefills, alike)[:TOP]
    best_decodes = _best_decodes(estimates, decodes)
    options = [
        _option(prefill, decode, estimates, done)
        for prefill, done in best_prefills
        for decode in best_decodes
        if estimates.fits(prefill, decode)
    ]
    if is_role_a_leaning and options:
        options += [_option(None, prefill, estimates, done) for prefill, done in best_prefills]
    # None of the best fit together, perhaps because they serve different models: then all are looked at.
    return options or [_option(p, d, estimates, estimates.prefill(p)) for p, d in pairs(candidates)]


def _best_prefills(
    estimates: Estimates,
    workers: Sequence[Candidate],
    alike: float,
    more_s: Callable[[Candidate], float] = lambda one: 0.0,
) -> list[tuple[Candidate, Prefill]]:
    """The cheapest, best first, exactly weighed among those that might be. `more_s`: what else the choice costs."""
    likely: Sequence[Candidate] = workers
    if len(workers) > 2 * TOP:
        rough = [(estimates.least_prefill_s(one) + more_s(one), one) for one in workers]
        likely = [one for _, one in _by_turns(rough, alike)[: 2 * TOP]]
    weighed = {one.worker: (one, estimates.prefill(one)) for one in likely}
    costs = [(done.total_s + more_s(one), one) for one, done in weighed.values()]
    return [weighed[one.worker] for _, one in _by_turns(costs, alike)]


def _by_turns(costs: Iterable[tuple[float, Candidate]], alike: float) -> list[tuple[float, Candidate]]:
    """Cheapest first; those with a cost above the least by no more than `alike` in turns. The worker that is left out
    later is then not always the same one."""
    found = list(costs)
    limit = min((cost for cost, _ in found), default=0.0) + alike
    return sorted(found, key=lambda pair: (max(pair[0], limit), pair[1].last_used, pair[1].worker))


def _best_decodes(estimates: Estimates, decodes: Sequence[Candidate]) -> list[Candidate]:
    """The cheapest, and those to which least has to be moved."""
    if len(decodes) <= 2 * TOP:
        return list(decodes)
    cost_s = estimates.decode_s
    best = heapq.nsmallest(TOP, decodes, key=lambda one: (cost_s(one), one.last_used, one.worker))
    holders = [one for one in decodes if one.held_tokens]
    most = heapq.nsmallest(TOP, holders, key=lambda one: (-one.held_tokens, cost_s(one), one.last_used))
    return list({one.worker: one for one in (*best, *most)}.values())


def _option(prefill: Candidate | None, decode: Candidate, estimates: Estimates, done: Prefill) -> Plan:
    if prefill is not None:
        cost, reason = estimates.pair(prefill, decode, done), "a pair costs least"
    else:
        cost, reason = estimates.alone(decode, done), _REASONS[decode.role]
        if decode.role is RoleName.PREFILL and estimates.has_answer:
            reason = _DECODED_BY_PREFILL
    return option_of(decode, prefill, reason, cost.total_s, cost)
