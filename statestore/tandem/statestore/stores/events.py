"""Actions of the cluster and their reasons, in the durable store: a short stream, readable from any point on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from tandem.core.errors import InvalidRequestError
from tandem.core.events import MAX_EVENTS, ClusterEvent
from tandem.statestore.connection import raising_unavailable
from tandem.statestore.keys import Keys
from tandem.statestore.when_full import STREAM_FIRST

BEGINNING = "0"
_PLACE = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")
_FIELD = b"event"

# KEYS: the stream. ARGV: how many are kept, then JSON of each.
_APPEND = f"""{STREAM_FIRST}
for i = 2, #ARGV do redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[1], '*', '{_FIELD.decode()}', ARGV[i]) end
"""


class ClusterEventStore:
    """Appends and reads events; all calls raise UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys, *, max_events: int = MAX_EVENTS) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._key, self._max_events = keys.cluster_events, max_events
        self._append: Any = redis.register_script(_APPEND)

    async def append(self, events: Sequence[ClusterEvent]) -> None:
        """Append them behind all others, and forget the oldest beyond the bound."""
        with raising_unavailable():
            await self._append(keys=[self._key], args=[self._max_events, *(event.to_json() for event in events)])

    async def last(self, count: int) -> list[tuple[str, ClusterEvent]]:
        """The last `count` readable ones, oldest first, each with its place."""
        found: list[tuple[str, ClusterEvent]] = []
        before = "+"
        with raising_unavailable():
            while len(found) < count and (rows := await self._redis.xrevrange(self._key, max=before, count=count)):
                found = [*_decoded(reversed(rows)), *found]
                before = f"({rows[-1][0].decode()}"
        return found[-count:] if count > 0 else []

    async def after(self, place: str, count: int) -> list[tuple[str, ClusterEvent]]:
        """Up to `count` that came after `place` (BEGINNING = all), oldest first; InvalidRequestError if it is none.

        Empty only if nothing more came: unreadable pages are passed over.
        """
        if _PLACE.fullmatch(place) is None:
            raise InvalidRequestError(
                f"{place[:80]!r} is not a position in the events", todo="use one that came with an event"
            )
        with raising_unavailable():
            while True:
                rows = await self._redis.xrange(self._key, min=f"({place}", count=count)
                found = _decoded(rows)
                if found or not rows:
                    return found
                place = rows[-1][0].decode()


def _decoded(rows: Any) -> list[tuple[str, ClusterEvent]]:
    """Without those of a release that had other kinds."""
    found: list[tuple[str, ClusterEvent]] = []
    for place, fields in rows:
        try:
            found.append((place.decode(), ClusterEvent.from_json(fields[_FIELD])))
        except (ValueError, KeyError, TypeError):
            continue
    return found
