"""Lets small, vital writes into a Redis that has reached its `maxmemory`.

Redis refuses a script for want of memory at its first write alone, so these scripts begin with a write that takes none,
and changes nothing here. It refuses every transaction (MULTI), even one that reads.

This is for small and bounded data: leases, desired state, API keys, budgets, events. Data of clients and the index are
refused.
"""

from __future__ import annotations

from typing import Final

HASH_FIRST: Final = "redis.call('HDEL', KEYS[1], '')\n"
SET_FIRST: Final = "redis.call('SREM', KEYS[1], '')\n"
STREAM_FIRST: Final = "redis.call('XDEL', KEYS[1], '0-0')\n"
EMPTY_FIRST: Final = "redis.call('DEL', KEYS[1])\n"
"""A first write for a key that is not there, or is deleted."""

ADD_TO_SET: Final = f"{SET_FIRST}return redis.call('SADD', KEYS[1], ARGV[1])\n"
"""KEYS: a set. ARGV: its new member."""
