"""Checks of the cluster's Redis: does it persist its data, and does the registry name workers that are gone?"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tandem.clusterctl.doctor.findings import Check, Finding, SkipError, error, ok, size, skipped, warning
from tandem.core.errors import StartupError
from tandem.core.urls import redacted
from tandem.statestore.connection import connect
from tandem.statestore.keys import Keys, Member
from tandem.statestore.memory import memory_of
from tandem.statestore.records import WorkerRecord

_SKEW_S = 2.0
_KNOCK_S = 1.0
_FULL = 0.8
_UNASKED = "it could not be asked"
_ANY = (StartupError, RedisError)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisChecks:
    """`url`: with its password; "" = no Redis is known, so nothing is checked; `trouble` gives the reason
    where there should be one."""

    url: str
    cluster: str
    trouble: str = ""

    def checks(self) -> Sequence[tuple[str, Check]]:
        return (
            ("redis", self.answers),
            ("redis-eviction", self.eviction),
            ("redis-memory", self.memory),
            ("redis-persistence", self.persistence),
            ("redis-clock", self.clock),
            ("registry", self.registry),
        )

    def answers(self) -> Iterator[Finding]:
        if self.trouble:
            yield error(self.trouble, "stop the cluster and start it again: `up` writes that file")
            return
        if not self.url:
            yield skipped("no cluster was started here; name one with --redis")
            return
        try:
            version = self._ask(lambda redis: _version(redis))
        except StartupError as found:
            yield error(f"{found.what}: {found.why}", found.todo or "start it, or correct its URL")
            return
        yield ok(f"{redacted(self.url)} answers, version {version}")

    def eviction(self) -> Iterator[Finding]:
        policy = self._setting("maxmemory-policy")
        if policy == "noeviction":
            yield ok(policy)
        else:
            what = f"maxmemory-policy is {policy}: with little memory it drops keys, desired state and batches"
            yield error(what, "`CONFIG SET maxmemory-policy noeviction`, and in redis.conf")

    def memory(self) -> Iterator[Finding]:
        found = self._asked(memory_of, _ANY)
        if not found.most:
            what = f"it has no maxmemory and uses {size(found.used)}: when memory ends, it is killed with all it knows"
            yield warning(what, "`CONFIG SET maxmemory`, 60 to 70 % of what it may use, and in redis.conf")
            return
        what = f"{size(found.used)} of {size(found.most)} are used, {found.used / found.most:.0%}"
        if found.used < _FULL * found.most:
            yield ok(what)
        else:
            fix = (
                "see docs/operate/alerts.md, TandemRedisFull: when it is full, nothing more that clients leave is kept"
            )
            yield warning(what, fix)

    def persistence(self) -> Iterator[Finding]:
        if self._setting("appendonly") == "yes":
            yield ok("appendonly is yes")
        else:
            what = "appendonly is no: after its restart keys, desired state, stored responses and batches are gone"
            yield error(what, "`CONFIG SET appendonly yes`, and in redis.conf")

    def clock(self) -> Iterator[Finding]:
        seconds, micros = self._asked(lambda redis: redis.time())
        skew_s = float(seconds) + float(micros) / 1e6 - time.time()
        if abs(skew_s) > _SKEW_S:
            yield warning(f"its clock differs from this machine's by {skew_s:.1f} s", "run NTP on both")
        else:
            yield ok(f"its clock differs from this machine's by {skew_s * 1000:.0f} ms")

    def registry(self) -> Iterator[Finding]:
        rows = self._asked(self._rows)
        is_clean = True
        for worker, record in sorted(rows.items()):
            if record is None:
                is_clean = False
                what = f"{worker} is listed and holds no lease: it ended without signing off"
                yield warning(what, "routers pass over it; it goes after a minute while a router runs")
            elif not _listens(record.address):
                is_clean = False
                what = f"{worker} holds a lease, and no process listens at its address {record.address}"
                fix = "if that is another machine, open its ports to this one; else it goes with its lease"
                yield error(what, fix)
        if is_clean:
            yield ok(f"{len(rows)} workers, each with a lease and a port that answers")

    def _setting(self, name: str) -> str:
        """Return a setting; SkipError if it cannot be read: managed servers of a cloud forbid CONFIG."""
        found = str(self._asked(lambda redis: redis.config_get(name), _ANY).get(name, ""))
        if not found:
            raise SkipError(_UNASKED)
        return found

    async def _rows(self, redis: Any) -> dict[str, WorkerRecord | None]:
        """Return every registered worker with the content of its lease, or None if it holds none."""
        keys = Keys(self.cluster)
        rows: dict[str, WorkerRecord | None] = {}
        for name in await redis.smembers(keys.members(Member.WORKER)):
            worker = name.decode()
            record = await redis.hget(keys.lease(Member.WORKER, worker), "record")
            try:
                rows[worker] = WorkerRecord.from_json(record) if record else None
            except ValueError:  # a tombstone: it signed off
                continue
        return rows

    def _asked(
        self, question: Callable[[Any], Awaitable[T]], errors: tuple[type[Exception], ...] = (StartupError,)
    ) -> T:
        """Return the result; SkipError for `errors`, by default if Redis cannot be asked."""
        try:
            return self._ask(question)
        except errors:
            raise SkipError(_UNASKED) from None

    def _ask(self, question: Callable[[Any], Awaitable[T]]) -> T:
        """Return the result; StartupError if Redis cannot be asked."""

        async def ask() -> T:
            redis: Redis = await connect(self.url)
            try:
                return await question(redis)
            finally:
                await redis.aclose()

        if not self.url:
            raise StartupError("no Redis is known")
        return asyncio.run(ask())


async def _version(redis: Any) -> str:
    return str((await redis.info("server")).get("redis_version", "unknown"))


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S):
            return True
    except (OSError, ValueError):
        return False
