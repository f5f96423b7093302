"""A router's replica of the index: follows every worker's stream, checks it against heartbeats, answers lookups.

For each worker: read position and set in one transaction into a fresh slot, make it live, then tail the stream. A gap
in the sequence or a digest that differs means that something was missed: read again. Without Redis the last state
stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

from tandem.core.block_hash import BlockHash
from tandem.core.clock import Clock, MonotonicClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.statestore.connection import OUTAGE, Backoff
from tandem.statestore.index.block_table import BlockTable
from tandem.statestore.index.events import MEMBER_BYTES, NOTHING, Position, fold, members
from tandem.statestore.keys import Keys, Member

_log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES: Final = 512 * 1024 * 1024
_BLOCK_MS: Final = 200
"""Wait of a tailing read; new workers are followed that much later at most."""
_ENTRIES_A_READ: Final = 16
_CHECK_S: Final = 1.0
_CHUNK_BLOCKS: Final = 4096
"""Work between two turns of the event loop: about a millisecond."""
_FIRST_DELAY_S, _LAST_DELAY_S = 0.05, 5.0


@dataclass(slots=True)
class ReplicaCounters:
    """Cumulative since construction; `reads` are whole sets read, `rereads` those among them after the first.

    `unreadable`: entries and heartbeats of another form, from a worker of another version or foreign.
    """

    gaps: int = 0
    mismatches: int = 0
    unreadable: int = 0
    reads: int = 0
    rereads: int = 0
    events: int = 0
    outages: int = 0


@dataclass(slots=True, eq=False)
class _Follower:
    """State of one incarnation of one worker. `bit` None = nothing read yet."""

    worker: WorkerId
    incarnation: Incarnation
    events_key: str
    blocks_key: str
    bit: int | None = None
    at: Position = NOTHING
    must_read: bool = True
    read_at_s: float = float("-inf")
    """Earliest time of the next read."""
    delay_s: float = _FIRST_DELAY_S
    behind_at: int = -1
    """Sequence number at which the last heartbeat check found this replica behind."""


class IndexReplica:
    """The replica. Lookups, `set_workers` and `run` belong to one event loop. Its size is bounded by `max_bytes`."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        clock: Clock | None = None,
        check_s: float = _CHECK_S,
    ) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._keys, self._clock, self._check_s = keys, clock or MonotonicClock(), check_s
        self._table = BlockTable(max_bytes)
        self._followers: dict[WorkerId, _Follower] = {}
        self._changed = asyncio.Event()
        self._checked_s = float("-inf")
        self.counters = ReplicaCounters()

    @property
    def entries(self) -> int:
        """Blocks known, over all workers and groups."""
        return self._table.entries

    @property
    def memory_bytes(self) -> int:
        """Memory of all blocks known; at most about `max_bytes`."""
        return self._table.memory_bytes

    @property
    def evicted(self) -> int:
        """Blocks dropped so far because of `max_bytes`."""
        return self._table.evicted

    @property
    def positions(self) -> dict[WorkerId, Position]:
        """Position up to which each worker's stream was applied; workers that were not read yet are left out."""
        return {f.worker: f.at for f in self._followers.values() if f.bit is not None}

    def set_workers(self, workers: Mapping[WorkerId, Incarnation]) -> None:
        """Follow exactly these. All others, and any other incarnation, are out of lookups when this returns."""
        for follower in list(self._followers.values()):
            if workers.get(follower.worker) != follower.incarnation:
                del self._followers[follower.worker]
                if follower.bit is not None:
                    self._table.close_slot(follower.bit)
        for worker, incarnation in workers.items():
            if worker not in self._followers:
                events, blocks = self._keys.events(worker, incarnation), self._keys.blocks(worker, incarnation)
                self._followers[worker] = _Follower(worker, incarnation, events, blocks)
        self._changed.set()

    def lookup(self, hashes: Sequence[BlockHash], group: int = 0) -> dict[WorkerId, int]:
        """Return the number of leading blocks of `hashes` that each worker holds in that KV group; workers with none
        are left out."""
        return self._table.lookup(hashes, group)

    async def unique_blocks(self) -> dict[WorkerId, int]:
        """Blocks of the first KV group that one worker alone holds, by worker. Walks the whole table, part by part."""
        found: Counter[WorkerId] = Counter()
        for part in range(self._table.parts):
            found.update(self._table.unique_in(part))
            await asyncio.sleep(0)
        return dict(found)

    def holdings(self, worker: WorkerId) -> set[tuple[int, BlockHash]]:
        """(group, hash) of all blocks that `worker` is believed to hold; slow, for audits and tests."""
        return self._table.blocks_of(worker)

    def check_integrity(self) -> None:
        """Raise AssertionError when the replica contradicts itself; slow, for idle times and tests."""
        self._table.check_integrity()

    async def run(self) -> None:
        """Follow until cancelled; survives outages with growing pauses."""
        backoff = Backoff()
        while True:
            try:
                await self._turn()
            except OUTAGE as error:
                self.counters.outages += 1
                _log.warning("index not readable", extra={"fields": {"why": str(error)}})
                await backoff.pause()
            else:
                backoff.reset()

    async def _turn(self) -> None:
        now_s = self._clock.now_s()
        for follower in list(self._followers.values()):
            if follower.must_read and follower.read_at_s <= now_s:
                await self._read_whole(follower)
        if now_s - self._checked_s >= self._check_s:
            self._checked_s = now_s
            await self._check_beats()
        if self._table.sweep(_CHUNK_BLOCKS):
            await self._tail(block_ms=1)
        else:
            await self._tail(_BLOCK_MS)

    # ---- whole sets

    async def _read_whole(self, follower: _Follower) -> None:
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.xrevrange(follower.events_key, count=1)
            pipeline.smembers(follower.blocks_key)
            last, blocks = await pipeline.execute()
        if self._followers.get(follower.worker) is not follower:
            return
        self.counters.reads += 1
        self.counters.rereads += follower.bit is not None
        bit = self._table.open_slot()
        digest = 0
        try:
            everything = [item for item in blocks if len(item) == MEMBER_BYTES]
            for start in range(0, len(everything), _CHUNK_BLOCKS):
                chunk = everything[start : start + _CHUNK_BLOCKS]
                digest = fold(digest, chunk)
                self._table.add(bit, members(b"".join(chunk)))
                await asyncio.sleep(0)
        except BaseException:
            self._table.close_slot(bit)
            raise
        if self._followers.get(follower.worker) is not follower:
            self._table.close_slot(bit)
            return
        self._show(follower, bit)
        follower.at = Position(_sequence(last[0][0]) if last else 0, len(blocks), digest)
        follower.must_read, follower.behind_at = False, -1
        if last and last[0][1].get(b"k") != follower.at.check():
            self.counters.mismatches += 1
            self._schedule_resync(follower)

    def _show(self, follower: _Follower, bit: int) -> None:
        if follower.bit is not None:
            self._table.close_slot(follower.bit)
        self._table.go_live(bit, follower.worker)
        follower.bit = bit

    def _schedule_resync(self, follower: _Follower) -> None:
        """An entry was missed: read the whole set again, soon at first, then ever later until a check succeeds."""
        follower.must_read = True
        follower.read_at_s = self._clock.now_s() + follower.delay_s
        follower.delay_s = min(_LAST_DELAY_S, follower.delay_s * 2)

    # ---- tails

    async def _tail(self, block_ms: int) -> None:
        followed = {f.events_key: f for f in self._followers.values() if not f.must_read}
        if not followed:
            await self._wait_for_work(block_ms / 1000)
            return
        positions = {key: f"{f.at.seq}-0" for key, f in followed.items()}
        streams = await self._redis.xread(positions, count=_ENTRIES_A_READ, block=block_ms)
        for key, entries in streams or ():
            follower = followed[key.decode()]
            for entry_id, fields in entries:
                if follower.must_read or self._followers.get(follower.worker) is not follower:
                    break
                self._apply(follower, _sequence(entry_id), fields)
            await asyncio.sleep(0)

    async def _wait_for_work(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def _apply(self, follower: _Follower, seq: int, fields: Mapping[bytes, bytes]) -> None:
        entry = _entry(fields)
        if entry is None:
            self.counters.unreadable += 1
            self._schedule_resync(follower)
            return
        if entry.is_reset:
            self._show(follower, self._table.open_slot())
            blocks, digest = 0, 0
        elif seq == follower.at.seq + 1:
            _, blocks, digest = follower.at
        else:
            self.counters.gaps += 1
            self._schedule_resync(follower)
            return
        stored, removed = entry.stored, entry.removed
        assert follower.bit is not None
        self._table.remove(follower.bit, members(removed))
        self._table.add(follower.bit, members(stored))
        digest = fold(fold(digest, _pieces(stored)), _pieces(removed))
        follower.at = Position(seq, blocks + (len(stored) - len(removed)) // MEMBER_BYTES, digest)
        self.counters.events += 1
        if entry.check != follower.at.check():
            self.counters.mismatches += 1
            self._schedule_resync(follower)

    # ---- heartbeats

    async def _check_beats(self) -> None:
        followers = [f for f in self._followers.values() if not f.must_read]
        if not followers:
            return
        async with self._redis.pipeline(transaction=False) as pipeline:
            for follower in followers:
                key = self._keys.lease(Member.WORKER, follower.worker)
                pipeline.hmget(key, "incarnation", "seq", "count", "digest")
            rows = await pipeline.execute()
        for follower, (incarnation, *values) in zip(followers, rows, strict=True):
            if incarnation != b"%d" % follower.incarnation:
                continue
            said = _position(values)
            if said is None:
                self.counters.unreadable += 1
            else:
                self._compare(follower, said)

    def _compare(self, follower: _Follower, said: Position) -> None:
        if said == follower.at:
            follower.delay_s, follower.behind_at = _FIRST_DELAY_S, -1
        elif said.seq == follower.at.seq:
            self.counters.mismatches += 1
            self._schedule_resync(follower)
        elif said.seq > follower.at.seq:
            if follower.behind_at == follower.at.seq:  # no step further since the last check
                self.counters.gaps += 1
                self._schedule_resync(follower)
            follower.behind_at = follower.at.seq


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of a stream; `stored` and `removed` are whole members."""

    is_reset: bool
    stored: bytes
    removed: bytes
    check: bytes


def _entry(fields: Mapping[bytes, bytes]) -> _Entry | None:
    """None if it is not of this form."""
    mode, stored, removed, check = (fields.get(name) for name in (b"m", b"s", b"r", b"k"))
    if mode not in (b"reset", b"append") or stored is None or removed is None or check is None:
        return None
    if len(stored) % MEMBER_BYTES or len(removed) % MEMBER_BYTES:
        return None
    return _Entry(mode == b"reset", stored, removed, check)


def _position(values: Sequence[bytes | None]) -> Position | None:
    """Read the last published position out of a heartbeat; None if that cannot be read."""
    seq, count, digest = values
    if seq is None or count is None or digest is None:
        return None
    try:
        return Position(int(seq), int(count), int(digest, 16))
    except ValueError:
        return None


def _sequence(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])


def _pieces(blob: bytes) -> Iterator[bytes]:
    return (blob[i : i + MEMBER_BYTES] for i in range(0, len(blob), MEMBER_BYTES))
