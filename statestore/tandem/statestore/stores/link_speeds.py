"""Measured links in Redis, so that two hosts are measured once and not by every pair of their workers.

One hash a cluster. A field is a route (a failure's has the receiving worker too), its value JSON with the moment of the
measurement by the server's clock, from which readers get an age that needs no common clock. Rows and key expire.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis.asyncio import Redis

from tandem.core.link_speed import LinkSpeed
from tandem.statestore.connection import raising_unavailable
from tandem.statestore.keys import Keys
from tandem.statestore.pubsub import Wakeups

EXPIRE_S: Final = 3600.0
MAX_ROWS: Final = 20_000
"""More are not written: hosts² × transports must stay readable every few seconds."""
POLL_S: Final = 3.0
MAX_BYTES_PER_S: Final = 1e14
"""A hundred times the speed of the fastest links and memories."""
MAX_LATENCY_S: Final = 60.0
"""Longer than any wait for the answer of a measurement."""
MAX_AHEAD_S: Final = 60.0
"""Limit for rows of the future: they would stay young for as long; the server's clock is corrected by less."""

# ARGV: expiry in seconds, bound on rows, then for each row: field, field to drop or "", age in microseconds, JSON.
_WRITE = """
local now = redis.call('TIME')
local micros = now[1] * 1000000 + now[2]
for i = 3, #ARGV, 4 do
  if ARGV[i + 1] ~= '' then redis.call('HDEL', KEYS[1], ARGV[i + 1]) end
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 or redis.call('HLEN', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('HSET', KEYS[1], ARGV[i], string.format('%.0f %s', micros - ARGV[i + 2], ARGV[i + 3]))
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""


class LinkSpeedStore:
    """Reads and writes the speeds. `write` and `read` raise UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._key = keys.link_speeds
        self._channel = keys.link_speeds_channel
        self._script: Any = redis.register_script(_WRITE)
        self._wakeups = Wakeups(redis, self._channel)

    async def write(self, rows: Sequence[LinkSpeed]) -> None:
        """Add measurements; a success removes the failure of the same worker."""
        arguments: list[object] = [int(EXPIRE_S), MAX_ROWS]
        for row in rows:
            failed = _field(row, is_failure=True)
            field = failed if row.failure else _field(row, is_failure=False)
            arguments += [field, "" if row.failure else failed, int(row.age_s * 1e6), _to_json(row)]
        with raising_unavailable():
            await self._script(keys=[self._key], args=arguments)
            await self._redis.publish(self._channel, len(rows))

    async def read(self) -> list[LinkSpeed]:
        """Everything that is not too old, with its age; unreadable rows are left out."""
        with raising_unavailable():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.hgetall(self._key)
                pipeline.time()
                fields, (seconds, micros) = await pipeline.execute()
            now_s = int(seconds) + int(micros) / 1e6
            rows = {field: _from_value(value, now_s) for field, value in fields.items()}
            old = [field for field, row in rows.items() if row is None or row.age_s > EXPIRE_S]
            if old:
                await self._redis.hdel(self._key, *old)
        return [row for field, row in rows.items() if row is not None and row.age_s <= EXPIRE_S]

    async def watch(self, on_rows: Callable[[list[LinkSpeed]], None], *, poll_s: float = POLL_S) -> None:
        """Call `on_rows` with everything now and every `poll_s`, or sooner after a change, until cancelled.

        It is called in this task and must not block. Survives outages, in which the last known rows stay.
        """

        async def look() -> None:
            on_rows(await self.read())

        await self._wakeups.poll(look, poll_s, "link speeds")


def _field(row: LinkSpeed, *, is_failure: bool) -> str:
    parts = [row.from_host, row.to_host, row.transport]
    return "|".join([*parts, row.peer] if is_failure else parts)


def _to_json(row: LinkSpeed) -> str:
    values = [row.from_host, row.to_host, row.transport, row.peer, row.bytes_per_s, row.latency_s, row.failure]
    return json.dumps(values, separators=(",", ":"))


def _from_value(value: bytes, now_s: float) -> LinkSpeed | None:
    """None if it cannot be read, or holds values that no measurement gives."""
    try:
        micros, text = value.decode().split(" ", 1)
        from_host, to_host, transport, peer, bytes_per_s, latency_s, failure = json.loads(text)
        age_s = now_s - int(micros) / 1e6
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    if not all(isinstance(name, str) for name in (from_host, to_host, transport, peer, failure)):
        return None
    slowest = 0.0 if failure else 1.0  # a failure has no speed
    is_sane = _is_within(bytes_per_s, slowest, MAX_BYTES_PER_S) and _is_within(latency_s, 0.0, MAX_LATENCY_S)
    if not is_sane or age_s < -MAX_AHEAD_S:
        return None
    return LinkSpeed(
        from_host=from_host,
        to_host=to_host,
        transport=transport,
        peer=peer,
        bytes_per_s=float(bytes_per_s),
        latency_s=float(latency_s),
        failure=failure,
        age_s=max(0.0, age_s),
    )


def _is_within(value: object, least: float, most: float) -> bool:
    """True if it is a number, and one of those; NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
