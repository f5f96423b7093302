"""Cost model: seconds that each part of serving a request takes at each worker. Pure arithmetic over workers'
measurements.

One `Estimates` a decision: it reads the fields of all candidates once. The policy `cost` and the choice of sources both
use it, so that a prefix that is cheap to fetch counts where the prompt is placed.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.core import kv_compatibility
from tandem.core.ids import WorkerId
from tandem.core.prefill_queue import UNMEASURED, PrefillSpeed, attended
from tandem.core.state_enums import RoleName
from tandem.router.routing.plan import Candidate, Cost, FetchSource, Job, Plan, refusal

FETCH_SETUP_S = 0.01
"""Question, offer and ticket of a fetch, each of which waits for a step in progress."""
HANDOFF_S = 0.005
"""Added to the second token by a hand-off, besides bytes on the wire."""
ASSUMED_BYTES_PER_S = 100e6
"""Assumed speed of a link that was not measured: a gigabit."""
CHUNK_TOKENS = 512
"""The last chunk of a prompt: its KV travels after all computing."""
ANSWER_TOKENS = 128
"""Assumed answer length where the mean is not known, if the answer may be so long."""
LEAST_COMPUTING = 0.5
"""A prefill worker is taken to compute prompts for this share of its time at least: it is there for that."""
MOST_COMPUTING = 0.95
"""No worker is taken to compute for more than this: answers get a token a chunk even then."""
MET = 2.0
"""Answers that are met while they are written are so many times as long as all are on average."""
ASSUMED_STEP_S = 0.02
ASSUMED_SEQUENCES = 64
"""Added to a step by one more sequence, where that was not measured: this part of the step."""
MAX_SOURCES = 3


@dataclass(slots=True)  # as Cost: never changed, and made anew by each plan
class Prefill:
    """Computing the prompt at one worker. `others_s`: what prompts behind it, and sequences that decode there, lose.
    `broken_s`: promises for its first token, and for each token of those sequences. `reuse_s`, not above 0: what of
    computing it is on behalf of prompts to come."""

    queue_s: float
    compute_s: float
    others_s: float
    broken_s: float
    reuse_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.queue_s + self.compute_s + self.others_s + self.broken_s + self.reuse_s


@dataclass(slots=True)
class _Decoding:
    """Cost of decoding at one worker for any worker that computes the prompt: read once, and used for each of its
    pairs. `room_s`: if it holds `held` tokens of the prompt."""

    held: int
    room_s: float
    slower_s: float
    interrupted_s: float
    seat_s: float


class Estimates:
    """Seconds for one job at any of `candidates`."""

    def __init__(self, job: Job, candidates: Sequence[Candidate]) -> None:
        self._job = job
        measured = [c for c in candidates if c.prefill_speed.tokens_per_s > 0]
        self._default_speed = _slowest(measured)
        self._role_speed = {role: _slowest([c for c in measured if c.role is role]) for role in RoleName}
        holders = [c for c in candidates if c.held_tokens > 0 and c.profile is not None]
        holders = [] if job.skips_cache else holders
        self._holders = heapq.nlargest(MAX_SOURCES + 1, holders, key=lambda c: c.held_tokens)
        self._most_held = self._holders[0].held_tokens if self._holders else 0
        computing = [c for c in candidates if c.role is not RoleName.DECODE]
        places = len(computing)
        followers = 0.0 if job.is_kept_together or job.skips_cache else job.followers
        self._answer_tokens = min(job.max_tokens, job.answer_tokens or ANSWER_TOKENS)
        left_s = job.promised_ttft_s - job.waited_s
        self._promise = SloPromise(left_s, job.itl_s, self._answer_tokens, job.promised_ttft_s)
        self._worth_s = self._promise.worth_s
        self._step_s = min((c.decode_step_s for c in candidates if c.decode_step_s), default=ASSUMED_STEP_S)
        is_for_prompts = all(c.queued_tokens or c.queue for c in computing)
        decoding = sum(c.role is RoleName.DECODE for c in candidates)
        self._wait_to_compute = job.waiting / places if places and is_for_prompts else 0.0
        """How many of those that wait in the router a prompt delays, at a worker that they might go to."""
        self._wait_to_decode = 0.0 if is_for_prompts or not decoding else job.waiting / decoding
        """Likewise at a decode worker: with workers at leisure to compute, they wait for room to decode."""
        self._copy_share = 1 / (1 + followers / places) if places else 1.0
        """This request's share of the cost of copying a prefix: later ones spread over all workers, and use it too."""
        # By identity: candidates outlive this object, and a router keeps one object of equal profiles.
        self._token_bytes: dict[int, float] = {}
        self._decoding: dict[WorkerId, _Decoding] = {}
        self._decode_s: dict[WorkerId, float] = {}
        self._computing_s: dict[tuple[int, float, float], float] = {}
        self._fits: dict[tuple[int, int], bool] = {}
        self._lossy: dict[tuple[int, int], str] = {}

    @property
    def has_answer(self) -> bool:
        """True if there is anything to decode behind the first token."""
        return self._job.max_tokens > 1

    def prefill_speed(self, worker: Candidate) -> PrefillSpeed:
        """As measured, else as the slowest of its role, or of all where none was. Decode workers, which compute few
        tokens at a time, give no hint of prefill workers' speed."""
        if worker.prefill_speed.tokens_per_s > 0:
            return worker.prefill_speed
        alike = self._role_speed[worker.role]
        return alike if alike.tokens_per_s > 0 else self._default_speed

    def sources(self, worker: Candidate) -> list[tuple[float, Candidate]]:
        """(seconds saved, worker) of all workers that deliver blocks sooner than they are computed, best first."""
        found = [(self._saved_s(worker, other), other) for other in self._holders if other.worker != worker.worker]
        useful = [(saved_s, other) for saved_s, other in found if saved_s > 0]
        return sorted(useful, key=lambda pair: (-pair[0], pair[1].worker))[:MAX_SOURCES]

    def prefill(self, worker: Candidate) -> Prefill:
        """Waiting for, and computing, what the worker neither has nor fetches."""
        compute_s = self._compute_s(worker, worker.reusable_tokens)
        if self._holders:
            compute_s -= max((saved_s for saved_s, _ in self.sources(worker)), default=0.0)
        done = self._prefill(worker, compute_s)
        if self._copy_share == 1 or worker.role is RoleName.DECODE or worker.reusable_tokens >= self._most_held:
            return done
        copy_s = max(0.0, compute_s - self._compute_s(worker, self._most_held))
        return replace(done, reuse_s=-copy_s * (1 - self._copy_share))

    def least_prefill_s(self, worker: Candidate) -> float:
        """No more than `prefill` in all, and quickly: as if all blocks held anywhere were fetched in no time."""
        compute_s = self._compute_s(worker, max(worker.reusable_tokens, self._most_held))
        if not worker.queue and not worker.queued_tokens and not self._worth_s:
            return compute_s + self._delayed(worker) * compute_s
        return self._prefill(worker, compute_s).total_s

    def _compute_s(self, worker: Candidate, known_tokens: int) -> float:
        """For all of the prompt behind the first `known_tokens`, and for its last token in any case."""
        speed = self.prefill_speed(worker)
        key = (known_tokens, speed.tokens_per_s, speed.context_s)
        found = self._computing_s.get(key)
        if found is None:
            end = self._job.prompt_tokens
            start = min(known_tokens, end - 1)
            found = self._computing_s[key] = speed.seconds(end - start, attended(start, end))
        return found

    def _prefill(self, worker: Candidate, compute_s: float) -> Prefill:
        others_s = self._delayed(worker) * compute_s
        if not worker.queue and not worker.queued_tokens:
            return Prefill(0.0, compute_s, others_s, self._broken_by_prefill_s(worker, 0.0, compute_s))
        job, speed = self._job, self.prefill_speed(worker)
        due_s = worker.rules.due_s(
            arrived_s=job.now_s, remaining_s=compute_s, now_s=job.now_s, deadline_s=job.deadline_s
        )
        listed, ahead_s = 0, 0.0
        for row in worker.queue:
            listed += row.tokens
            row_s = speed.seconds(row.tokens, row.attended)
            if row.due_s <= due_s:
                ahead_s += row_s
            else:
                others_s += min(row.requests * compute_s, row_s)  # never more than computing them first would cost
        ahead_s += speed.seconds(max(0, worker.queued_tokens - listed), 0.0)
        return Prefill(ahead_s, compute_s, others_s, self._broken_by_prefill_s(worker, ahead_s, compute_s))

    def _broken_by_prefill_s(self, worker: Candidate, queue_s: float, compute_s: float) -> float:
        """Promises: that of its first token, and those of answers that pause while it is computed."""
        if not self._worth_s:
            return 0.0
        paused = self._promise.paused(compute_s, self._token_s(worker), MET)
        return self._worth_s * (self._promise.late(queue_s + compute_s) + _decoding(worker) * paused)

    def _delayed(self, worker: Candidate) -> float:
        """How many requests lose the time that it computes this prompt: those that decode there, and those that wait
        for such a worker."""
        waiting = self._wait_to_decode if worker.role is RoleName.DECODE else self._wait_to_compute
        return _decoding(worker) + waiting

    def fits(self, sender: Candidate, receiver: Candidate) -> bool:
        """True if they can exchange KV blocks at all."""
        key = (id(sender.profile), id(receiver.profile))
        found = self._fits.get(key)
        if found is None:
            found = self._fits[key] = not refusal(sender, receiver)
        return found

    def pair(self, prefill: Candidate, decode: Candidate, done: Prefill) -> Cost:
        """`done`: what computing the prompt at `prefill` costs. They must fit."""
        lossy = self._lossy_name(prefill, decode)
        held = decode.lossy_tokens.get(lossy, 0) if lossy else decode.held_tokens
        move_s = self._move_s(prefill, decode, held, done)
        return self._with_decode(decode, done, move_s, held)

    def alone(self, worker: Candidate, done: Prefill) -> Cost:
        """Everything at one worker."""
        if self._job.max_tokens == 1:
            return Cost(
                queue_s=done.queue_s, compute_s=done.compute_s, others_s=done.others_s, broken_s=done.broken_s,
                reuse_s=done.reuse_s,
            )  # fmt: skip
        return self._with_decode(worker, done, 0.0, worker.reusable_tokens)

    def decode_s(self, worker: Candidate) -> float:
        """Cost of decoding there, whichever worker computes the prompt."""
        found = self._decode_s.get(worker.worker)
        if found is None:
            parts = self._decoding_at(worker)
            batch_s = (1 + self._job.choices) * parts.slower_s
            found = parts.room_s + batch_s + parts.interrupted_s + parts.seat_s
            if self._worth_s:
                found += self._broken_by_decode_s(worker, 0.0)
            self._decode_s[worker.worker] = found
        return found

    def _decoding_at(self, worker: Candidate) -> _Decoding:
        found = self._decoding.get(worker.worker)
        if found is None:
            found = self._decoding[worker.worker] = _Decoding(
                held=worker.held_tokens,
                room_s=self._room_s(worker, worker.held_tokens),
                slower_s=self._slower_s(worker),
                interrupted_s=self._interrupted_s(worker),
                seat_s=self._seat_s(worker),
            )
        return found

    def _slower_s(self, worker: Candidate) -> float:
        """Time that the answer and its batch cost each other."""
        sequence_s = worker.decode_sequence_s or (worker.decode_step_s or ASSUMED_STEP_S) / ASSUMED_SEQUENCES
        return self._answer_tokens * sequence_s * _batch(worker)

    def _interrupted_s(self, worker: Candidate) -> float:
        """Time that its answer loses to prompts that will be computed where it decodes."""
        if not worker.computing and worker.role is not RoleName.PREFILL:
            return 0.0
        return self._answer_tokens * (self._token_s(worker) - (worker.decode_step_s or self._step_s))

    def _token_s(self, worker: Candidate) -> float:
        """From one token to the next there: of that time, only the share in which no prompt is computed is a step."""
        share = max(worker.computing, LEAST_COMPUTING if worker.role is RoleName.PREFILL else 0.0)
        return (worker.decode_step_s or self._step_s) / (1 - min(share, MOST_COMPUTING))

    def _seat_s(self, worker: Candidate) -> float:
        """Time that requests waiting in the router for room to decode lose if it takes some: it is theirs one answer
        later."""
        if not self._wait_to_decode or worker.role is not RoleName.DECODE:
            return 0.0
        answer_s = self._answer_tokens * (worker.decode_step_s or self._step_s)
        return self._wait_to_decode * answer_s / max(1, _batch(worker))

    def _broken_by_decode_s(self, decode: Candidate, move_s: float) -> float:
        """Promises: steps that are too long there, or pauses that a short answer does not make up for, of its hand-over
        and of prompts that are computed meanwhile."""
        if not self._worth_s:
            return 0.0
        step_s = decode.decode_step_s or self._step_s
        slowed = self._promise.slowed(step_s)
        paused = self._promise.paused(move_s + self._decoding_at(decode).interrupted_s, step_s)
        return self._worth_s * (slowed + (1 - slowed) * paused)

    def _with_decode(self, decode: Candidate, done: Prefill, move_s: float, held: int) -> Cost:
        parts = self._decoding_at(decode)
        return Cost(
            queue_s=done.queue_s,
            compute_s=done.compute_s,
            move_s=move_s,
            room_s=parts.room_s if held == parts.held else self._room_s(decode, held),
            decode_s=parts.slower_s + parts.interrupted_s,
            others_s=done.others_s + self._job.choices * parts.slower_s + parts.seat_s,
            broken_s=done.broken_s + self._broken_by_decode_s(decode, move_s) if self._worth_s else done.broken_s,
            reuse_s=done.reuse_s,
        )

    def _move_s(self, prefill: Candidate, decode: Candidate, held: int, done: Prefill) -> float:
        """KV that goes over the wire after the prompt is computed: the last chunk's, or what the link is slower by,
        behind what is on its way already."""
        tokens = max(0, self._job.prompt_tokens - held)
        if decode.profile is None or not tokens:
            return HANDOFF_S
        speed = prefill.link_speed(decode.worker) or ASSUMED_BYTES_PER_S
        token_s = self.token_bytes(decode) / speed
        wire_s = tokens * token_s
        ahead_s = max(0.0, max(prefill.tokens_in_transfer, decode.tokens_in_transfer) * token_s - done.queue_s)
        return HANDOFF_S + max(ahead_s + wire_s - done.compute_s, wire_s * min(1.0, CHUNK_TOKENS / tokens))

    def _room_s(self, decode: Candidate, held: int) -> float:
        """Until running answers have given back what is missing: a full pool turns over with an answer's length."""
        if decode.total_blocks <= 0:
            return 0.0
        size = max(1, _block_tokens(decode))
        need = -(-max(0, self._job.prompt_tokens - held) // size) + self._job.choices
        short = max(0, need - decode.free_blocks)
        step_s = decode.decode_step_s or ASSUMED_STEP_S
        return short / decode.total_blocks * (self._job.answer_tokens or ANSWER_TOKENS) * step_s

    def _saved_s(self, worker: Candidate, other: Candidate) -> float:
        """Seconds by which fetching the prefix from `other` is sooner than computing it, or later; 0 where that cannot
        be."""
        ours, theirs = worker.profile, other.profile
        if ours is None or theirs is None or not ours.layout.groups:
            return 0.0
        size = ours.layout.groups[0].block_tokens
        gained = min(other.held_tokens, self._job.prompt_tokens - 1) // size * size - worker.reusable_tokens
        if gained <= 0:
            return 0.0
        start = worker.reusable_tokens
        compute_s = self.prefill_speed(worker).seconds(gained, attended(start, start + gained))
        saved_s = compute_s - self.fetch_s(worker, other, gained)
        # A prefix computed upon lossy blocks, and handed over, would not be exact.
        is_exact = self.fits(other, worker) and not self._lossy_name(other, worker)
        return saved_s if is_exact else 0.0

    def fetch_s(self, worker: Candidate, holder: Candidate, tokens: int) -> float:
        """Until `worker` has the blocks of so many tokens from `holder`."""
        speed = holder.link_speed(worker.worker)
        return FETCH_SETUP_S + tokens * self.token_bytes(worker) / (speed or ASSUMED_BYTES_PER_S)

    def _lossy_name(self, sender: Candidate, receiver: Candidate) -> str:
        """HashRoot.lossy of what the receiver gets; they must fit."""
        ours, theirs = sender.profile, receiver.profile
        if ours is None or theirs is None:
            return ""
        if ours.offers:  # then it depends on the link
            offered = kv_compatibility.offers_for(ours, sender.link_speed(receiver.worker))
            return kv_compatibility.lossy_name(ours, theirs, offered=offered)
        key = (id(ours), id(theirs))
        found = self._lossy.get(key)
        if found is None:
            found = self._lossy[key] = kv_compatibility.lossy_name(ours, theirs)
        return found

    def token_bytes(self, worker: Candidate) -> float:
        """KV bytes of one token, in the form in which this worker keeps them."""
        key = id(worker.profile)
        found = self._token_bytes.get(key)
        if found is None:
            groups = worker.profile.layout.groups if worker.profile is not None else ()
            found = self._token_bytes[key] = sum(group.block_bytes() / group.block_tokens for group in groups)
        return found


def _slowest(measured: Sequence[Candidate]) -> PrefillSpeed:
    return min((one.prefill_speed for one in measured), default=UNMEASURED, key=lambda speed: speed.tokens_per_s)


def _decoding(worker: Candidate) -> int:
    """Sequences that wait while it computes a prompt. A decode worker counts those that are on their way to it, and one
    more: hand-overs come while it computes, which is why prompts have workers of their own."""
    return worker.running if worker.role is not RoleName.DECODE else max(worker.running, worker.in_flight) + 1


def _batch(worker: Candidate) -> int:
    """Sequences that share its steps, or will: what a prefill worker has in flight goes elsewhere to decode."""
    return worker.running if worker.role is RoleName.PREFILL else max(worker.in_flight, worker.running)


def _block_tokens(worker: Candidate) -> int:
    groups = worker.profile.layout.groups if worker.profile is not None else ()
    return groups[0].block_tokens if groups else 16


UNSURE = 0.25
"""Relative error of predictions of a promised time, up or down: the width of the step from kept to broken."""
_LEAST_SPARE = 0.1
"""Least share of an answer's promised time that it is taken to have to spare: else one more delay cost nothing."""


@dataclass(frozen=True, slots=True)
class SloPromise:
    """Prices the risk of missing an SLO, in seconds: a request that misses it is worth nothing of what it took.

    An SLO class promises a time to the first token, and one for each token after it, on average over an answer. Answers
    are of all lengths (exponential, as far as a mean shows): a pause that a long one makes up for breaks the promise of
    a short one.

    `ttft_s`: from now to the first token, below 0 = it is late already. `itl_s`: for each token after it. inf =
    nothing is promised. `answer_tokens`: of an answer on average. `given_s`: the time to the first token as promised
    when the request came.
    """

    ttft_s: float
    itl_s: float
    answer_tokens: float
    given_s: float

    @property
    def worth_s(self) -> float:
        """The time that was promised for the whole request: it is lost with the promise."""
        answer_s = self.answer_tokens * self.itl_s
        return sum(part_s for part_s in (self.given_s, answer_s) if part_s < math.inf)

    def late(self, first_token_s: float) -> float:
        """Probability that a first token that is predicted for then comes too late."""
        if self.ttft_s == math.inf or self.ttft_s <= 0:
            return 0.0 if self.ttft_s > 0 else 1.0
        return _step(first_token_s / self.ttft_s)

    def slowed(self, token_s: float) -> float:
        """Probability that tokens that take so long each are too slow."""
        return _step(token_s / self.itl_s) if self.itl_s < math.inf else 0.0

    def paused(self, pause_s: float, token_s: float, answers: float = 1.0) -> float:
        """The share of answers that do not make up for a pause. Their tokens take `token_s` each. Those of `answers`
        times the mean length: an answer that is met while it is written is a long one, as a rule."""
        if self.itl_s == math.inf or not pause_s:
            return 0.0
        spare_s = max(self.itl_s - token_s, _LEAST_SPARE * self.itl_s) * self.answer_tokens * answers
        return 1 - math.exp(-pause_s / spare_s)


def _step(ratio: float) -> float:
    """0 well below 1, 1 well above it."""
    return min(1.0, max(0.0, (ratio - 1 + UNSURE) / (2 * UNSURE)))


def with_sources(plan: Plan, job: Job, candidates: Sequence[Candidate]) -> Plan:
    """Add the workers that deliver blocks sooner than they are computed, the one that saves most first.

    Fetching takes FETCH_SETUP_S + bytes / measured link speed, computing tokens / measured prefill rate. A plan of the
    policy `cost` was made with the same estimates: its choice of the prefill worker has counted possible sources.
    """
    if not any(one.held_tokens for one in candidates):
        return plan
    wanted = plan.decode if plan.prefill is None else plan.prefill
    chosen = next((one for one in candidates if one.worker == wanted), None)
    if chosen is None:
        return plan
    found = Estimates(job, candidates).sources(chosen)
    sources = tuple(FetchSource(worker=other.worker, tokens=other.held_tokens) for _, other in found)
    return dataclasses.replace(plan, sources=sources)
