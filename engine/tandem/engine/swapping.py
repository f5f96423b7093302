"""Offloads a preempted request's KV to host memory, or has it computed again, whichever costs less.

    swap         bytes / measured speed to the host + bytes / measured speed back
    compute      its tokens and what they attend to, at the measured prefill speed

Only a request of one choice that needs no log-probabilities of its prompt is kept; others are computed again. Imports
no torch, and moves nothing itself: see `HostCopies`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.core.clock import Clock
from tandem.core.kv_layout import KVLayout
from tandem.core.prefill_queue import PrefillSpeed, attended
from tandem.engine.sequence import RequestState

_WEIGHT = 0.2
"""Weight of the newest copy in the moving average of their speed."""
TRIAL_BLOCKS = 16
"""Copied twice to and fro at the start, to know how fast that is; the first time also pays for what is needed once."""


class HostCopies(Protocol):
    """Copies whole blocks of this rank's pools to host memory and back. Called from the step loop's thread only."""

    def save(self, group: int, blocks: Sequence[int]) -> Any:
        """A copy of these blocks, complete when this returns; None if the host has no memory for it."""

    def restore(self, group: int, blocks: Sequence[int], saved: Any, first: int) -> None:
        """Write blocks `first` and after of a copy over `blocks`; complete when this returns."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """KV of the first `tokens` tokens: a copy a group, of whole blocks, from block `window_offsets[group]` on."""

    tokens: int
    size_bytes: int
    window_offsets: tuple[int, ...]
    copies: tuple[Any, ...]


class Swap:
    """Keeps KV of preempted requests within `capacity_bytes`. Belongs to the scheduler.

    `save_bytes_per_s` and `restore_bytes_per_s` are its known speeds at the start; see `try_speeds`.
    """

    def __init__(
        self,
        copies: HostCopies,
        layout: KVLayout,
        capacity_bytes: int,
        clock: Clock,
        *,
        save_bytes_per_s: float = 0.0,
        restore_bytes_per_s: float = 0.0,
    ) -> None:
        self._copies, self._layout, self._clock = copies, layout, clock
        self._left_bytes = capacity_bytes
        self._block_tokens = layout.groups[0].block_tokens
        self._block_bytes = sum(group.block_bytes(layout.tp) for group in layout.groups)
        self._saved: dict[str, _Saved] = {}
        self.save_bytes_per_s, self.restore_bytes_per_s = save_bytes_per_s, restore_bytes_per_s
        self.requests = self.tokens = 0
        """How many were kept, and how many tokens of theirs were not computed again, since the start."""

    @property
    def keys(self) -> Collection[str]:
        """Keys of requests with kept KV."""
        return self._saved.keys()

    def seconds(self, tokens: int) -> float:
        """Seconds for keeping the KV of so many tokens, to the host and back; infinite while no speed is known."""
        if not self.save_bytes_per_s or not self.restore_bytes_per_s:
            return float("inf")
        size = self._size_bytes(tokens)
        return size / self.save_bytes_per_s + size / self.restore_bytes_per_s

    def offer(self, state: RequestState, speed: PrefillSpeed) -> bool:
        """Keep the KV of a request that is about to lose its blocks, if that is cheaper than to compute it again."""
        sequence = state.leader
        tokens = sequence.computed
        if len(state.live) != 1 or state.unscored_tokens or not tokens or state.request.key in self._saved:
            return False
        size = self._size_bytes(tokens)
        if size > self._left_bytes or self.seconds(tokens) >= speed.seconds(tokens, attended(0, tokens)):
            return False
        count = self._blocks(tokens)
        started_s = self._clock.now_s()
        window_offsets = tuple(sequence.left)
        kept = tuple(
            self._copies.save(group, table[left:count])
            for group, (table, left) in enumerate(zip(sequence.tables, window_offsets, strict=True))
        )
        if any(copy is None for copy in kept):
            return False
        self.save_bytes_per_s = _blend(self.save_bytes_per_s, size, self._clock.now_s() - started_s)
        self._saved[state.request.key] = _Saved(tokens, size, window_offsets, kept)
        self._left_bytes -= size
        self.requests += 1
        return True

    def bring_back(self, state: RequestState) -> None:
        """The request has blocks again: fill those that were not found cached, as far as they were kept."""
        sequence = state.leader
        saved = self._saved.get(state.request.key)
        if saved is None:
            return
        if saved.tokens > sequence.computed:
            first, count = sequence.computed // self._block_tokens, self._blocks(saved.tokens)
            started_s = self._clock.now_s()
            size = 0
            for group, (table, left, copy) in enumerate(
                zip(sequence.tables, saved.window_offsets, saved.copies, strict=True)
            ):
                begin = max(first, left)
                self._copies.restore(group, table[begin:count], copy, begin - left)
                size += (count - begin) * self._layout.groups[group].block_bytes(self._layout.tp)
            self.restore_bytes_per_s = _blend(self.restore_bytes_per_s, size, self._clock.now_s() - started_s)
            self.tokens += saved.tokens - sequence.computed
            sequence.computed = saved.tokens
        self.drop(state.request.key)

    def drop(self, key: str) -> None:
        """Drop the KV kept of this request, if any was."""
        saved = self._saved.pop(key, None)
        if saved is not None:
            self._left_bytes += saved.size_bytes

    def try_speeds(self, count: int = TRIAL_BLOCKS) -> None:
        """Copy the first `count` blocks to and fro: before a step or a transfer may write them."""
        blocks = range(count)
        size = count * self._block_bytes
        for _ in range(2):
            started_s = self._clock.now_s()
            kept = [self._copies.save(group, blocks) for group in range(len(self._layout.groups))]
            saved_s = self._clock.now_s()
            for group, copy in enumerate(kept):
                self._copies.restore(group, blocks, copy, 0)
            self.save_bytes_per_s = _blend(0.0, size, saved_s - started_s)  # the second one counts
            self.restore_bytes_per_s = _blend(0.0, size, self._clock.now_s() - saved_s)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _size_bytes(self, tokens: int) -> int:
        """Bytes of the kept KV of a sequence with so many computed tokens: nothing behind a window."""
        count, tp = self._blocks(tokens), self._layout.tp
        return sum((count - spec.first_needed(tokens)) * spec.block_bytes(tp) for spec in self._layout.groups)


def _blend(speed: float, size: int, took_s: float) -> float:
    """The moving average of a speed; a copy of no measurable time is ignored."""
    if took_s <= 0.0:
        return speed
    return size / took_s if not speed else speed + _WEIGHT * (size / took_s - speed)
