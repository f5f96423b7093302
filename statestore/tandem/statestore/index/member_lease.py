"""Leases: proof that a worker or router lives, held by beating, fenced by the equality of incarnations.

A lease is one hash with the holder's incarnation, its record and its last beat; the server lets it expire. Registering
takes over: the previous holder finds another incarnation at its next beat and must register anew.

An old dump may put back the lease of a holder that stood still meanwhile, and then the incarnations are equal again. So
every write carries the time, by the server's clock, until which its writer held the lease; later ones are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import UnavailableError
from tandem.core.lease_timing import BEAT_S, LEASE_S
from tandem.statestore.connection import raising_unavailable
from tandem.statestore.keys import Keys, Member
from tandem.statestore.records import Record, RouterRecord, WorkerRecord, to_json
from tandem.statestore.when_full import ADD_TO_SET, HASH_FIRST

TOMBSTONE_S: Final = 4 * LEASE_S
NO_INCARNATION: Final = b"0"

_QUICK_S: Final = BEAT_S / 5
"""An answer within this time gives the server's present clock; a slower one may be an old one."""

# The first write takes no memory, so a full Redis lets the rest pass (see when_full).
# Every script answers with the time of the server in ms: positive if it did its work, negative if the lease was
# over by then (ARGV[1], in ms; 0 = no limit). 0: another incarnation holds the lease, or none.
_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if tonumber(ARGV[1]) > 0 and now >= tonumber(ARGV[1]) then return -now end
"""
_IF_HELD = "if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[2] then return 0 end\n"
_REGISTER = f"""{_NOW}
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'record', ARGV[3],
           'beat', 0, 'seq', 0, 'count', 0, 'digest', '0')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return now
"""
_BEAT = f"""{_NOW}{_IF_HELD}
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('HSET', KEYS[1], 'seq', ARGV[4], 'count', ARGV[5], 'digest', ARGV[6])
redis.call('HINCRBY', KEYS[1], 'beat', 1)
return now
"""
_AMEND = f"""{_NOW}{_IF_HELD}{HASH_FIRST}
redis.call('HSET', KEYS[1], 'record', ARGV[3])
return now
"""
# Leaves a tombstone (incarnation 0, and the member in place of the record): watchers know at once, and late beats and
# events find themselves fenced.
_DEREGISTER = """
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[1], 'incarnation', 0, 'record', ARGV[1])
return 1
"""


@dataclass(slots=True)
class LeaseCounters:
    """Writes refused since construction: `late`, of a holder with a lease that was over; `fenced`, as another
    incarnation held it, or none."""

    late: int = 0
    fenced: int = 0


class _MemberLease:
    """One member's lease. Every call raises UnavailableError when Redis does not answer (then nothing is known), or
    was reached after `held_until` (then nothing was written)."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        kind: Member,
        lease_s: float,
        clock: Clock | None = None,
        held_until: Callable[[], float] | None = None,
    ) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._clock, self._held_until = clock or MonotonicClock(), held_until
        self._ahead_s: float | None = None  # the server's clock minus ours; rather less than the true value
        self.counters = LeaseCounters()
        self._keys, self._kind, self._lease_s = keys, kind, lease_s
        self._record: Record | None = None
        self._register = redis.register_script(_REGISTER)
        self._beat = redis.register_script(_BEAT)
        self._amend = redis.register_script(_AMEND)
        self._enrol: Any = redis.register_script(ADD_TO_SET)
        self._deregister = redis.register_script(_DEREGISTER)

    @property
    def deadline_ms(self) -> int:
        """Time by the server's clock at which the lease ends, in ms, unless it is prolonged; 0 = not known."""
        if self._held_until is None or self._ahead_s is None:
            return 0
        return int((self._held_until() + self._ahead_s) * 1000)

    async def _take(self, record: Record) -> None:
        key = self._keys.lease(self._kind, record.member)
        is_known = self._record is not None and self._record.incarnation == record.incarnation
        deadline_ms = self.deadline_ms if is_known else 0  # a new incarnation cannot have been given up
        with raising_unavailable():
            await self._ask(self._register, key, deadline_ms, record.incarnation, to_json(record), self._lease_ms)
            await self._enrol(keys=[self._keys.members(self._kind)], args=[record.member])
            await self._redis.publish(self._keys.registry_channel(self._kind), record.member)
        self._record = record  # not before: after a failure the beats go on for the record before

    async def _hold(self, seq: int, count: int, digest: int, over: Redis | None = None) -> bool:
        record, redis = self._held(), over or self._redis
        key = self._keys.lease(self._kind, record.member)
        with raising_unavailable():
            published = seq, count, format(digest, "x")
            is_held = await self._ask(
                self._beat, key, self.deadline_ms, record.incarnation, self._lease_ms, *published, over=redis
            )
            if is_held:  # the set of members may have been flushed, or have forgotten this one
                with suppress(OutOfMemoryError):
                    await self._enrol(keys=[self._keys.members(self._kind)], args=[record.member], client=redis)
        return is_held

    async def _change(self, record: Record) -> bool:
        key = self._keys.lease(self._kind, record.member)
        with raising_unavailable():
            is_held = await self._ask(self._amend, key, self.deadline_ms, record.incarnation, to_json(record))
            if is_held:
                self._record = record
                await self._redis.publish(self._keys.registry_channel(self._kind), record.member)
        return is_held

    async def _ask(self, script: Any, key: str, deadline_ms: int, *args: object, over: Redis | None = None) -> bool:
        """True if it was done; False: another incarnation holds the lease, or none. UnavailableError: too late."""
        asked_s = self._clock.now_s()
        answer = int(await script(keys=[key], args=[deadline_ms, *args], client=over))
        if answer:
            self._learn(abs(answer) / 1000, asked_s)
        self.counters.fenced += answer == 0
        if answer < 0:
            self.counters.late += 1
            raise UnavailableError("Redis was reached too late", why="the lease was over by then, by its clock")
        return answer > 0

    def _learn(self, server_s: float, asked_s: float) -> None:
        """Take in the server's clock, which was read between `asked_s` and now."""
        now_s = self._clock.now_s()
        ahead_s = server_s - now_s
        if self._ahead_s is None or now_s - asked_s < _QUICK_S or ahead_s > self._ahead_s:
            self._ahead_s = ahead_s

    async def announce(self) -> None:
        """Have watchers look now. UnavailableError: Redis does not answer."""
        with raising_unavailable():
            await self._redis.publish(self._keys.registry_channel(self._kind), self._held().member)

    async def deregister(self) -> bool:
        """Give the lease up; False when it was lost before. Watchers see this at once instead of after a lapse."""
        record = self._held()
        key = self._keys.lease(self._kind, record.member)
        with raising_unavailable():
            was_held = await self._deregister(keys=[key], args=[record.incarnation, int(TOMBSTONE_S * 1000)])
            await self._redis.publish(self._keys.registry_channel(self._kind), record.member)
        return bool(was_held)

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)

    def _held(self) -> Record:
        if self._record is None:
            raise RuntimeError("register first")
        return self._record


class WorkerLease(_MemberLease):
    """A worker's lease of `lease_s` seconds. One task uses it: register, beat every 0.5 s, deregister."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        *,
        lease_s: float = LEASE_S,
        clock: Clock | None = None,
        held_until: Callable[[], float] | None = None,
    ) -> None:
        """`held_until`: until when, by `clock`, the worker holds its lease: later writes are refused by Redis, but for
        a new incarnation. None = no limit."""
        super().__init__(redis, keys, Member.WORKER, lease_s, clock, held_until)

    async def register(self, record: WorkerRecord) -> None:
        """Take the lease for `record.incarnation`, from any holder. UnavailableError: Redis does not answer."""
        await self._take(record)

    async def amend(self, record: WorkerRecord) -> bool:
        """Change the record of the incarnation that holds the lease; watchers know at once. False: it does not hold it
        any more. UnavailableError: Redis does not answer."""
        return await self._change(record)

    async def beat(self, seq: int, count: int, digest: int, *, over: Redis | None = None) -> bool:
        """Renew the lease, and report the last published position (see BlockEventPublisher.position). `over`: a client
        of another event loop, which beats while that of this lease stands.

        False: the lease lapsed or was taken; stop sending and register with a new incarnation. UnavailableError: Redis
        does not answer; the lease may still be ours.
        """
        return await self._hold(seq, count, digest, over)


class RouterLease(_MemberLease):
    """A router's lease, by the same rules. Routers are not watched yet."""

    def __init__(self, redis: Redis, keys: Keys, *, lease_s: float = LEASE_S) -> None:
        super().__init__(redis, keys, Member.ROUTER, lease_s)

    async def register(self, record: RouterRecord) -> None:
        """Take the lease for `record.incarnation`. UnavailableError: Redis does not answer."""
        await self._take(record)

    async def beat(self) -> bool:
        """Renew it; False = lost, register anew. UnavailableError: Redis does not answer."""
        return await self._hold(0, 0, 0)
