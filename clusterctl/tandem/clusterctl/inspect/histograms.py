"""Figures from Prometheus text: sums of counters, quantiles of histograms, of all or between two scrapes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)", re.MULTILINE)
_LE = re.compile(r'(?:^|,)le="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Scrape:
    """`totals`: the sum of every metric over its labels. `buckets`: cumulative counts by upper bound, by metric."""

    totals: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]

    @classmethod
    def parse(cls, text: str) -> Scrape:
        """Parse the text format; other lines are skipped."""
        totals: dict[str, float] = {}
        buckets: dict[str, dict[float, float]] = {}
        for match in _SAMPLE.finditer(text):
            name, value = match["name"], float(match["value"])
            le = _LE.search(match["labels"] or "")
            if le is not None and name.endswith("_bucket"):
                counts = buckets.setdefault(name.removesuffix("_bucket"), {})
                counts[float(le[1])] = counts.get(float(le[1]), 0.0) + value
            else:
                totals[name] = totals.get(name, 0.0) + value
        return cls(totals, buckets)

    def since(self, before: Scrape) -> Scrape:
        """Return the difference of two scrapes; a counter that fell was reset."""
        totals = {name: _rise(value, before.totals.get(name, 0.0)) for name, value in self.totals.items()}
        buckets = {
            name: {le: _rise(count, before.buckets.get(name, {}).get(le, 0.0)) for le, count in counts.items()}
            for name, counts in self.buckets.items()
        }
        return Scrape(totals, buckets)

    def total(self, name: str) -> float:
        return self.totals.get(name, 0.0)

    def quantile(self, name: str, share: float) -> float | None:
        """Return a quantile of a histogram, such as 0.99, in the histogram's unit; None without observations.
        Observations are taken to be evenly spread between two bounds."""
        counts = sorted(self.buckets.get(name, {}).items())
        whole = counts[-1][1] if counts else 0.0
        if whole <= 0:
            return None
        below_s, below = 0.0, 0.0
        for le, count in counts:
            if count >= share * whole:
                if math.isinf(le):
                    return below_s
                return below_s + (le - below_s) * (share * whole - below) / max(count - below, 1e-12)
            below_s, below = le, count
        return below_s


def _rise(now: float, before: float) -> float:
    return now - before if now >= before else now
