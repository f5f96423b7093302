"""Load of workers beyond what one report states, output lengths, and popular prefixes of prompts: learnt, and bounded.

Pure: times and a clock are passed in. One thread, no I/O.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tandem.core.clock import Clock
from tandem.core.prefill_queue import PrefillSpeed, QueuedWork, QueueRules, attended
from tandem.core.state_enums import RoleName
from tandem.router.routing.cost_model import ANSWER_TOKENS, Estimates
from tandem.router.routing.plan import Candidate, Job

STALE_S = 1.0
"""A worker with work reports ten times a second; one that has none is silent, and then its last report was empty."""


@dataclass(slots=True, kw_only=True)
class InFlightWork:
    """One leg. `work` None = another worker computes the prompt. `blocks`: what it takes of the pool. `moved_tokens`:
    what goes over the wire for it."""

    work: QueuedWork | None
    blocks: int = 0
    moved_tokens: int = 0
    is_crossing: bool = False
    is_acknowledged: bool = False
    is_computed: bool = False


class Outstanding:
    """Legs by request, from dispatch to their end, at one worker: load sent by this router and not yet in its reports.

        sent ──▶ acknowledged (the worker's phase QUEUED) ──▶ reported (the next load report counts it) ──▶ computed
        └──────────── counted here, beside the report ───────┘

    A worker sends acknowledgements and reports over one stream in the order in which it makes them, so nothing is
    counted twice. A report that has grown stale counts no more; then all that this router sent and that is not computed
    does.
    """

    def __init__(self) -> None:
        self._sent: dict[str, InFlightWork] = {}
        self._unreported: dict[str, InFlightWork] = {}
        """Those of `_sent` that the last report does not count: few, and read at every plan."""
        self._reported_s = float("-inf")
        self.tokens_in_transfer = 0
        """Of prompts that are computed and on their way from here or to here."""
        self.changes = 0
        """Counts up with everything that may change the result of `uncounted` at one moment."""

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, request: str, sent: InFlightWork) -> None:
        self._sent[request] = self._unreported[request] = sent
        self.changes += 1

    def acknowledge(self, request: str) -> None:
        """The worker has it: reports from now on count it."""
        sent = self._sent.get(request)
        if sent is not None:
            sent.is_acknowledged = True

    def compute(self, request: str) -> bool:
        """Its first token from this worker is here. True the first time, if the prompt was computed at this worker:
        then its KV sets off, else it has arrived."""
        sent = self._sent.get(request)
        if sent is None or sent.is_computed:
            return False
        sent.is_computed = True
        self._cross(sent, is_crossing=sent.work is not None)
        self.changes += 1
        return sent.work is not None

    def depart(self, request: str) -> None:
        """The worker that computes the prompt has done so; its KV comes here."""
        sent = self._sent.get(request)
        if sent is not None and not sent.is_computed:
            self._cross(sent, is_crossing=True)
            self.changes += 1

    def end(self, request: str) -> None:
        """Nothing is waited for any more."""
        sent = self._sent.pop(request, None)
        if sent is not None:
            self._cross(sent, is_crossing=False)
        self._unreported.pop(request, None)
        self.changes += 1

    def clear(self) -> None:
        """The worker was lost with all that it had."""
        self._sent.clear()
        self._unreported.clear()
        self._reported_s = float("-inf")
        self.tokens_in_transfer = 0
        self.changes += 1

    def report(self, now_s: float) -> None:
        """A load report arrived."""
        self._reported_s = now_s
        self.changes += 1
        self._unreported = {name: sent for name, sent in self._unreported.items() if not sent.is_acknowledged}

    def is_stale(self, now_s: float) -> bool:
        """True if the last report is too old to count."""
        return now_s - self._reported_s > STALE_S

    @property
    def reported_s(self) -> float:
        """When the last report came."""
        return self._reported_s

    def uncounted(self, now_s: float) -> list[InFlightWork]:
        """Legs to count beside the last report, or instead of it."""
        return list((self._sent if self.is_stale(now_s) else self._unreported).values())

    def queue(self, now_s: float) -> list[QueuedWork]:
        """Prompts among them that are not computed yet."""
        return prompts(self.uncounted(now_s))

    def _cross(self, sent: InFlightWork, *, is_crossing: bool) -> None:
        if sent.is_crossing is not is_crossing:
            sent.is_crossing = is_crossing
            self.tokens_in_transfer += sent.moved_tokens if is_crossing else -sent.moved_tokens


def prompts(sent: Iterable[InFlightWork]) -> list[QueuedWork]:
    """Those among them that are not computed yet."""
    return [one.work for one in sent if one.work is not None and not one.is_computed]


def sent(
    job: Job,
    *,
    held_tokens: int,
    known_tokens: int | None,
    block_tokens: int,
    rules: QueueRules,
    speed: PrefillSpeed,
    moved_tokens: int = 0,
) -> InFlightWork:
    """A leg of `job` as it counts at a worker that holds `held_tokens` of the prompt.

    `known_tokens` need not be computed there; None = another worker computes. `moved_tokens` go over the wire.
    """
    blocks = -(-max(0, job.prompt_tokens - held_tokens) // max(1, block_tokens)) + job.choices
    if known_tokens is None:
        return InFlightWork(work=None, blocks=blocks, moved_tokens=moved_tokens)
    tokens = max(1, job.prompt_tokens - known_tokens)
    pairs = attended(job.prompt_tokens - tokens, job.prompt_tokens)
    due_s = rules.due_s(
        arrived_s=job.now_s,
        remaining_s=speed.seconds(tokens, pairs),
        now_s=job.now_s,
        deadline_s=job.deadline_s,
    )
    return InFlightWork(work=QueuedWork(due_s, tokens, attended=pairs), blocks=blocks, moved_tokens=moved_tokens)


_FIRST: Final = 8.0
"""Answers that this assumption counts as."""
_FADE: Final = 0.99
"""Weight of an answer, compared with the one after it."""


class AnswerLengths:
    """Exponentially decayed mean output length per model, used to price decode: it is not known of a single request.

    Learnt from answers that have ended; the latest count most.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def ended(self, model: str, tokens: float) -> None:
        """An answer of this model had so many tokens in the end."""
        count, total = self._seen.get(model, (0.0, 0.0))
        self._seen[model] = (count * _FADE + 1.0, total * _FADE + tokens)

    def mean(self, model: str) -> float:
        """Tokens of an answer."""
        count, total = self._seen.get(model, (0.0, 0.0))
        return (total + _FIRST * ANSWER_TOKENS) / (count + _FIRST)


COMPUTING_SECONDS: Final = "prefill_step_seconds"
"""The counter."""
FADE_S: Final = 5.0
"""A worker's share of so long ago counts for a third: a few prompts long, so that it is no one prompt's."""


class ComputingShare:
    """Fraction of its time that a worker, in one incarnation, spends in prefill: answers there get at most one token a
    chunk meanwhile.

    From a counter of seconds in its load reports; fades with FADE_S, so that a minute's change is seen.
    """

    def __init__(self) -> None:
        self.share = 0.0
        """From 0 to 1."""
        self._seconds = self._reported_s = 0.0
        self._is_known = False

    def report(self, now_s: float, seconds: float) -> None:
        """Until `now_s` it has spent so many seconds in steps that computed prompts, in all."""
        passed_s, more_s = now_s - self._reported_s, seconds - self._seconds
        if self._is_known and passed_s <= 0:
            return
        if self._is_known and more_s >= 0:
            lately = min(1.0, more_s / passed_s)
            self.share += (1 - math.exp(-passed_s / FADE_S)) * (lately - self.share)
        self._seconds, self._reported_s, self._is_known = seconds, now_s, True

    def clear(self) -> None:
        """Another process, which counts from 0."""
        self.share, self._is_known = 0.0, False


LASTING_S: Final = 60.0
"""For so long a copy is taken to be of use: about as long as a busy worker's cache keeps unrequested blocks."""
MAX_PREFIXES: Final = 16_384
"""Counted at once: about 4 MB."""


class Popularity:
    """Recent prompts that begin with the same blocks, to price a copy of these blocks for later ones.

    Counted by the deepest block of a prompt that any worker holds: a system prompt has one of many requests, a
    conversation goes on from another one with every turn and is never popular.

    A count for each prefix that fades with LASTING_S. At a steady rate it is the number of prompts in that time, so it
    estimates how many more to expect. Past `max_prefixes` the one that was asked for least recently goes first.
    """

    def __init__(self, clock: Clock, *, max_prefixes: int = MAX_PREFIXES) -> None:
        self._clock, self._max_prefixes = clock, max_prefixes
        self._counts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def followers(self, prefix: bytes) -> float:
        """Prompts with this prefix that are to be expected in LASTING_S; 0 if it is unknown, or b""."""
        count, since_s = self._counts.get(prefix, (0.0, 0.0))
        return count * math.exp(min(0.0, since_s - self._clock.now_s()) / LASTING_S) if count else 0.0

    def count(self, prefix: bytes) -> None:
        """A prompt with this prefix was sent off; b"" = no worker holds any of it."""
        if not prefix:
            return
        self._counts[prefix] = (self.followers(prefix) + 1.0, self._clock.now_s())
        self._counts.move_to_end(prefix)
        if len(self._counts) > self._max_prefixes:
            self._counts.popitem(last=False)


MAX_TOKENS: Final = 131_072
"""Tokens remembered at once: some 5 MB. A prompt that is longer is not remembered."""
MIN_FOLLOWERS: Final = 1.0
"""Prompts that are to be expected in the next minute; fewer are not worth a copy."""
NOTED_FOLLOWERS: Final = MIN_FOLLOWERS / 2
"""With fewer it is not remembered yet: a turn of a conversation without other users would push others out."""
ROOM_SHARE: Final = 0.5
"""Largest share of the free blocks of the worker that takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """The first `tokens` of `prompt`; its last block is named `key`, under `salt` for workers of `model`."""

    key: bytes
    prompt: Sequence[int]
    tokens: int
    salt: bytes
    model: str


class HotPrefixes:
    """The prefixes that were asked for last, as tokens: hashes do not contain them, and fetching blocks needs them.
    Past `max_tokens` the one asked for least recently goes first."""

    def __init__(self, *, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens, self._tokens = max_tokens, 0
        self._known: OrderedDict[bytes, HotPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(
        self, key: bytes, prompt: Sequence[int], tokens: int, salt: bytes, model: str, followers: float = MIN_FOLLOWERS
    ) -> None:
        """A prompt with this prefix was sent off, when so many `followers` were to be expected; b"" = no worker holds
        any of it."""
        if not key or tokens > self._max_tokens or followers < NOTED_FOLLOWERS:
            return
        if key not in self._known:
            # One more token is computed in any case: then all of the prefix can be fetched.
            kept = prompt[: tokens + 1]
            self._known[key] = HotPrefix(key=key, prompt=kept, tokens=tokens, salt=salt, model=model)
            self._tokens += len(kept)
        self._known.move_to_end(key)
        while self._tokens > self._max_tokens:
            _, oldest = self._known.popitem(last=False)
            self._tokens -= len(oldest.prompt)

    def latest(self, model: str) -> list[HotPrefix]:
        """All for workers of this model, last asked for first."""
        return [one for one in reversed(self._known.values()) if one.model in ("", model)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The worker that takes a prefix, and how long fetching what it lacks takes. `token_bytes`: of KV a token there."""

    to: Candidate
    token_bytes: float
    fetch_s: float


def saving(prefix: HotPrefix, leaving: Candidate, staying: Sequence[Candidate]) -> Saving | None:
    """Choose the worker that takes the prefix, None = not worth it. It is if no staying worker has all that `leaving`
    has of it, and the one that takes it fetches it sooner than it would compute it once."""
    held = min(leaving.held_tokens, prefix.tokens)
    if not held or any(one.reusable_tokens >= held for one in staying):
        return None
    computing = [one for one in staying if one.role is not RoleName.DECODE]
    job = Job(prompt_tokens=len(prefix.prompt), max_tokens=1)
    estimates = Estimates(job, [*staying, leaving])
    found: list[tuple[float, Candidate]] = []
    for one in computing or staying:
        saved_s = {other.worker: saved_s for saved_s, other in estimates.sources(one)}.get(leaving.worker, 0.0)
        if saved_s > 0 and _has_room(one, held):
            found.append((saved_s, one))
    if not found:
        return None
    _, to = min(found, key=lambda pair: (-pair[0], pair[1].in_flight, pair[1].last_used, pair[1].worker))
    fetch_s = estimates.fetch_s(to, leaving, held - to.reusable_tokens)
    return Saving(to=to, token_bytes=estimates.token_bytes(to), fetch_s=fetch_s)


def _has_room(one: Candidate, tokens: int) -> bool:
    groups = one.profile.layout.groups if one.profile is not None else ()
    need = max((group.blocks_for(tokens) for group in groups), default=0)
    return need <= one.free_blocks * ROOM_SHARE
