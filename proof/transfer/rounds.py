"""Strikes in rounds: every pair gets its workers, then all are struck together, so that starts disturb no clock."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proof.transfer.partner import Partner
from proof.transfer.strike_run import Outcome, StrikeRun
from proof.transfer.strikes import GROUP, House, Strike, draw_strike
from tandem.statestore.embedded_redis import PrivateRedis

Result = dict[str, Any]


async def run_strikes(
    part: str,
    seed: int,
    indices: Sequence[int],
    pairs: int,
    folder: Path,
    on_result: Callable[[int, Result], None],
    is_stopping: Callable[[], bool],
) -> None:
    """Carry them out, `pairs` at a time; strikes of one group happen to one pair of workers."""
    redis = PrivateRedis.start(folder / "redis", "proof-password")
    houses = [House(folder / f"h{number}", redis.url, number) for number in range(pairs)]
    lanes = _lanes(indices, pairs)
    try:
        while any(lanes) and not is_stopping():
            due = [
                (house, draw_strike(seed, part, lane.pop(0))) for house, lane in zip(houses, lanes, strict=True) if lane
            ]
            starting = asyncio.Semaphore(os.cpu_count() or 1)  # it is all CPU
            spares = await asyncio.gather(*(_prepare(house, strike, starting) for house, strike in due))
            load = os.getloadavg()[0]
            jobs = [_strike(house, strike, spare) for (house, strike), spare in zip(due, spares, strict=True)]
            for (_, strike), outcome in zip(due, await asyncio.gather(*jobs), strict=True):
                on_result(int(strike.name.split("/")[1]), _entry(strike, outcome, load))
    finally:
        await asyncio.gather(*(house.clear() for house in houses))
        redis.stop()


def _lanes(indices: Sequence[int], pairs: int) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for index in indices:
        groups.setdefault(index // GROUP, []).append(index)
    lanes: list[list[int]] = [[] for _ in range(pairs)]
    for group in groups.values():
        min(lanes, key=len).extend(group)
    return lanes


async def _prepare(house: House, strike: Strike, starting: asyncio.Semaphore) -> Partner | str:
    try:
        async with starting:
            return await house.prepare(strike.ends, strike.victim)
    except (RuntimeError, TimeoutError) as error:
        return str(error)


async def _strike(house: House, strike: Strike, spare: Partner | str) -> Outcome:
    if isinstance(spare, str):
        await house.clear()
        return Outcome(violations=[f"a worker did not start: {spare}"])
    try:
        return await StrikeRun(house, strike, spare).run()
    except Exception:  # noqa: BLE001 - a result, too
        await house.clear()
        return Outcome(violations=[traceback.format_exc()])


def _entry(strike: Strike, outcome: Outcome, load: float) -> Result:
    target = "host" if strike.target < 0 else f"rank {strike.target}"
    ends = strike.ends
    entry = {
        "transport": ends.transport,
        "tp": f"{ends.p_tp}x{ends.d_tp}",
        "moment": strike.moment,
        "target": f"{strike.victim} {target}",
        "load": round(load, 1),
    } | asdict(outcome)
    entry["violations"] = [f"{strike.name} ({entry['target']}, {strike.moment}): {v}" for v in outcome.violations]
    entry["late"] = [f"{strike.name} ({entry['target']}, {strike.moment}): {words}" for words in outcome.late]
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in entry.items()}
