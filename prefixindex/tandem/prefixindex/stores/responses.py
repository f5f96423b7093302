"""Stored responses in the durable store: one hash each, which expires; a conversation is a chain of them.

A response knows all that came before it (`chain`, oldest first), so that a conversation is read in two round trips
however long it is. Reading it for its next turn renews the expiry of every turn: what is in use stays whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

from tandem.prefixindex.connection import OUTAGE, no_answer
from tandem.prefixindex.keys import Keys

_FIELDS: Final = ("tenant", "body", "items", "turn", "chain")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """`body` is the response object, `items` its own input items, `turn` its messages with the answer: JSON, all three.

    `chain` names the responses that it continues, oldest first.
    """

    id: str
    tenant: str
    body: bytes
    items: bytes
    turn: bytes
    chain: tuple[str, ...] = ()


class ResponseStore:
    """Reads and writes them. Every call raises UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys, expiry_s: float) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._keys, self._expiry_ms = keys, int(expiry_s * 1000)

    async def save(self, response: StoredResponse) -> None:
        """Write it whole; it expires `expiry_s` seconds after it was last written or continued."""
        key = self._keys.response(response.id)
        fields = {
            "tenant": response.tenant,
            "body": response.body,
            "items": response.items,
            "turn": response.turn,
            "chain": json.dumps(response.chain),
        }
        try:
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.hset(key, mapping=fields)
                pipeline.pexpire(key, self._expiry_ms)
                await pipeline.execute()
        except OUTAGE as error:
            raise no_answer(error) from error

    async def load(self, tenant: str, response: str) -> StoredResponse | None:
        """The response, or None when there is none of that id, it expired, or it is another tenant's."""
        try:
            values = await self._redis.hmget(self._keys.response(response), _FIELDS)
        except OUTAGE as error:
            raise no_answer(error) from error
        if any(value is None for value in values) or values[0] != tenant.encode():
            return None
        _, body, items, turn, chain = values
        return StoredResponse(
            id=response, tenant=tenant, body=body, items=items, turn=turn, chain=tuple(json.loads(chain))
        )

    async def turns(self, responses: Sequence[str]) -> list[bytes | None]:
        """What each of these responses said, None for those that are gone; renews the expiry of all."""
        if not responses:
            return []
        keys = [self._keys.response(response) for response in responses]
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.hget(key, "turn")
                    pipeline.pexpire(key, self._expiry_ms)
                answers: list[Any] = await pipeline.execute()
        except OUTAGE as error:
            raise no_answer(error) from error
        return answers[::2]

    async def delete(self, response: str) -> None:
        """Forget it; responses that continue it can no longer be continued."""
        try:
            await self._redis.delete(self._keys.response(response))
        except OUTAGE as error:
            raise no_answer(error) from error
