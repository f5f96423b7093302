"""Comparison of two snapshots of the KV ledgers: holds present in both that neither explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]
Name = tuple[str, str, int, str, str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """`look` is the latest; `unexplained` are its holds that were suspect before too, with the blocks held since."""

    look: Record
    unexplained: Sequence[Record]
    would_release: Sequence[Record] = field(default_factory=tuple)
    released: Sequence[Record] = field(default_factory=tuple)
    refused: Sequence[Record] = field(default_factory=tuple)

    @property
    def fenced(self) -> list[Record]:
        """Return unexplained holds that can be released: no writer can reach them any more."""
        return [hold for hold in self.unexplained if hold["is_fenced"]]

    @property
    def left(self) -> list[Record]:
        """Return unexplained holds that were not released."""
        gone = {_short_name(record) for record in self.released}
        return [hold for hold in self.unexplained if _short_name(hold) not in gone]

    def as_json(self) -> dict[str, Any]:
        return {
            **self.look,
            "unexplained": list(self.unexplained),
            "would_release": list(self.would_release),
            "released": list(self.released),
            "refused": list(self.refused),
        }


def find_unexplained(first: Record, second: Record | None) -> list[Record]:
    """Return holds that are suspect in both snapshots: the same holder in the same incarnation, holding since the same
    moment. Only blocks held both times count, so blocks in transit are excluded."""
    if second is None:
        return []
    before = {_name(hold): frozenset(hold["blocks"]) for hold in first["holds"] if hold["verdict"] == "suspect"}
    found: list[Record] = []
    for hold in second["holds"]:
        kept = before.get(_name(hold), frozenset()) & frozenset(hold["blocks"])
        if hold["verdict"] == "suspect" and kept:
            found.append({**hold, "unchanged_blocks": sorted(kept)})
    return found


def _name(hold: Record) -> Name:
    return (hold["worker"], hold["incarnation"], hold["group"], hold["kind"], hold["key"], hold["since_s"])


def _short_name(hold: Record) -> tuple[str, int, str, str]:
    return (hold["worker"], hold["group"], hold["kind"], hold["key"])
