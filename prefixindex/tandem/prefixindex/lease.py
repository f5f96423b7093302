"""Leases: proof that a worker or router lives, held by beating, fenced by the equality of incarnations.

A lease is one hash with the holder's incarnation, its record and its last beat; the server lets it expire. Whoever
registers takes over: the holder before it finds another incarnation at its next beat and must register anew.
"""

from __future__ import annotations

from typing import Any, Final

from redis.asyncio import Redis

from tandem.core.liveness import LEASE_S
from tandem.prefixindex.connection import OUTAGE, no_answer
from tandem.prefixindex.keys import Keys, Member
from tandem.prefixindex.records import Record, RouterRecord, WorkerRecord, to_json

TOMBSTONE_S: Final = 4 * LEASE_S
NO_INCARNATION: Final = b"0"

_REGISTER = """
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'record', ARGV[2],
           'beat', 0, 'seq', 0, 'count', 0, 'digest', '0')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""
_BEAT = """
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'seq', ARGV[3], 'count', ARGV[4], 'digest', ARGV[5])
redis.call('HINCRBY', KEYS[1], 'beat', 1)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
_AMEND = """
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'record', ARGV[2])
return 1
"""
# Leaves a tombstone (incarnation 0, and who left in place of the record): watchers know at once, and late beats and
# events find themselves fenced.
_DEREGISTER = """
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'incarnation', 0, 'record', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""


class _Lease:
    """One member's lease. Every call raises UnavailableError when Redis does not answer (then nothing is known)."""

    def __init__(self, redis: Redis, keys: Keys, kind: Member, lease_s: float) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._keys, self._kind, self._lease_s = keys, kind, lease_s
        self._record: Record | None = None
        self._register = redis.register_script(_REGISTER)
        self._beat = redis.register_script(_BEAT)
        self._amend = redis.register_script(_AMEND)
        self._deregister = redis.register_script(_DEREGISTER)

    async def _take(self, record: Record) -> None:
        key = self._keys.lease(self._kind, record.member)
        try:
            await self._register(keys=[key], args=[record.incarnation, to_json(record), self._lease_ms])
            await self._redis.sadd(self._keys.members(self._kind), record.member)
            await self._redis.publish(self._keys.registry_channel(self._kind), record.member)
        except OUTAGE as error:
            raise no_answer(error) from error
        self._record = record  # not before: who is told of a failure still beats for the record before

    async def _hold(self, seq: int, count: int, digest: int) -> bool:
        record = self._held()
        key = self._keys.lease(self._kind, record.member)
        try:
            is_held = await self._beat(
                keys=[key], args=[record.incarnation, self._lease_ms, seq, count, format(digest, "x")]
            )
            if is_held:  # the set of members may have been flushed or forgot us
                await self._redis.sadd(self._keys.members(self._kind), record.member)
        except OUTAGE as error:
            raise no_answer(error) from error
        return bool(is_held)

    async def _change(self, record: Record) -> bool:
        key = self._keys.lease(self._kind, record.member)
        try:
            is_held = bool(await self._amend(keys=[key], args=[record.incarnation, to_json(record)]))
            if is_held:
                self._record = record
                await self._redis.publish(self._keys.registry_channel(self._kind), record.member)
        except OUTAGE as error:
            raise no_answer(error) from error
        return is_held

    async def announce(self) -> None:
        """Have watchers look now. UnavailableError: Redis does not answer."""
        try:
            await self._redis.publish(self._keys.registry_channel(self._kind), self._held().member)
        except OUTAGE as error:
            raise no_answer(error) from error

    async def deregister(self) -> bool:
        """Give the lease up; False when it was lost before. Watchers see this at once instead of after a lapse."""
        record = self._held()
        key = self._keys.lease(self._kind, record.member)
        try:
            was_held = await self._deregister(keys=[key], args=[record.incarnation, int(TOMBSTONE_S * 1000)])
            await self._redis.publish(self._keys.registry_channel(self._kind), record.member)
        except OUTAGE as error:
            raise no_answer(error) from error
        return bool(was_held)

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)

    def _held(self) -> Record:
        if self._record is None:
            raise RuntimeError("register first")
        return self._record


class WorkerLease(_Lease):
    """A worker's lease of `lease_s` seconds. One task uses it: register, beat every 0.5 s, deregister."""

    def __init__(self, redis: Redis, keys: Keys, *, lease_s: float = LEASE_S) -> None:
        super().__init__(redis, keys, Member.WORKER, lease_s)

    async def register(self, record: WorkerRecord) -> None:
        """Take the lease for `record.incarnation`, from whoever held it. UnavailableError: Redis does not answer."""
        await self._take(record)

    async def amend(self, record: WorkerRecord) -> bool:
        """Say something else of the incarnation that holds the lease; watchers know at once. False: it does not hold it
        any more. UnavailableError: Redis does not answer."""
        return await self._change(record)

    async def beat(self, seq: int, count: int, digest: int) -> bool:
        """Hold on, and say what was published last (see BlockEventPublisher.position).

        False: the lease lapsed or somebody took it; stop sending and register with a new incarnation.
        UnavailableError: Redis does not answer; the lease may still be ours.
        """
        return await self._hold(seq, count, digest)


class RouterLease(_Lease):
    """A router's lease, by the same rules. Nobody watches routers yet: what lists them is issues 6 and 7."""

    def __init__(self, redis: Redis, keys: Keys, *, lease_s: float = LEASE_S) -> None:
        super().__init__(redis, keys, Member.ROUTER, lease_s)

    async def register(self, record: RouterRecord) -> None:
        """Take the lease for `record.incarnation`. UnavailableError: Redis does not answer."""
        await self._take(record)

    async def beat(self) -> bool:
        """Hold on; False = lost, register anew. UnavailableError: Redis does not answer."""
        return await self._hold(0, 0, 0)
