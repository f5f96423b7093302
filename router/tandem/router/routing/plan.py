"""Interface of a routing policy: its input, the plan it returns, and which workers can serve together.

Pure decisions over what is known about each worker; no sockets, no clock: times come in with the job.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.core import kv_compatibility
from tandem.core.config import Disaggregation, PolicyName
from tandem.core.errors import UnavailableError
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.prefill_queue import FIRST_COME, UNMEASURED, PrefillSpeed, QueuedWork, QueueRules
from tandem.core.state_enums import RoleName

_MAX_REASONS = 3
MAX_OPTIONS = 8
"""Options of a decision that are kept to explain it."""


def _unmeasured(_: WorkerId) -> None:
    return None


# Objects that each plan makes anew are never changed, but not frozen either: making them would take four times as long.
@dataclass(slots=True, kw_only=True)
class Candidate:
    """One worker that can take work now, as the policy sees it. 0 of a measurement = not yet known.

    `held_tokens` of the prompt need not be moved there, `reusable_tokens` need not be computed there. `lossy_tokens`
    (by HashRoot.lossy) take the place of `held_tokens` where the blocks of the other worker change on their way. `host`
    is the address of its machine, "" = not known. `profile` decides with which workers it can exchange KV blocks.
    `last_used` counts up with every plan that named this worker, so that equals take turns. `link_speed`: measured
    bytes a second to another worker, None = not measured. `prefill_speed`: as measured.

    `queued_tokens`: prompt tokens still to compute there, in all. `queue`: the same in detail, with due times on the
    clock of `Job.now_s`, by `rules`; what it does not list counts as ahead. `in_flight`: requests that it was given or
    informed of; `running`: sequences that decode now. `decode_step_s` is a decode step, `decode_sequence_s` what one
    more sequence adds to it. `free_blocks` of `total_blocks` can be had in the tightest KV group. `computing`: the
    share of its time in which it computed prompts lately. `tokens_in_transfer`: of prompts that are computed, and that
    this router knows to be on their way from it or to it.
    """

    worker: WorkerId
    incarnation: Incarnation
    role: RoleName
    queued_tokens: int = 0
    queued_requests: int = 0
    queue: Sequence[QueuedWork] = ()
    rules: QueueRules = FIRST_COME
    in_flight: int = 0
    running: int = 0
    held_tokens: int = 0
    reusable_tokens: int = 0
    lossy_tokens: Mapping[str, int] = field(default_factory=dict)
    free_blocks: int = 0
    total_blocks: int = 0
    last_used: int = 0
    host: str = ""
    prefill_speed: PrefillSpeed = UNMEASURED
    decode_step_s: float = 0.0
    decode_sequence_s: float = 0.0
    computing: float = 0.0
    tokens_in_transfer: int = 0
    profile: KVProfile | None = None
    link_speed: Callable[[WorkerId], float | None] = field(default=_unmeasured, compare=False)


@dataclass(slots=True, kw_only=True)
class Job:
    """A request as the policy sees it. `deadline_s`: when its client waits no longer, on the clock of `now_s`.

    `prompt_tokens` are those to know before the next output token: in a further attempt with all output so far.

    `skips_cache`: something is wanted of every prompt token, so that nothing is fetched. `is_kept_together`: it
    has a home (see `affinity`), which others that cost nearly the same do not take turns with. `followers`: prompts
    that are expected soon, and begin with the blocks of this one that any worker holds (see `prefix_popularity`).
    `waiting`: requests that wait in the router until workers have room. `answer_tokens`: mean answer length, 0 = not
    known. `promised_ttft_s` after it came, `waited_s` ago, its first token was promised, and each one after it after
    `itl_s`; inf = nothing was.
    """

    prompt_tokens: int
    max_tokens: int
    choices: int = 1
    now_s: float = 0.0
    deadline_s: float = math.inf
    skips_cache: bool = False
    is_kept_together: bool = False
    followers: float = 0.0
    waiting: int = 0
    answer_tokens: float = 0.0
    promised_ttft_s: float = math.inf
    waited_s: float = 0.0
    itl_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSource:
    """A worker that holds the first `tokens` of the prompt, as exact blocks."""

    worker: WorkerId
    tokens: int


@dataclass(slots=True, kw_only=True)
class Cost:
    """Seconds that a choice costs, by part; see docs/routing.md.

    `queue_s`: until its prompt is computed. `compute_s`: computing it, with what is fetched first. `move_s`: KV on the
    wire that no computing hides, and the hand-off. `room_s`: until there are blocks. `decode_s`: what the batch adds to
    its answer, and prompts to come that are computed where it decodes. `others_s`: what it makes others wait.
    `broken_s`: for promises that may be broken by it, of others, too. `reuse_s`, not above 0: the part of `compute_s`
    that is on behalf of prompts to come.
    """

    queue_s: float = 0.0
    compute_s: float = 0.0
    move_s: float = 0.0
    room_s: float = 0.0
    decode_s: float = 0.0
    others_s: float = 0.0
    broken_s: float = 0.0
    reuse_s: float = 0.0

    @property
    def total_s(self) -> float:
        waits_s = self.queue_s + self.compute_s + self.move_s + self.room_s + self.decode_s
        return waits_s + self.others_s + self.broken_s + self.reuse_s

    @property
    def first_token_s(self) -> float:
        """Until the first token."""
        return self.queue_s + self.compute_s


@dataclass(slots=True, kw_only=True)
class Plan:
    """`decode` streams the answer. `prefill` computes the prompt and pushes its KV; None = `decode` does all alone.

    Two hits, in tokens: what the prefill worker need not compute, what need not be moved to the decode worker.
    `sources`: workers that the one that computes is to fetch from first, best first. `score`: smaller is better, in the
    policy's unit; `cost` where that is seconds. `order`: sort key among options. `options`: what was weighed, without
    hits, best first, at most MAX_OPTIONS.
    """

    decode: WorkerId
    prefill: WorkerId | None
    reason: str
    prefill_hit_tokens: int = 0
    decode_hit_tokens: int = 0
    sources: tuple[FetchSource, ...] = ()
    policy: str = ""
    score: float = field(default=0.0, compare=False)
    cost: Cost | None = None
    order: tuple[float, bool, int, int, str, str] = field(default=(0.0, False, 0, 0, "", ""), compare=False)
    options: tuple[Plan, ...] = field(default=(), compare=False)

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


def option_of(
    decode: Candidate, prefill: Candidate | None, reason: str, score: float, cost: Cost | None = None
) -> Plan:
    """One way to serve a request. Among equal scores a decode worker is left to decode, and the others take turns."""
    first, is_extra = prefill or decode, prefill is None and decode.role is RoleName.DECODE
    return Plan(
        decode=decode.worker,
        prefill=prefill.worker if prefill is not None else None,
        reason=reason,
        score=score,
        cost=cost,
        order=(score, is_extra, first.last_used, decode.last_used, first.worker, decode.worker),
    )


class Policy(Protocol):
    """Chooses workers. A pure function of its arguments: it keeps nothing, and reads no clock."""

    @property
    def name(self) -> PolicyName:
        """Under which it is selected."""

    def plan(self, job: Job, candidates: Sequence[Candidate]) -> Plan:
        """Raises UnavailableError that names what is missing when no worker can serve the job."""


def chosen(
    policy: PolicyName,
    mode: Disaggregation,
    options: Iterable[Plan],
    candidates: Sequence[Candidate],
    alike: float = 0.0,
) -> Plan:
    """The plan of the best of `options`; raises UnavailableError if there is none.

    Those of its kind (a pair, one worker) with a score above its own by no more than `alike` take turns with it.
    """
    ranked = sorted(options, key=lambda option: option.order)
    if not ranked:
        raise UnavailableError(missing(mode, candidates), todo="wait for workers or look at the cluster's status")
    best = ranked[0]
    if alike:
        limit, is_whole = best.score + alike, best.prefill is None
        turns = (one for one in ranked if one.score <= limit and (one.prefill is None) is is_whole)
        best = min(turns, key=lambda option: option.order[1:])
        ranked.remove(best)
        ranked.insert(0, best)
    decode = next(one for one in candidates if one.worker == best.decode)
    prefill = next((one for one in candidates if one.worker == best.prefill), None)
    return dataclasses.replace(
        best,
        prefill_hit_tokens=(prefill or decode).reusable_tokens,
        decode_hit_tokens=held_tokens(prefill, decode) if prefill is not None else decode.reusable_tokens,
        policy=policy,
        options=tuple(ranked[:MAX_OPTIONS]),
    )


def refusal(prefill: Candidate, decode: Candidate) -> str:
    """Return why these two can never exchange KV blocks, or "" if they can."""
    if prefill.profile is None or decode.profile is None:
        return "" if prefill.profile is decode.profile else "one of them did not say what its KV is"
    return kv_compatibility.refusal(prefill.profile, decode.profile)


def form(prefill: Candidate, decode: Candidate) -> str:
    """Describe for people how blocks get from one to the other: "exact", re-blocked, converted, with a codec; they must
    fit."""
    if prefill.profile is None or decode.profile is None:
        return "exact"
    offered = kv_compatibility.offers_for(prefill.profile, prefill.link_speed(decode.worker))
    return kv_compatibility.describe(prefill.profile, decode.profile, offered=offered)


def held_tokens(prefill: Candidate, decode: Candidate) -> int:
    """Leading prompt tokens that `decode` holds in the form in which blocks of `prefill` would come; they must fit."""
    if prefill.profile is None or decode.profile is None:
        return decode.held_tokens
    offered = kv_compatibility.offers_for(prefill.profile, prefill.link_speed(decode.worker))
    lossy = kv_compatibility.lossy_name(prefill.profile, decode.profile, offered=offered)
    return decode.lossy_tokens.get(lossy, 0) if lossy else decode.held_tokens


def pairs(candidates: Iterable[Candidate]) -> list[tuple[Candidate, Candidate]]:
    """Every compatible (prefill, decode) pair."""
    every = list(candidates)
    prefills = [c for c in every if c.role is RoleName.PREFILL]
    decodes = [c for c in every if c.role is RoleName.DECODE]
    return [(p, d) for p in prefills for d in decodes if not refusal(p, d)]


def needs_pair(mode: Disaggregation, job: Job) -> bool:
    """True if this answer must cross from one worker to another."""
    return mode is Disaggregation.ALWAYS and job.max_tokens > 1


def single_worker_candidates(mode: Disaggregation, job: Job, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Workers that may serve the job without another. Prefill workers: answers of one token alone."""
    every = list(candidates)
    mixed = [c for c in every if c.role is RoleName.MIXED]
    decodes = [c for c in every if c.role is RoleName.DECODE]
    if mode is Disaggregation.NEVER:
        return mixed or decodes
    if needs_pair(mode, job):
        return []
    prefills = [c for c in every if c.role is RoleName.PREFILL and job.max_tokens == 1]
    return mixed + prefills if mode is Disaggregation.ALWAYS else mixed + decodes + prefills


def has_choice(roles: Iterable[RoleName]) -> bool:
    """True if a decode worker that is to compute a prompt is weighed against another kind. Where none is there, being
    chosen means nothing: all requests wait for it."""
    return any(role is not RoleName.DECODE for role in roles)


def missing(mode: Disaggregation, candidates: Sequence[Candidate]) -> str:
    """Name what keeps these workers from serving anything."""
    if mode is Disaggregation.NEVER:
        return "no mixed or decode worker is connected"
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


_DIGITS = 6


def decision(plan: Plan) -> dict[str, Any]:
    """A plan and its alternatives as plain JSON values, for the admin port and clients that ask with X-Tandem-Route:
    seconds, tokens, and scores in the policy's unit."""
    return {
        "policy": plan.policy,
        "prefill": plan.prefill,
        "decode": plan.decode,
        "reason": plan.reason,
        "prefill_hit_tokens": plan.prefill_hit_tokens,
        "decode_hit_tokens": plan.decode_hit_tokens,
        "sources": [{"worker": source.worker, "tokens": source.tokens} for source in plan.sources],
        "options": [_option(option) for option in plan.options],
    }


def _option(option: Plan) -> dict[str, Any]:
    body: dict[str, Any] = {"prefill": option.prefill, "decode": option.decode, "score": round(option.score, _DIGITS)}
    return body | {"cost": _cost(option.cost)} if option.cost is not None else body


def _cost(cost: Cost) -> dict[str, float]:
    parts = {
        "queue_s": cost.queue_s, "compute_s": cost.compute_s, "move_s": cost.move_s, "room_s": cost.room_s,
        "decode_s": cost.decode_s, "others_s": cost.others_s, "broken_s": cost.broken_s, "reuse_s": cost.reuse_s,
        "total_s": cost.total_s,
    }  # fmt: skip
    return {name: round(value, _DIGITS) for name, value in parts.items()}


AFFINITY_TOKENS = 2048
"""Prompt tokens to compute that a home may have ahead of others."""
AFFINITY_REQUESTS = 4
"""Requests that a home may serve more than others."""


def with_affinity(key: str, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates as a request with this `prompt_cache_key` is to see them; an empty key sees them as they are.

    A key prefers the same workers at every router, without any state: it has a home among the workers of each role. All
    others are shown to the policy as busier than they are, by so much work as it is worth to keep the key's requests
    together. The rest is the policy's own cost.
    """
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
