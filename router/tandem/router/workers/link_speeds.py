"""Speed of KV between workers, from the workers' links and the cluster's measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Protocol

from tandem.core.ids import WorkerId
from tandem.core.link_speed import LinkSpeed, Route
from tandem.router.workers.proto_convert import ReportedLink, WorkerFacts

_MOST_ENDS = 64
"""Workers on either side with links that are looked at for a median."""


class LinkEnd(Protocol):
    """The fields that are read of a link to a worker."""

    @property
    def facts(self) -> WorkerFacts | None: ...
    @property
    def used_links(self) -> Sequence[ReportedLink]: ...


class LinkSpeedView:
    """`set_rows` from time to time, `bytes_per_s` for every plan: it is a few look-ups."""

    def __init__(self) -> None:
        self._speeds: dict[Route, LinkSpeed] = {}
        self._rows: list[LinkSpeed] = []
        self._found: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], float | None] = {}
        """Speeds found in `_speeds` for a pair of hosts and the transports of either; plans ask for every pair of
        workers."""

    @property
    def rows(self) -> Sequence[LinkSpeed]:
        """Every measurement and failure that the cluster knows, as of the last reading."""
        return self._rows

    def set_rows(self, rows: Iterable[LinkSpeed]) -> None:
        """The complete list, read anew."""
        self._rows = list(rows)
        self._speeds = {row.route: row for row in self._rows if not row.failure}
        self._found = {}

    def bytes_per_s(self, prefill: LinkEnd | None, decode: LinkEnd | None) -> float | None:
        """Measured from one worker to the other: of the slowest link of rank 0 in use; else of the fastest transport
        that both have, between their hosts. None = not measured."""
        if prefill is None or decode is None or prefill.facts is None or decode.facts is None:
            return None
        if links := prefill.used_links:
            peer = decode.facts.worker
            used = [link.bytes_per_s for link in links if link.peer == peer and link.rank == 0 and link.bytes_per_s > 0]
            if used:
                return min(used)
        return self._between_hosts(prefill.facts, decode.facts)

    def median(self, senders: Sequence[LinkEnd], receivers: Sequence[LinkEnd]) -> float:
        """Median of `bytes_per_s` from one worker to another, of the pairs that were measured; 0 = none was."""
        found: list[float] = []
        for sender in senders[:_MOST_ENDS]:
            if sender.facts is None:
                continue
            used: dict[WorkerId, float] = {}
            for link in sender.used_links:
                if link.rank == 0 and link.bytes_per_s > 0:
                    used[link.peer] = min(link.bytes_per_s, used.get(link.peer, math.inf))
            for receiver in receivers[:_MOST_ENDS]:
                if receiver.facts is None or receiver.facts.worker == sender.facts.worker:
                    continue
                speed = used.get(receiver.facts.worker) or self._between_hosts(sender.facts, receiver.facts)
                found += [speed] if speed and speed < math.inf else []
        return statistics.median(found) if found else 0.0

    def _between_hosts(self, sender: WorkerFacts, receiver: WorkerFacts) -> float | None:
        key = (sender.host, receiver.host, sender.transports, receiver.transports)
        if key not in self._found:
            speeds = (self._speeds.get((*key[:2], name)) for name in sender.transports if name in receiver.transports)
            self._found[key] = max((row.bytes_per_s for row in speeds if row is not None), default=None)
        return self._found[key]
