"""Which workers serve a request, and why. Pure decisions over what is known about each worker; no sockets, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core import pairing
from tandem.core.config import Disaggregation
from tandem.core.errors import UnavailableError
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.lifecycle import RoleName
from tandem.core.pairing import KVProfile

_MAX_REASONS = 3


def _unmeasured(_: WorkerId) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker that can take work now, as the policy sees it.

    `held_tokens` of the prompt need not be moved there, `reusable_tokens` need not be computed there. `lossy_tokens`
    (by HashRoot.lossy) take the place of `held_tokens` where the blocks of the other worker change on their way.
    `profile` decides with whom it can exchange KV blocks. `last_used` counts up with every plan that named this
    worker, so that equals take turns. `link_speed`: measured bytes a second to another worker, None = not measured.
    `prefill_rate`: measured tokens a second, 0 = not yet known.
    """

    worker: WorkerId
    incarnation: Incarnation
    role: RoleName
    queued_tokens: int = 0
    in_flight: int = 0
    held_tokens: int = 0
    reusable_tokens: int = 0
    lossy_tokens: Mapping[str, int] = field(default_factory=dict)
    free_blocks: int = 0
    last_used: int = 0
    prefill_rate: float = 0.0
    profile: KVProfile | None = None
    link_speed: Callable[[WorkerId], float | None] = field(default=_unmeasured, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the policy needs to know of a request."""

    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A worker that holds the first `tokens` of the prompt, as exact blocks."""

    worker: WorkerId
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`decode` streams the answer. `prefill` computes the prompt and pushes its KV; None = `decode` does all alone.

    Two hits, in tokens: what the prefill worker need not compute, what need not be moved to the decode worker.
    `sources`: from whom the worker that computes is to fetch first, best first.
    """

    decode: WorkerId
    prefill: WorkerId | None
    reason: str
    prefill_hit_tokens: int = 0
    decode_hit_tokens: int = 0
    sources: tuple[Source, ...] = ()

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class Policy(Protocol):
    """Chooses workers. Raises UnavailableError that says what is missing when nobody can serve the job."""

    def plan(self, job: Job, candidates: Sequence[Candidate]) -> Plan: ...


def refusal(prefill: Candidate, decode: Candidate) -> str:
    """Why these two can never exchange KV blocks, or "" if they can."""
    if prefill.profile is None or decode.profile is None:
        return "" if prefill.profile is decode.profile else "one of them did not say what its KV is"
    return pairing.refusal(prefill.profile, decode.profile)


def form(prefill: Candidate, decode: Candidate) -> str:
    """How blocks get from one to the other, for people: "exact", re-blocked, converted, with a codec; they must fit."""
    if prefill.profile is None or decode.profile is None:
        return "exact"
    offered = pairing.offers_for(prefill.profile, prefill.link_speed(decode.worker))
    return pairing.describe(prefill.profile, decode.profile, offered=offered)


def held_tokens(prefill: Candidate, decode: Candidate) -> int:
    """Leading prompt tokens that `decode` holds in the form in which blocks of `prefill` would come; they must fit."""
    if prefill.profile is None or decode.profile is None:
        return decode.held_tokens
    offered = pairing.offers_for(prefill.profile, prefill.link_speed(decode.worker))
    lossy = pairing.lossy_name(prefill.profile, decode.profile, offered=offered)
    return decode.lossy_tokens.get(lossy, 0) if lossy else decode.held_tokens


def pairs(candidates: Iterable[Candidate]) -> list[tuple[Candidate, Candidate]]:
    """Every compatible (prefill, decode) pair."""
    every = list(candidates)
    prefills = [c for c in every if c.role is RoleName.PREFILL]
    decodes = [c for c in every if c.role is RoleName.DECODE]
    return [(p, d) for p in prefills for d in decodes if not refusal(p, d)]


class LeastWork:
    """Least work in queue: tokens ahead plus tokens that the worker would have to compute; fewest requests to decode.

    ALWAYS: a pair for every answer of more than one token. AUTO: a pair where one exists, unless a mixed worker has
    less to do. NEVER: one worker, mixed or decode, does all. A one-token answer never needs a decode worker.
    """

    def __init__(self, mode: Disaggregation) -> None:
        self._mode = mode

    def plan(self, job: Job, candidates: Sequence[Candidate]) -> Plan:
        if self._mode is Disaggregation.NEVER:
            return self._plan_alone(job, candidates)
        alone = [c for c in candidates if c.role is not RoleName.DECODE]
        if job.max_tokens == 1 and alone:
            return _alone(_least_prefill(job, alone), "one token needs no decode worker")
        best = _best_pair(job, candidates)
        mixed = [c for c in candidates if c.role is RoleName.MIXED]
        if self._mode is Disaggregation.AUTO and mixed:
            choice = _least_prefill(job, mixed)
            if best is None:
                return _alone(choice, "mixed worker")
            if _prefill_work(job, choice) < _prefill_work(job, best[0]):
                return _alone(choice, "mixed worker has the least work")
        if best is None:
            raise UnavailableError(_missing(candidates), todo="wait for workers or look at the cluster's status")
        prefill, decode = best
        return Plan(
            decode=decode.worker,
            prefill=prefill.worker,
            reason="least work",
            prefill_hit_tokens=prefill.reusable_tokens,
            decode_hit_tokens=held_tokens(prefill, decode),
        )

    def _plan_alone(self, job: Job, candidates: Sequence[Candidate]) -> Plan:
        able = [c for c in candidates if c.role is RoleName.MIXED]
        able = able or [c for c in candidates if c.role is RoleName.DECODE]
        if not able:
            what = "no mixed or decode worker is connected"
            raise UnavailableError(what, todo="wait for workers or look at the cluster's status")
        return _alone(_least_prefill(job, able), "disaggregation is off")


def _best_pair(job: Job, candidates: Sequence[Candidate]) -> tuple[Candidate, Candidate] | None:
    able = pairs(candidates)
    if not able:
        return None
    prefill = _least_prefill(job, [p for p, _ in able])
    decodes = (d for p, d in able if p.worker == prefill.worker)
    decode = min(decodes, key=lambda d: _decode_order(d, held_tokens(prefill, d)))
    return prefill, decode


def _least_prefill(job: Job, able: Iterable[Candidate]) -> Candidate:
    return min(able, key=lambda c: (_prefill_work(job, c), c.in_flight, c.last_used, c.worker))


def _prefill_work(job: Job, candidate: Candidate) -> int:
    return candidate.queued_tokens + max(1, job.prompt_tokens - candidate.reusable_tokens)


def _decode_order(candidate: Candidate, held: int) -> tuple[int, int, int, int, str]:
    return (candidate.in_flight, -held, candidate.last_used, -candidate.free_blocks, candidate.worker)


def _alone(candidate: Candidate, reason: str) -> Plan:
    hit = candidate.reusable_tokens
    return Plan(decode=candidate.worker, prefill=None, reason=reason, prefill_hit_tokens=hit, decode_hit_tokens=hit)


def _missing(candidates: Sequence[Candidate]) -> str:
    count = {role: sum(c.role is role for c in candidates) for role in RoleName}
    if count[RoleName.PREFILL] and count[RoleName.DECODE]:
        return f"no prefill and decode worker fit together: {'; '.join(_reasons(candidates))}"
    absent = [role.value for role in (RoleName.PREFILL, RoleName.DECODE) if not count[role]]
    return f"no {' and no '.join(absent)} worker is connected"


def _reasons(candidates: Sequence[Candidate]) -> list[str]:
    """Why pairs are refused, every reason once with one of its pairs."""
    reasons: dict[str, str] = {}
    for prefill in candidates:
        for decode in candidates:
            if prefill.role is RoleName.PREFILL and decode.role is RoleName.DECODE:
                why = refusal(prefill, decode)
                reasons.setdefault(why, f"{prefill.worker} and {decode.worker}: {why}")
    return list(reasons.values())[:_MAX_REASONS]
