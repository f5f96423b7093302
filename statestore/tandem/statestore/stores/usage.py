"""Bytes that each tenant keeps in the directory for files: a charge for every file and open batch, and their sums.

A charge is written in the same script as its file or batch, and given back in the one that forgets it, so sums are
exact.
"""

from __future__ import annotations

from typing import Final

LEAST_CHARGE_BYTES: Final = 64 * 1024
"""Charge of a file, however short it is: its record takes memory of Redis, too."""

# A hash by id, "bytes tenant", and one by tenant with the sums.
USAGE_LUA: Final = """
local function discharge(charges, sums, id)
  local at = redis.call('HGET', charges, id)
  if not at then return end
  local size, tenant = string.match(at, '^(%d+) (.+)$')
  redis.call('HDEL', charges, id)
  if redis.call('HINCRBY', sums, tenant, -size) <= 0 then redis.call('HDEL', sums, tenant) end
end
local function charge(charges, sums, id, tenant, size)
  discharge(charges, sums, id)
  redis.call('HSET', charges, id, size .. ' ' .. tenant)
  redis.call('HINCRBY', sums, tenant, size)
end
local function used(sums, tenant) return tonumber(redis.call('HGET', sums, tenant) or '0') end
"""


def charge_of(size_bytes: int) -> int:
    """Return the bytes that a file of that size counts as."""
    return max(LEAST_CHARGE_BYTES, size_bytes)
