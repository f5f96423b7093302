"""Results of the transfer proof: finished cases, and their findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import quantile
from proof import record
from proof.transfer.plan import TRANSPORTS, faults_of

PARTS = ("matrix", "wire", "kills", "stops")
FULL_LENGTH = 20_000
"""Transfers of the wire part, of which each fault takes some hundreds."""
ALLOWED_DEVIATION = 0.05
"""Allowed deviation of the bytes held and moved from the ideal."""


class Record:
    """One entry a finished case, by part and index."""

    def __init__(self, path: Path, seed: int, *, is_fresh: bool = False) -> None:
        self.seed, self._file = seed, record.Record(path, "transfer", {"seed": seed}, is_fresh=is_fresh)
        known = self._file.content
        self.about: dict[str, Any] = known.get("about", {})
        self.entries: dict[str, dict[int, dict[str, Any]]] = {
            part: {int(index): entry for index, entry in known.get(part, {}).items()} for part in PARTS
        }

    def add(self, part: str, index: int, entry: dict[str, Any]) -> None:
        self.entries[part][index] = entry

    def missing(self, part: str, indices: Sequence[int]) -> list[int]:
        """Cases that were not run yet. A case that broke a promise stays on record until it is run alone, by name."""
        return [index for index in indices if index not in self.entries[part]]

    @property
    def violations(self) -> list[str]:
        return [words for part in self.entries.values() for entry in part.values() for words in entry["violations"]]

    @property
    def faults_left_out(self) -> list[str]:
        """Faults that a run of full length never did to a transport: its results do not cover them."""
        wire = self._wire()
        return list(wire["never_hit"]) if wire["transfers"] >= FULL_LENGTH else []

    def save(self) -> None:
        """Write it."""
        self._file.content = {"about": self.about, "summary": self.summary()} | {
            part: {str(index): entries[index] for index in sorted(entries)} for part, entries in self.entries.items()
        }
        self._file.save()

    def verdict(self, wanted: Mapping[str, Sequence[int]]) -> int:
        """Print what is broken among all that is on record, and what is left of the `wanted` cases; returns the exit
        status."""
        summary = self.summary()
        late = [words for part in ("kills", "stops") for words in summary[part]["late"]]
        is_off = max(summary["matrix"]["largest_deviation"].values()) > ALLOWED_DEVIATION
        for words in self.faults_left_out:
            print(f"a fault that never happened: {words}")
        print(f"{len(self.violations)} broken promises, {len(late)} limits of time exceeded")
        broken = len(self.violations) + len(late) + len(self.faults_left_out) + is_off
        left = sum(len(self.missing(part, indices)) for part, indices in wanted.items())
        return self._file.verdict(sum(map(len, wanted.values())) - left, left=left, broken=broken)

    def summary(self) -> dict[str, Any]:
        """Summary in a few numbers."""
        found: dict[str, Any] = {"violations": len(self.violations), "not_run": self.about.get("not_run", {})}
        found["matrix"] = self._matrix()
        found["wire"] = self._wire()
        for part in ("kills", "stops"):
            found[part] = self._strikes(part)
        return found

    def _wire(self) -> dict[str, Any]:
        by_transport: dict[str, Counter[str]] = {}
        hits: dict[str, Counter[str]] = {}
        for entry in self.entries["wire"].values():
            counts = by_transport.setdefault(entry["transport"], Counter())
            counts.update({name: entry[name] for name in ("transfers", "admitted", "bytes")})
            hits.setdefault(entry["transport"], Counter()).update(entry["hits"])
        total = sum(counts["transfers"] for counts in by_transport.values())
        every = sum(hits.values(), Counter[str]())
        return {
            "transfers": total,
            **{k: dict(v) for k, v in by_transport.items()},
            "hit_by": dict(sorted(every.items())),
            "never_hit": [
                f"{transport}: {kind}"
                for transport in TRANSPORTS
                for kind in faults_of(transport)
                if not hits.get(transport, Counter[str]())[kind]
            ],
        }

    def _matrix(self) -> dict[str, Any]:
        worst = {"held": 0.0, "moved": 0.0, "landed": 0.0}
        cells = 0
        for entry in self.entries["matrix"].values():
            for row in entry["figures"]:
                cells += 1
                for name in worst:
                    ideal = row[f"ideal_{name}"]
                    off = abs(row[name] - ideal) / ideal if ideal else float(row[name] > 0)
                    worst[name] = max(worst[name], off)
        return {"transfers": cells, "largest_deviation": worst}

    def _strikes(self, part: str) -> dict[str, Any]:
        entries = list(self.entries[part].values())
        found: dict[str, Any] = {"strikes": len(entries)}
        for name in ("requests", "replayed"):
            found[name] = sum(entry[name] for entry in entries)
        for name in ("survivor_s", "router_s", "baseline_s", "lag_s"):
            found[name] = _spread([entry[name] for entry in entries if entry[name] is not None])
        found["by_moment"] = dict(Counter(entry["moment"] for entry in entries))
        found["by_target"] = dict(Counter(entry["target"] for entry in entries))
        found["with_a_shared_transfer"] = sum(entry["shared"] != 0 for entry in entries)
        found["late"] = [words for entry in entries for words in entry["late"]]
        return found


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    shares = {f"p{percent}": round(quantile(values, percent), 3) for percent in (50, 90, 99)}
    return {"n": len(values), **shares, "max": round(max(values), 3)}
