"""Latencies, answers and tokens of the last minutes, in slots of a few seconds, for curves.

Slots are numbered by the wall clock, so that those of several processes can be added.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.core import metric_names as names
from tandem.router.metrics.router import Metrics

SLOT_S = 5.0
SLOTS = 180
"""A quarter of an hour."""
_BUCKETS: dict[str, str] = {f"{names.TTFT}_bucket": "ttft", f"{names.ITL}_bucket": "itl"}
_COUNTS: dict[str, str] = {
    names.PROMPT_TOKENS: "prompt_tokens",
    names.CACHED_TOKENS: "cached_tokens",
    names.GENERATED_TOKENS: "output_tokens",
    names.PREFIX_PREDICTED: "predicted_tokens",
    names.PREFIX_ACTUAL: "found_tokens",
}
_BY_OUTCOME: dict[str, str] = {names.SLO_REQUESTS: "slo", names.REQUESTS: "requests"}
_DIGITS = 5
Slot = dict[str, Any]
"""{"slot", "ttft": {bound: count}, "itl": …, "counts": {name: count}}: increases in that slot."""


class TimeSeries:
    """`run` notes a slot after the other; belongs to the event loop. `wall_s` gives seconds since 1970."""

    def __init__(self, metrics: Metrics, wall_s: Callable[[], float]) -> None:
        self._metrics, self._wall_s = metrics, wall_s
        self._slots: deque[Slot] = deque(maxlen=SLOTS)
        self._before = self._totals()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(SLOT_S - self._wall_s() % SLOT_S)
            self.note()

    def note(self) -> None:
        """Add the increase since the last note to the slot that is ending."""
        now = self._totals()
        slot: Slot = {"slot": round(self._wall_s() / SLOT_S) - 1}
        for group, totals in now.items():
            added = {name: total - self._before[group].get(name, 0.0) for name, total in totals.items()}
            slot[group] = added if any(added.values()) else {}
        self._before = now
        self._slots.append(slot)

    def raw(self) -> dict[str, Any]:
        """Every slot that is kept, as plain values; those of several processes can be added."""
        return {"slots": list(self._slots)}

    def _totals(self) -> dict[str, defaultdict[str, float]]:
        totals = {group: defaultdict[str, float](float) for group in ("ttft", "itl", "counts")}
        for sample in self._metrics.samples():
            if sample.name in _BUCKETS:
                totals[_BUCKETS[sample.name]][sample.labels["le"]] += sample.value
            elif sample.name in _COUNTS:
                totals["counts"][_COUNTS[sample.name]] += sample.value
            elif sample.name in _BY_OUTCOME:
                totals["counts"][f"{_BY_OUTCOME[sample.name]}_{sample.labels['outcome']}"] += sample.value
        return totals


def added_up(raws: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Slots of several processes as those of one."""
    slots: dict[int, Slot] = {}
    for slot in (slot for raw in raws for slot in raw["slots"]):
        whole = slots.setdefault(slot["slot"], {"slot": slot["slot"], "ttft": {}, "itl": {}, "counts": {}})
        for group in ("ttft", "itl", "counts"):
            for name, value in slot[group].items():
                whole[group][name] = whole[group].get(name, 0) + value
    return {"slots": [slots[number] for number in sorted(slots)][-SLOTS:]}


def curves(raw: Mapping[str, Any]) -> dict[str, Any]:
    """{"slot_s", "slots", "totals"}: latencies, goodput, answers and tokens a second by slot, None where there was
    nothing to measure; and counts of all slots together."""
    totals: Counter[str] = Counter()
    for slot in raw["slots"]:
        totals.update(slot["counts"])
    return {"slot_s": SLOT_S, "slots": [_curve(slot) for slot in raw["slots"]], "totals": dict(totals)}


def _curve(slot: Slot) -> dict[str, Any]:
    counts = slot["counts"]
    ended = sum(count for name, count in counts.items() if name.startswith("requests_"))
    judged = sum(counts.get(f"slo_{outcome}", 0) for outcome in ("met", "missed", "failed"))
    return {
        "at_s": slot["slot"] * SLOT_S,
        "ttft_p50_s": quantile(slot["ttft"], 0.5),
        "ttft_p99_s": quantile(slot["ttft"], 0.99),
        "itl_p50_s": quantile(slot["itl"], 0.5),
        "itl_p99_s": quantile(slot["itl"], 0.99),
        "goodput_per_s": counts.get("slo_met", 0) / SLOT_S if judged else None,
        "kept": counts.get("slo_met", 0) / judged if judged else None,
        "answers_per_s": ended / SLOT_S,
        "failed": ended - counts.get("requests_ok", 0) - counts.get("requests_cancelled", 0),
        "output_tokens_per_s": counts.get("output_tokens", 0) / SLOT_S,
        "prompt_tokens_per_s": counts.get("prompt_tokens", 0) / SLOT_S,
    }


def quantile(buckets: Mapping[str, float], share: float) -> float | None:
    """So many of a histogram's observations, such as 0.99, were at most this long; None of none. `buckets`: how many
    were at most so long, by bound. Between two bounds they are taken to lie evenly."""
    counts = sorted((float(bound), count) for bound, count in buckets.items())
    whole = counts[-1][1] if counts else 0.0
    if whole <= 0:
        return None
    below_s, below = 0.0, 0.0
    for bound, count in counts:
        if count >= share * whole:
            if not math.isinf(bound):
                below_s += (bound - below_s) * (share * whole - below) / max(count - below, 1e-12)
            break
        below_s, below = bound, count
    return round(below_s, _DIGITS)
