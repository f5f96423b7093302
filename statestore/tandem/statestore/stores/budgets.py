"""Remaining budgets of tenants, in the volatile store: one hash a tenant, changed by one script, for all routers alike.

A budget is a bucket that fills at its rate, up to BURST_S seconds' worth of it. A request goes when there is at least
one request and one token, whatever it takes: a long one leaves a debt, so that the rate holds over time for any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

from tandem.core.config import BudgetSection
from tandem.statestore.connection import raising_unavailable
from tandem.statestore.keys import Keys
from tandem.statestore.when_full import HASH_FIRST

BURST_S: Final = 10.0
"""Seconds of its rate that a tenant may save up."""

# KEYS: the hash. ARGV: requests a second, tokens a second, requests, tokens, whether it may be refused, burst in
# seconds. Returns the milliseconds to wait, 0 = taken. By the server's clock: routers need not agree on the time.
_SPEND = f"""
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local kept = redis.call('HMGET', KEYS[1], 'at', 'requests', 'tokens')
local passed = math.max(0, now - tonumber(kept[1] or now))
local wait, keep, left = 0, 0, {{}}
for i = 1, 2 do
  local rate = tonumber(ARGV[i])
  local most = math.max(1, rate * tonumber(ARGV[6]))
  left[i] = math.min(most, tonumber(kept[i + 1] or most) + passed * rate)
  if rate > 0 and left[i] < 1 then wait = math.max(wait, (1 - left[i]) / rate) end
end
local taken = wait == 0 or ARGV[5] == '0'
for i = 1, 2 do
  local rate = tonumber(ARGV[i])
  if taken then left[i] = left[i] - tonumber(ARGV[i + 2]) end
  if rate > 0 then keep = math.max(keep, (rate * tonumber(ARGV[6]) - left[i]) / rate) else left[i] = 1 end
end
{HASH_FIRST}
redis.call('HSET', KEYS[1], 'at', string.format('%.6f', now), 'requests', string.format('%.6f', left[1]),
           'tokens', string.format('%.6f', left[2]))
redis.call('PEXPIRE', KEYS[1], math.ceil(1000 * keep) + 1000)
if taken then return 0 end
return math.ceil(1000 * wait)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """An amount taken from a budget; negative = given back. If not `is_asked` it is spent already, and is taken
    whatever is left."""

    requests: int
    tokens: int
    is_asked: bool = True


class BudgetStore:
    """Shared by every router of the cluster."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._keys = keys
        self._spend: Any = redis.register_script(_SPEND)

    async def spend(self, tenant: str, budget: BudgetSection, charge: Charge) -> float:
        """Take `charge`, or return after how many seconds there is enough. UnavailableError when Redis does not
        answer."""
        rates = [budget.requests_per_minute / 60, budget.tokens_per_minute / 60]
        args = [*rates, charge.requests, charge.tokens, int(charge.is_asked), BURST_S]
        with raising_unavailable():
            wait_ms = await self._spend(keys=[self._keys.budget(tenant)], args=args)
        return int(wait_ms) / 1000
