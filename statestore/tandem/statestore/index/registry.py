"""Members of the cluster, as a watcher sees them: it polls the list, and judges lapses on its own clock.

A missing key is no lapse by itself, and neither is an outage of Redis: a member is gone when it deregistered, when
another incarnation took its place, or when no path brought a new beat of it for one lease time. An unreadable record,
of another version or foreign, is no member.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from tandem.core.clock import Clock, MonotonicClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.lease_timing import BEAT_S, LEASE_S
from tandem.statestore.connection import OUTAGE, Backoff
from tandem.statestore.index.member_lease import NO_INCARNATION, WorkerLease
from tandem.statestore.keys import Keys, Member, is_name
from tandem.statestore.pubsub import Wakeups
from tandem.statestore.records import WorkerRecord

__all__ = [
    "LeaseBook",
    "LeaseRow",
    "RegistryWatcher",
    "WorkerLease",
    "WorkerRecord",
]

_log = logging.getLogger(__name__)
_FORGET_S = 60.0
_FRESH_S = 2 * BEAT_S
"""A member seen so lately is alive: another one under the same id has to beat before it is believed."""
_MAX_ENDED = 4096
_HAS_LEFT = 1 << 62
"""In place of the last beat of a member that deregistered."""
_BATCH = 256


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease as Redis has it. `record` is undecoded JSON. `incarnation` 0: its holder left, and `record` names it."""

    incarnation: int
    beat: int
    record: bytes


@dataclass(slots=True)
class _CachedRecord:
    record: WorkerRecord
    raw: bytes
    beat: int
    seen_s: float


class LeaseBook:
    """The judgement alone, without any I/O: rows and times in, living members out.

    A row may come from an old dump of Redis and describe a member that is long gone. So a row that contradicts what is
    known (the member was just seen in another incarnation, or this one has ended) counts once its beat moves on while
    it stands there: two dumps of different age are no sign of life.
    """

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._entries: dict[WorkerId, _CachedRecord] = {}
        self._ended: dict[tuple[WorkerId, int], int] = {}
        """Last beat of each incarnation that lapsed, left, was replaced or cannot be read."""
        self._claims: dict[WorkerId, tuple[int, int]] = {}  # incarnation and beat of rows that contradict what is known
        self._is_out = False
        self._back_s = float("-inf")

    @property
    def records(self) -> dict[WorkerId, WorkerRecord]:
        """All live members."""
        return {member: entry.record for member, entry in self._entries.items()}

    @property
    def is_out(self) -> bool:
        """True if the last result from Redis was an outage."""
        return self._is_out

    def outage(self) -> None:
        """Redis did not answer: no member can be judged until it is back and all had time to beat."""
        self._is_out = True

    def note_beat(self, member: WorkerId, incarnation: Incarnation, now_s: float) -> None:
        """A beat that arrived on another path (a router stream, a control channel)."""
        entry = self._entries.get(member)
        if entry is not None and entry.record.incarnation == incarnation:
            entry.seen_s = max(entry.seen_s, now_s)

    def apply(self, rows: Mapping[WorkerId, LeaseRow | None], now_s: float) -> bool:
        """Take in one complete listing (None = no such key); True when membership or an incarnation changed."""
        if self._is_out:
            self._is_out, self._back_s = False, now_s
        is_changed = False
        for member, row in rows.items():
            if row is not None:
                is_changed |= self._apply_row(member, row, now_s)
            else:
                self._claims.pop(member, None)
        for member, entry in list(self._entries.items()):
            if now_s - max(entry.seen_s, self._back_s) > self._lease_s:
                del self._entries[member]
                self._end(member, entry.record.incarnation, entry.beat)
                is_changed = True
        return is_changed

    def _apply_row(self, member: WorkerId, row: LeaseRow, now_s: float) -> bool:
        entry = self._entries.get(member)
        if row.incarnation == int(NO_INCARNATION):
            self._claims.pop(member, None)
            return self._leave(member, row)
        if entry is not None and entry.record.incarnation == row.incarnation:
            self._claims.pop(member, None)
            if row.beat != entry.beat:
                entry.beat, entry.seen_s = row.beat, now_s
            return row.record != entry.raw and self._amend(entry, row)
        if not self._is_believed(member, row, now_s):
            return False
        try:
            record = _record(member, row)
        except ValueError as error:
            self._end(member, row.incarnation, row.beat)
            _log.warning("unreadable registration", extra={"fields": {"member": member, "why": str(error)}})
            return self._entries.pop(member, None) is not None
        if entry is not None:
            self._end(member, entry.record.incarnation, entry.beat)
        self._ended.pop((member, row.incarnation), None)
        self._claims.pop(member, None)
        self._entries[member] = _CachedRecord(record, row.record, row.beat, now_s)
        return True

    @staticmethod
    def _amend(entry: _CachedRecord, row: LeaseRow) -> bool:
        """Take in a changed record of the same incarnation; an unreadable one changes nothing."""
        entry.raw = row.record
        try:
            record = _record(entry.record.worker, row)
        except ValueError:
            return False
        is_changed, entry.record = record != entry.record, record
        return is_changed

    def _leave(self, member: WorkerId, row: LeaseRow) -> bool:
        entry = self._entries.get(member)
        if entry is None or row.record not in (b"", b"%d" % entry.record.incarnation):
            return False
        del self._entries[member]
        self._end(member, entry.record.incarnation, _HAS_LEFT)
        return True

    def _end(self, member: WorkerId, incarnation: int, beat: int) -> None:
        self._ended.pop((member, incarnation), None)
        self._ended[member, incarnation] = beat
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _is_believed(self, member: WorkerId, row: LeaseRow, now_s: float) -> bool:
        entry, ended_beat = self._entries.get(member), self._ended.get((member, row.incarnation))
        is_other_here = entry is not None and now_s - max(entry.seen_s, self._back_s) < _FRESH_S
        has_ended = ended_beat is not None and row.beat <= ended_beat
        if not is_other_here and not has_ended:
            return True
        claim = self._claims.get(member)
        if claim is not None and claim[0] == row.incarnation and row.beat > claim[1]:
            return True
        self._claims[member] = (row.incarnation, row.beat)
        return False


class RegistryWatcher:
    """Reads the list every `relist_s` seconds and at wake-ups, and notifies one listener of changes."""

    def __init__(self, redis: Redis, keys: Keys, *, clock: Clock | None = None, lease_s: float = LEASE_S) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._keys, self._clock, self._lease_s = keys, clock or MonotonicClock(), lease_s
        self._book = LeaseBook(lease_s)
        self._wakeups = Wakeups(redis, keys.registry_channel(Member.WORKER))
        self._members_key = keys.members(Member.WORKER)
        self._missing: dict[WorkerId, float] = {}
        self._unreadable: set[str] = set()
        self._heard_s: float | None = None

    @property
    def records(self) -> Mapping[WorkerId, WorkerRecord]:
        """All live members, as of the last listing; kept through outages."""
        return self._book.records

    @property
    def is_stale(self) -> bool:
        """True if the list could not be read for a lease time (or never): it is the last known one."""
        return self._heard_s is None or self._clock.now_s() - self._heard_s > self._lease_s

    def note_beat(self, member: WorkerId, incarnation: Incarnation) -> None:
        """Note a beat that arrived on another path; it counts like one in Redis."""
        self._book.note_beat(member, incarnation, self._clock.now_s())

    async def run(
        self, on_change: Callable[[Mapping[WorkerId, WorkerRecord]], None], *, relist_s: float = BEAT_S
    ) -> None:
        """Watch until cancelled. `on_change` gets the complete new list, first when the first listing is there.

        It is called in this task and must not block. Redis outages are survived with a growing pause.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wakeups.run())
            await self._poll(on_change, relist_s)

    async def _poll(self, on_change: Callable[[Mapping[WorkerId, WorkerRecord]], None], relist_s: float) -> None:
        backoff = Backoff()
        is_first = True
        while True:
            try:
                rows = await self._list()
            except OUTAGE as error:
                if not self._book.is_out:
                    _log.warning("registry unreadable", extra={"fields": {"why": str(error)}})
                self._book.outage()
                await backoff.pause()
                continue
            backoff.reset()
            self._heard_s = self._clock.now_s()
            if self._book.apply(rows, self._heard_s) or is_first:
                is_first = False
                on_change(self._book.records)
            await self._forget(rows)
            await self._wakeups.wait(relist_s)

    async def _list(self) -> dict[WorkerId, LeaseRow | None]:
        """List every member that is named or lives; None for one without a lease, or with an unreadable one."""
        named = {raw: _id(raw) for raw in await self._redis.smembers(self._members_key)}
        unreadable = {repr(raw) for raw, member in named.items() if member is None}
        members = list({*self._book.records, *(member for member in named.values() if member is not None)})
        rows: dict[WorkerId, LeaseRow | None] = {}
        for start in range(0, len(members), _BATCH):
            batch = members[start : start + _BATCH]
            async with self._redis.pipeline(transaction=False) as pipeline:
                for member in batch:
                    key = self._keys.lease(Member.WORKER, member)
                    pipeline.hmget(key, "incarnation", "beat", "record")
                leases = await pipeline.execute()
            for member, values in zip(batch, leases, strict=True):
                try:
                    rows[member] = _row(values)
                except ValueError:
                    rows[member] = None
                    unreadable.add(member)
        self._note_unreadable(unreadable)
        return rows

    def _note_unreadable(self, members: set[str]) -> None:
        """Log those that were not unreadable before."""
        new = members - self._unreadable
        self._unreadable = members
        if new:
            _log.warning("unreadable leases", extra={"fields": {"members": sorted(new)[:10]}})

    async def _forget(self, rows: Mapping[WorkerId, LeaseRow | None]) -> None:
        """Drop ids from the set when their key is missing for a minute; should one return, its next beat adds it
        again."""
        now_s = self._clock.now_s()
        missing = [member for member, row in rows.items() if row is None]
        self._missing = {member: self._missing.get(member, now_s) for member in missing}
        old = [member for member, since_s in self._missing.items() if now_s - since_s > _FORGET_S]
        if old:
            try:
                await self._redis.srem(self._members_key, *old)
            except OUTAGE:
                return  # next time
            _log.info("forgot members", extra={"fields": {"members": len(old)}})


def _record(member: WorkerId, row: LeaseRow) -> WorkerRecord:
    """Raises ValueError for an unreadable record, or another member's."""
    record = WorkerRecord.from_json(row.record)
    if (record.member, record.incarnation) != (member, row.incarnation):
        raise ValueError(f"a record of {record.member!r}, incarnation {record.incarnation}")
    return record


def _id(raw: bytes) -> WorkerId | None:
    """None if it is no valid id: no lease can have such a key."""
    name = raw.decode(errors="replace")
    return WorkerId(name) if is_name(name) else None


def _row(values: Iterable[bytes | None]) -> LeaseRow | None:
    """None without a lease. Raises ValueError for one that cannot be read."""
    incarnation, beat, record = values
    if incarnation is None:
        return None
    return LeaseRow(int(incarnation), int(beat or 0), record or b"")
