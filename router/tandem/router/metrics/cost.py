"""Price of tokens now: the connected workers' price, shared among the tokens of their steps. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName

WINDOW_S: Final = 60.0
_HOUR_S: Final = 3600.0
_IDLE: Final = {RoleName.PREFILL: 1.0, RoleName.DECODE: 0.0, RoleName.MIXED: 0.5}
"""Share of idle time that counts as prefill, by role."""
PHASES: Final = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """Totals of a worker at one moment, and its price an hour. In seconds and tokens since it began."""

    role: RoleName
    price_per_h: float
    step_s: float
    prefill_step_s: float
    prefill_tokens: float
    decode_tokens: float


class CostMeter:
    """Costs of a million tokens of each phase over the last WINDOW_S. `look` at the workers now and then.

    A worker's price is split by the time of its steps: those that computed prompt tokens are prefill, also where others
    decoded beside them. Idle time counts for the phase of its role.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Mapping[WorkerId, WorkerCounts]]] = deque()

    def look(self, workers: Mapping[WorkerId, WorkerCounts], now_s: float) -> None:
        """These are connected now; prices hold for the time since the last look."""
        self._looks.append((now_s, workers))
        while len(self._looks) > 2 and self._looks[1][0] <= now_s - WINDOW_S:
            self._looks.popleft()

    def per_million(self) -> dict[str, float]:
        """Price of a million tokens by phase, in the unit of the prices; without a phase of which there were no tokens,
        or that has no price."""
        spent, tokens = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        for (before_s, before), (now_s, now) in itertools.pairwise(self._looks):
            for was, one in _both(before, now):
                share = _prefill_share(was, one)
                price = one.price_per_h * (now_s - before_s) / _HOUR_S
                spent["prefill"] += price * share
                spent["decode"] += price * (1.0 - share)
                tokens["prefill"] += one.prefill_tokens - was.prefill_tokens
                tokens["decode"] += one.decode_tokens - was.decode_tokens
        return {phase: 1e6 * spent[phase] / tokens[phase] for phase in PHASES if tokens[phase] > 0 < spent[phase]}


def _both(
    before: Mapping[WorkerId, WorkerCounts], now: Mapping[WorkerId, WorkerCounts]
) -> Iterable[tuple[WorkerCounts, WorkerCounts]]:
    """Workers that were there all the time, in one incarnation: counters of another one began again."""
    for worker, one in now.items():
        was = before.get(worker)
        if was is not None and was.role is one.role and was.step_s <= one.step_s:
            yield was, one


def _prefill_share(was: WorkerCounts, one: WorkerCounts) -> float:
    stepped_s, prefill_s = one.step_s - was.step_s, one.prefill_step_s - was.prefill_step_s
    return min(1.0, prefill_s / stepped_s) if stepped_s > 0 else _IDLE[one.role]
