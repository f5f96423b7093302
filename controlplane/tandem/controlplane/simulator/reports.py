"""A worker's load reports as routers see them: every 100 ms, between steps, and late by the way to the router."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.prefill_queue import FIRST_COME, UNMEASURED, PrefillSpeed, QueuedWork, QueueRules

EVERY_S = 0.1
"""As workerhost's step loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """The part of a worker's report that policies read. `queue` is by due time, on the virtual clock.
    `prefill_step_s`: seconds of all steps that computed prompts."""

    queued_requests: int = 0
    queued_tokens: int = 0
    queue: tuple[QueuedWork, ...] = ()
    queue_rules: QueueRules = FIRST_COME
    in_flight: int = 0
    decoding_sequences: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    prefill_speed: PrefillSpeed = UNMEASURED
    decode_step_s: float = 0.0
    decode_sequence_s: float = 0.0
    prefill_step_s: float = 0.0


class Report(NamedTuple):
    """`is_repeated`: steps go on as they are, with the same report every 100 ms."""

    sent_s: float
    load: SimulatedLoad
    is_repeated: bool = False


class Reports:
    """Reports by when they are sent. No event is made for them: readers ask for the latest one of a moment."""

    def __init__(self, first: SimulatedLoad) -> None:
        self._sent: deque[Report] = deque([Report(-EVERY_S, first)])

    def turn(
        self, now_s: float, load: Callable[[], SimulatedLoad], *, is_stepping: bool, is_stretching: bool = False
    ) -> None:
        """Handle the end of a turn of the step loop. It reports if 100 ms have passed; if not, then later, unless one
        long step keeps it from that: then the turn after the step does."""
        sent = self._sent
        while len(sent) > 1 and sent[-1].sent_s > now_s:  # not yet sent, and something else came
            sent.pop()
        due_s = sent[-1].sent_s + EVERY_S
        if now_s >= due_s:
            sent.append(Report(now_s, load(), is_stretching))
        elif not is_stepping or is_stretching:
            sent.append(Report(due_s, load(), is_stretching))

    def seen(self, sent_by_s: float) -> tuple[float, SimulatedLoad]:
        """Return the latest report sent up to that moment, and when. Moments must not go back."""
        sent = self._sent
        while len(sent) > 1 and sent[1].sent_s <= sent_by_s:
            sent.popleft()
        sent_s, load, is_repeated = sent[0]
        if is_repeated and sent_by_s > sent_s:
            sent_s += (sent_by_s - sent_s) // EVERY_S * EVERY_S
        return sent_s, load
