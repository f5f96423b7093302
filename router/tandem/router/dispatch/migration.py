"""Requests that a draining worker hands back, and where they go on: on the same worker until another one takes them.

A move is no failure: it suspects no worker and is not counted against the request's attempts, nor the retry budget.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tandem.core import kv_compatibility
from tandem.core.ids import RequestId, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.state_enums import Phase, RoleName
from tandem.router.dispatch.inflight_request import InFlightRequest
from tandem.router.routing.plan import Candidate, FetchSource, Job, Plan
from tandem.router.workers.connection import WorkerLink

REASON = "the worker drains"
CAUSE = "moved"
"""As the metric of attempts names it."""


class MigrationQueue:
    """Requests handed back by draining workers, shown to `move` one by one: planning all at once would stop the event
    loop."""

    def __init__(self, move: Callable[[WorkerLink, RequestId], None], spacing_s: float) -> None:
        self._move, self._spacing_s = move, spacing_s
        self._queue: deque[tuple[WorkerLink, RequestId]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, link: WorkerLink) -> None:
        """Queue all requests of a worker that hands them back."""
        self._queue.extend((link, RequestId(request)) for request in link.requests)
        if self._timer is None:
            self._next()

    def look_again(self, links: Iterable[WorkerLink]) -> None:
        """Retry those that no worker could take before."""
        if self._timer is None:
            for link in links:
                if link.hands_back and link.requests:
                    self.add(link)

    def _next(self) -> None:
        self._timer = None
        while self._queue:
            link, request = self._queue.popleft()
            if link.hands_back and request in link.requests:
                self._move(link, request)
                break
        if self._queue:
            self._timer = asyncio.get_running_loop().call_later(self._spacing_s, self._next)


def plan_move(
    flight: InFlightRequest,
    link: WorkerLink,
    job: Job,
    candidates: Sequence[Candidate],
    plan_anew: Callable[[], Plan | None],
) -> Plan | None:
    """Plan how `flight` goes on without `link`, which fed or decoded it; None = no other worker can.

    The worker that decoded it has all of its KV: it is fetched from there. Before that the request is planned like any
    other, with what `link` has of the prompt.
    """
    if link.facts is None:
        return None
    worker, prompt_tokens = link.worker, len(flight.work.prompt)
    if link.worker == flight.plan.decode and flight.phase is Phase.DECODE and flight.output_tokens:
        # Of several choices only the prompt can be fetched: their outputs are computed like a prompt.
        held = prompt_tokens + (flight.output_tokens if flight.work.sampling.n == 1 else 0)
        return plan_migration(job, worker, link.facts.profile, held, candidates)
    plan = plan_anew()
    if plan is None or job.skips_cache or link.worker not in _computing(flight.plan):
        return plan
    able = {one.worker: one.profile for one in candidates}
    profiles = [profile for worker in _computing(plan) if (profile := able.get(worker)) is not None]
    if any(kv_compatibility.refusal(link.facts.profile, profile) for profile in profiles):
        return plan  # such as one of another revision: it takes no blocks from here
    return dataclasses.replace(plan, sources=(FetchSource(worker=worker, tokens=prompt_tokens), *plan.sources))


def _computing(plan: Plan) -> tuple[WorkerId, ...]:
    return (plan.decode,) if plan.prefill is None else (plan.prefill,)


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
