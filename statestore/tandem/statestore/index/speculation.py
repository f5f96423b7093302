"""Blocks that a worker is about to hold: those of prompts that a router just sent there. Advice, like the index.

Requests with one prefix often come together, before any worker could publish it. Each would be planned as if no worker
held it, and spread over all workers. So a sent prompt counts as held for a short life:

    expect ─▶ pending ─ settle: the prompt is computed ─▶ settled, until its events must have come ─▶ gone
                 └─ withdraw: failed, cancelled, worker lost; or pending for too long ─────────────▶ gone

The real event needs no hand-over: the reader takes the larger of both depths. No I/O, no tasks, one thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tandem.core.block_hash import BlockHash
from tandem.core.clock import Clock
from tandem.core.ids import Incarnation, WorkerId

MAX_BLOCKS: Final = 131_072
"""Blocks expected at once, over all requests: about 15 MB."""
PENDING_S: Final = 30.0
"""A prompt that waits or is computed for longer than this no longer counts."""
SETTLED_S: Final = 1.0
"""From the first token until the events of its prompt must have come (they take milliseconds)."""

Holder = tuple[WorkerId, Incarnation]
_Key = tuple[str, WorkerId]


@dataclass(frozen=True, slots=True, eq=False)
class _Expected:
    """One prompt on one worker; gone at `ends_s`."""

    holder: Holder
    hashes: Sequence[BlockHash]
    ends_s: float


@dataclass(slots=True, eq=False)
class _Prompts:
    """Prompts of one origin, oldest first."""

    pending: OrderedDict[_Key, _Expected] = field(default_factory=OrderedDict)
    settled: OrderedDict[_Key, _Expected] = field(default_factory=OrderedDict)


class Speculation:
    """Bounded by `max_blocks` (those of requests that share a prefix count each time); past it the oldest go first.
    Prompts of other routers (`_heard`) go before any of this one's (`_own`), and never take their place.

    Of one worker in one incarnation, every block is there with all blocks before it, because whole prompts come and go.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        max_blocks: int = MAX_BLOCKS,
        pending_s: float = PENDING_S,
        settled_s: float = SETTLED_S,
    ) -> None:
        self._clock, self._max_blocks = clock, max_blocks
        self._pending_s, self._settled_s = pending_s, settled_s
        self._own, self._heard = _Prompts(), _Prompts()
        self._counts: dict[Holder, Counter[BlockHash]] = {}
        self._blocks = 0

    @property
    def blocks(self) -> int:
        """Blocks expected, each as often as there are requests that expect it; at most `max_blocks`."""
        return self._blocks

    def expect(self, request: str, worker: WorkerId, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> None:
        """Note that `worker` was sent a prompt with these blocks, from the first one on. Replaces earlier ones for this
        request. O(blocks)."""
        self._expect(self._own, (request, worker), incarnation, hashes)

    def settle(self, request: str, worker: WorkerId) -> bool:
        """Note that `worker` has computed the prompt: its own events are on their way. False if it was not pending."""
        return self._settle(self._own, (request, worker))

    def withdraw(self, request: str, worker: WorkerId) -> bool:
        """Note that `worker` will not compute the prompt. False, and no change, if it has, or was never sent it."""
        return self._withdraw(self._own, (request, worker))

    def lookup(self, hashes: Sequence[BlockHash]) -> Mapping[Holder, int]:
        """Return the number of leading blocks of `hashes` that each worker is expected to hold; those with none are
        left out.

        O(workers · log blocks): a worker's blocks come with all blocks before them, so the last one is found by binary
        search.
        """
        self._expire()
        if not hashes:
            return {}
        first = hashes[0]
        return {holder: _depth(counts, hashes) for holder, counts in self._counts.items() if first in counts}

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts are not those of the requests; slow, for tests."""
        counts: dict[Holder, Counter[BlockHash]] = {}
        for prompts in (self._own, self._heard):
            assert not prompts.pending.keys() & prompts.settled.keys(), "a request is pending and settled"
            for one in (*prompts.pending.values(), *prompts.settled.values()):
                counts.setdefault(one.holder, Counter()).update(one.hashes)
        assert counts == self._counts, "counted blocks are not those of the requests"
        assert self._blocks == sum(map(Counter.total, counts.values())) <= self._max_blocks, "the total is wrong"

    def _expect(self, prompts: _Prompts, key: _Key, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> None:
        self._expire()
        self._forget(prompts, key)
        hashes = hashes[: self._max_blocks]
        while hashes and self._blocks + len(hashes) > self._max_blocks:
            if self._drop_oldest(self._heard):
                continue
            if prompts is self._heard:
                hashes = hashes[: self._max_blocks - self._blocks]
            else:
                self._drop_oldest(self._own)
        if not hashes:
            return
        holder = (key[1], incarnation)
        prompts.pending[key] = _Expected(holder, hashes, self._clock.now_s() + self._pending_s)
        self._counts.setdefault(holder, Counter()).update(hashes)
        self._blocks += len(hashes)

    def _settle(self, prompts: _Prompts, key: _Key) -> bool:
        one = prompts.pending.pop(key, None)
        if one is not None:
            prompts.settled[key] = _Expected(one.holder, one.hashes, self._clock.now_s() + self._settled_s)
        return one is not None

    def _withdraw(self, prompts: _Prompts, key: _Key) -> bool:
        one = prompts.pending.pop(key, None)
        if one is not None:
            self._drop(one)
        return one is not None

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        for prompts in (self._own, self._heard):
            for queue in (prompts.pending, prompts.settled):
                while queue and next(iter(queue.values())).ends_s <= now_s:
                    self._drop(queue.popitem(last=False)[1])

    def _forget(self, prompts: _Prompts, key: _Key) -> None:
        for queue in (prompts.pending, prompts.settled):
            one = queue.pop(key, None)
            if one is not None:
                self._drop(one)

    def _drop_oldest(self, prompts: _Prompts) -> bool:
        """Drop the oldest prompt, computed ones first. False if there is none."""
        queue = prompts.settled or prompts.pending
        if queue:
            self._drop(queue.popitem(last=False)[1])
            return True
        return False

    def _drop(self, one: _Expected) -> None:
        counts = self._counts[one.holder]
        for block in one.hashes:
            if counts[block] > 1:
                counts[block] -= 1
            else:
                counts.pop(block)  # deleting is slower: Counter has its own
        if not counts:
            del self._counts[one.holder]
        self._blocks -= len(one.hashes)


def _depth(counts: Mapping[BlockHash, int], hashes: Sequence[BlockHash]) -> int:
    """Number of leading blocks that are counted; the first one is."""
    low, high = 1, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in counts:
            low = middle
        else:
            high = middle - 1
    return low
