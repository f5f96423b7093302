"""A worker's side of the index: publishes the blocks that it holds to Redis, without ever making the engine wait.

    offer ─▶ held (the truth) ─┐
          └▶ pending (net changes not yet written) ─▶ one entry in flight ─▶ script: lease? sequence? set + stream

Changes wait as their net effect, so a block stored and removed in between costs nothing. When too many wait, or when
Redis lost our keys, pending is thrown away and everything held is published again behind an entry that voids the past.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from redis.asyncio import Redis

from tandem.core.ids import Incarnation, WorkerId
from tandem.core.lease_timing import BEAT_S
from tandem.core.timeout_scale import patient
from tandem.statestore.connection import OUTAGE, Backoff
from tandem.statestore.index.events import MEMBER_BYTES, NOTHING, BlockChange, BlockEvent, Position, fold, member
from tandem.statestore.keys import Keys, Member

_log = logging.getLogger(__name__)

INDEX_TTL_S: Final = patient(10.0)
ENTRY_BLOCKS: Final = 512
STREAM_ENTRIES: Final = 2048
"""Entries kept for readers that fell behind (trimmed approximately): at most about 18 MB a worker, usually far less."""
_LINGER_S: Final = 0.002

_LOST, _GAP, _LATE = -1, -2, -3

# Returns the size of the set, or _LOST (another incarnation holds the lease), _LATE (its holder's time was over: see
# member_lease.py) or _GAP (the stream is not where we left it). A call that is repeated because its answer got lost
# finds its entry in place and changes nothing.
_WRITE = f"""
local time, until_ms = redis.call('TIME'), tonumber(ARGV[9])
if until_ms > 0 and time[1] * 1000 + math.floor(time[2] / 1000) >= until_ms then return {_LATE} end
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return {_LOST} end
local mode, seq, ttl = ARGV[2], tonumber(ARGV[3]), ARGV[5]
local last, at = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1), 0
if last[1] then at = tonumber(string.match(last[1][1], '^%d+')) end
local function each(command, blob)
  if #blob == 0 then return end
  local list = {{}}
  for i = 1, #blob, {MEMBER_BYTES} do list[#list + 1] = string.sub(blob, i, i + {MEMBER_BYTES - 1}) end
  redis.call(command, KEYS[3], unpack(list))
end
if mode == 'check' then
  if at ~= seq then return {_GAP} end
elseif at ~= seq then
  if mode == 'reset' then
    redis.call('UNLINK', KEYS[3])
  elseif at ~= seq - 1 then
    return {_GAP}
  end
  each('SREM', ARGV[7])
  each('SADD', ARGV[6])
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], seq .. '-0', 'm', mode, 's', ARGV[6], 'r', ARGV[7], 'k', ARGV[8])
end
redis.call('PEXPIRE', KEYS[2], ttl)
redis.call('PEXPIRE', KEYS[3], ttl)
return redis.call('SCARD', KEYS[3])
"""


class Mode(StrEnum):
    """RESET: void everything before. APPEND: change the present set. CHECK: write nothing, only prolong and compare."""

    RESET = "reset"
    APPEND = "append"
    CHECK = "check"


@dataclass(frozen=True, slots=True)
class _PublishCall:
    """One call of the script; repeated unchanged until its outcome is known."""

    mode: Mode
    after: Position
    stored: bytes = b""
    removed: bytes = b""


@dataclass(slots=True)
class PublisherCounters:
    """Cumulative since construction."""

    entries: int = 0
    republished: int = 0
    overflows: int = 0
    refused: int = 0
    gaps: int = 0
    outages: int = 0


class BlockEventPublisher:
    """Publishes one worker's blocks. `offer`, `renew` and the properties belong to the loop that runs `run`.

    `max_pending_blocks` bounds what may wait beyond the blocks that are held. `position` is what heartbeats carry.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        worker: WorkerId,
        incarnation: Incarnation,
        *,
        max_pending_blocks: int = 65_536,
        entry_blocks: int = ENTRY_BLOCKS,
        stream_entries: int = STREAM_ENTRIES,
        check_s: float = BEAT_S,
        until_ms: Callable[[], int | None] = lambda: 0,
    ) -> None:
        """`until_ms`: end of the worker's lease by the server's clock; 0 = not known, None = it is over."""
        self._keys, self._worker, self._incarnation = keys, worker, incarnation
        self._script: Any = redis.register_script(_WRITE)
        self._max_pending, self._entry_blocks = max_pending_blocks, entry_blocks
        self._stream_entries, self._check_s, self._until_ms = stream_entries, check_s, until_ms
        self._held: set[bytes] = set()
        self._pending: dict[bytes, bool] = {}  # member → True to store, False to remove
        self._in_flight: _PublishCall | None = None
        self._written = NOTHING
        self._must_reset = True
        self._is_lost = False
        self._wake = asyncio.Event()
        self.counters = PublisherCounters()

    @property
    def position(self) -> Position:
        """The position that Redis confirmed last; give it to `WorkerLease.beat`."""
        return self._written

    @property
    def is_idle(self) -> bool:
        """True if everything offered so far is in Redis."""
        return not (self._pending or self._in_flight or self._must_reset)

    @property
    def is_lost(self) -> bool:
        """True if, by the last answer, another incarnation or none holds the lease, or it is over."""
        return self._is_lost

    def offer(self, events: Iterable[BlockEvent]) -> None:
        """Take in changes, in order. Never waits; ValueError for a malformed hash or group."""
        for event in events:
            if event.change is BlockChange.CLEARED:
                self._held.clear()
                self._void_pending()
            else:
                is_stored = event.change is BlockChange.STORED
                for block in event.hashes:
                    self._note(member(event.group, block), is_stored)
        if len(self._pending) > max(self._max_pending, len(self._held)):
            self.counters.overflows += 1
            self._void_pending()
        self._wake.set()

    def renew(self, incarnation: Incarnation) -> None:
        """The worker registered anew (under the same incarnation, if Redis lost its data): publish everything again.

        Keys of another incarnation are left to expire.
        """
        if incarnation != self._incarnation:
            self._incarnation, self._written = incarnation, NOTHING
        elif self._in_flight is not None:
            self._burn(self._in_flight)
        self._in_flight, self._is_lost = None, False
        self._void_pending()
        self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled; survives outages with growing pauses and a lost lease by waiting for `renew`."""
        backoff = Backoff()
        while True:
            try:
                await self._write(self._next_entry())
            except OUTAGE as error:
                self.counters.outages += 1
                _log.warning("index not written", extra={"fields": {"worker": self._worker, "why": str(error)}})
                await backoff.pause()
                continue
            backoff.reset()
            if self._is_lost or self.is_idle:
                await self._wait()
            if len(self._pending) < self._entry_blocks:
                await asyncio.sleep(_LINGER_S)  # lets the changes of one engine step gather in one entry

    def _note(self, item: bytes, is_stored: bool) -> None:
        if (item in self._held) is is_stored:
            return
        if is_stored:
            self._held.add(item)
        else:
            self._held.remove(item)
        if self._must_reset:
            return
        if self._pending.get(item) is (not is_stored):
            del self._pending[item]
        else:
            self._pending[item] = is_stored

    def _void_pending(self) -> None:
        self._pending.clear()
        self._must_reset = True

    def _next_entry(self) -> _PublishCall:
        if self._in_flight is None and not self._is_lost:
            if self._must_reset:
                self._must_reset = False
                self._pending = dict.fromkeys(self._held, True)
                self._in_flight = self._take(Mode.RESET, Position(self._written.seq, 0, 0))
            elif self._pending:
                self._in_flight = self._take(Mode.APPEND, self._written)
        return self._in_flight or _PublishCall(Mode.CHECK, self._written)

    def _take(self, mode: Mode, before: Position) -> _PublishCall:
        """Move up to an entry's worth of changes out of pending. Newest first: net changes commute, popitem is O(1)."""
        stored: list[bytes] = []
        removed: list[bytes] = []
        for _ in range(min(self._entry_blocks, len(self._pending))):
            item, is_stored = self._pending.popitem()
            (stored if is_stored else removed).append(item)
        digest = fold(fold(before.digest, stored), removed)
        after = Position(before.seq + 1, before.blocks + len(stored) - len(removed), digest)
        return _PublishCall(mode, after, b"".join(stored), b"".join(removed))

    async def _write(self, entry: _PublishCall) -> None:
        incarnation, until_ms = self._incarnation, self._until_ms()
        if until_ms is None:  # given up meanwhile: publishes no more, even if nothing there would refuse it
            self._settle(entry, _LATE)
            return
        result = await self._script(
            keys=[
                self._keys.lease(Member.WORKER, self._worker),
                self._keys.events(self._worker, incarnation),
                self._keys.blocks(self._worker, incarnation),
            ],
            args=[
                incarnation, entry.mode, entry.after.seq, self._stream_entries, int(INDEX_TTL_S * 1000),
                entry.stored, entry.removed, entry.after.check(), until_ms,
            ],
        )  # fmt: skip
        if entry is self._in_flight or (entry.mode is Mode.CHECK and incarnation == self._incarnation):
            self._settle(entry, int(result))  # else renewed meanwhile: the answer is about the past

    def _settle(self, entry: _PublishCall, result: int) -> None:
        was_lost, self._is_lost = self._is_lost, result in (_LOST, _LATE)
        if result == entry.after.blocks:
            self._in_flight, self._written = None, entry.after
            self.counters.entries += entry.mode is not Mode.CHECK
            self.counters.republished += entry.mode is Mode.RESET
            return
        # Lost lease, vanished or trimmed keys, or a set that is not ours any more: start over with everything.
        self._in_flight = None
        self._void_pending()
        self._burn(entry)
        if self._is_lost:
            self.counters.refused += 1
            if not was_lost:
                _log.warning("index refused: the lease is lost", extra={"fields": {"worker": self._worker}})
        else:
            self.counters.gaps += 1
            _log.warning("index lost in Redis, publishing again", extra={"fields": {"worker": self._worker}})

    def _burn(self, entry: _PublishCall) -> None:
        """Never use this sequence number again: the entry may be in the stream."""
        self._written = self._written._replace(seq=entry.after.seq)

    async def _wait(self) -> None:
        """Until something is offered (not while the lease is lost), at most `check_s`."""
        if self._is_lost:
            self._wake.clear()
        try:
            async with asyncio.timeout(self._check_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
