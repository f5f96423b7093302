"""Load sent by this router to one worker and not yet in its load reports. Pure: times are passed in.

    sent ──▶ acknowledged (the worker's phase QUEUED) ──▶ reported (the next load report counts it) ──▶ computed
    └──────────── counted here, beside the report ───────┘

A worker sends acknowledgements and reports over one stream in the order in which it makes them, so nothing is counted
twice. A report that has grown stale counts no more; then all that this router sent and that is not computed does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.core.prefill_queue import PrefillSpeed, QueuedWork, QueueRules, attended
from tandem.router.routing.plan import Job

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
    """Legs by request, from dispatch to their end, at one worker."""

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
