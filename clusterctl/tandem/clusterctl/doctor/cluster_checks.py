"""Checks of a running cluster from its admin port: versions, clocks, addresses, pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from tandem.clusterctl.doctor.findings import Check, Finding, error, ok, skipped, warning
from tandem.clusterctl.inspect.status_summary import revisions_apart
from tandem.core.events import EventKind
from tandem.core.version import release

_SKEW_S = 2.0
_CONTESTED = 2
"""A single one may be an operator's deliberate change."""
_LOST_RACE = ("another writer", "somebody else")
"""In reasons of PLAN_DENIED, the second as earlier releases wrote it: events outlive an upgrade."""
_VERSION = re.compile(r"version (\d+): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChecks:
    """`status`, `net` and `events` as the admin port gives them; None = no cluster answers, for the reason `why`.
    `fix`: what to do about that; "" = nothing, no cluster is expected to answer."""

    status: Mapping[str, Any] | None
    net: Mapping[str, Any] | None
    events: Sequence[Mapping[str, Any]] | None = None
    why: str = ""
    fix: str = ""

    def checks(self) -> Sequence[tuple[str, Check]]:
        if self.status is None:
            silence = error(self.why, self.fix) if self.fix else skipped(self.why)
            return (("cluster", lambda: [silence]),)
        return (
            ("cluster", self.serves),
            ("versions", self.versions),
            ("clocks", self.clocks),
            ("addresses", self.addresses),
            ("pairs", self.pairs),
            ("autoscalers", self.autoscalers),
        )

    def serves(self) -> Iterator[Finding]:
        status = self._known()
        for missing in status.get("missing") or []:
            yield error(f"it does not serve: {missing}", "`clusterctl logs up --level WARNING`")
        for worker in status.get("workers") or []:
            if worker.get("trouble"):
                name = worker["worker"]
                yield error(f"{name}: {worker['trouble']}", f"`clusterctl logs {name} --level WARNING`")
        if status.get("is_ready"):
            yield ok(f"{status.get('cluster')} serves")

    def versions(self) -> Iterator[Finding]:
        """Compare versions: answers of two releases may differ, and workers of two pair only if KV fits."""
        status = self._known()
        found: dict[str, list[str]] = {}
        found.setdefault(release(), []).append("this program")
        found.setdefault(str(status.get("version")), []).append("the router")
        for worker in status.get("workers") or []:
            if worker.get("version"):
                found.setdefault(str(worker["version"]), []).append(str(worker["worker"]))
        if len(found) > 1:
            what = "; ".join(f"{number}: {', '.join(who)}" for number, who in sorted(found.items()))
            yield warning(what, "install one release everywhere, and restart what is older")
        else:
            yield ok(f"{release()} everywhere")

    def clocks(self) -> Iterator[Finding]:
        is_right = True
        for worker in self._known().get("workers") or []:
            skew_s = worker.get("clock_skew_s")
            if skew_s is not None and abs(skew_s) > _SKEW_S:
                is_right = False
                way = "ahead of" if skew_s > 0 else "behind"
                what = f"the clock of {worker['worker']} is {abs(skew_s):.1f} s {way} the router's"
                yield warning(what, "run NTP there: logs, events and expiries do not line up")
        if is_right:
            yield ok(f"within {_SKEW_S:g} s of each other")

    def addresses(self) -> Iterator[Finding]:
        """Report a worker that advertises 127.0.0.1: no other machine can reach it."""
        hosts = {row["host"] for row in (self.net or {}).get("workers") or []}
        lost = [
            f"{worker['worker']} ({worker['address']})"
            for worker in self._known().get("workers") or []
            if _is_loopback(str(worker.get("address", "")))
        ]
        if len(hosts) > 1 and lost:
            what = f"workers are on {len(hosts)} machines, and some tell others a loopback address: {', '.join(lost)}"
            yield error(what, "start them with the address that the other machines reach")
        else:
            yield ok("workers can reach the addresses that they are told")

    def pairs(self) -> Iterator[Finding]:
        if between := revisions_apart(self._known()):
            yield ok(f"workers of {between} serve side by side, each with its like: a rollout is half way")
            return
        refused = self._known().get("refused_pairs") or []
        for pair in refused:
            what = f"{pair['prefill']} and {pair['decode']} never work together: {pair['why']}"
            yield error(what, "give both pools the settings that the reason names")
        if not refused:
            yield ok("all that could work together do")

    def autoscalers(self) -> Iterator[Finding]:
        """Report two autoscalers on the same workers: they undo each other's changes for ever."""
        if self.events is None:
            yield skipped("the cluster keeps no events")
            return
        undone = contested(self.events)
        if undone >= _CONTESTED:
            what = f"{undone} of the planner's latest changes were undone or overtaken by another writer"
            yield warning(what, 'let one decide: `[planner] mode = "advise"`, or stop the other')
        else:
            yield ok("no change of the planner was undone")

    def _known(self) -> Mapping[str, Any]:
        assert self.status is not None
        return self.status


def contested(events: Sequence[Mapping[str, Any]]) -> int:
    """Count the planner's changes that another writer reverted right afterwards, or preceded.
    `up` does not count as a writer: at every start it reports the desired state, kept or written anew."""
    acted = [_VERSION.search(str(one["reason"])) for one in events if one["kind"] == EventKind.PLAN_ACTED]
    planned = {found[1] for found in acted if found is not None}
    undone, is_starting, counts, before = 0, False, "", ""
    for one in events:
        if one["kind"] == EventKind.CLUSTER_STARTED:
            is_starting, before = True, ""
        elif one["kind"] == EventKind.PLAN_DENIED:
            undone += any(words in str(one["reason"]) for words in _LOST_RACE)
        elif one["kind"] == EventKind.DESIRED_CHANGED:
            found = _VERSION.match(str(one["reason"]))
            if found is None:
                continue
            new = str(one["reason"])[found.end() :]
            if found[1] in planned and not is_starting:
                before = counts
            else:
                undone += bool(before) and new == before and not is_starting
                before = ""
            counts, is_starting = new, False
    return undone


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
