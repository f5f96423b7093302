"""Where the durable store keeps one kind of what clients leave: texts by id, ids by tenant and by when they are due.

What a text says, and what is behind it, is the business of files and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.prefixindex.connection import OUTAGE, no_answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """`records`: key of the hash, id → text; `due`: of the set, id → second in which it may be forgotten; `listing`: of
    a tenant's set, id → second of creation; `tenant_of`: whose a text is.

    Calls raise UnavailableError when Redis does not answer.
    """

    redis: Any
    """Its stubs mix plain and awaitable results."""
    records: str
    due: str
    listing: Callable[[str], str]
    tenant_of: Callable[[bytes], str]

    async def due_by(self, now_s: float, limit: int = 100) -> Sequence[str]:
        """At most `limit` ids of what may be forgotten by now, most overdue first."""
        try:
            ids = await self.redis.zrangebyscore(self.due, "-inf", now_s, start=0, num=limit)
        except OUTAGE as error:
            raise no_answer(error) from error
        return [one.decode() for one in ids]

    async def forget(self, one: str) -> None:
        """Forget the id, and that it was due, in one step; an id that is not there is nothing to forget."""
        try:
            text = await self.redis.hget(self.records, one)
            async with self.redis.pipeline(transaction=True) as pipeline:
                if text is not None:
                    pipeline.zrem(self.listing(self.tenant_of(text)), one)
                pipeline.zrem(self.due, one)
                pipeline.hdel(self.records, one)
                await pipeline.execute()
        except OUTAGE as error:
            raise no_answer(error) from error

    async def place_after(self, tenant: str, after: str | None, *, is_ascending: bool) -> int:
        """Where in a tenant's list the page behind `after` begins; behind an id that is not in it, at the start."""
        if after is None:
            return 0
        listing = self.listing(tenant)
        try:
            rank = await (self.redis.zrank if is_ascending else self.redis.zrevrank)(listing, after)
        except OUTAGE as error:
            raise no_answer(error) from error
        return 0 if rank is None else int(rank) + 1
