"""How fast KV travels from one worker to another, by what the workers' links and the cluster's measurements say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tandem.core.linkspeed import LinkSpeed, Route
from tandem.router.workers.wire import UsedLink, WorkerFacts


class LinkEnd(Protocol):
    """What is read of a link to a worker."""

    @property
    def facts(self) -> WorkerFacts | None: ...
    @property
    def used_links(self) -> Sequence[UsedLink]: ...


class LinkSpeedView:
    """`set_rows` from time to time, `bytes_per_s` for every plan: it is a few look-ups."""

    def __init__(self) -> None:
        self._speeds: dict[Route, LinkSpeed] = {}
        self._rows: list[LinkSpeed] = []

    @property
    def rows(self) -> Sequence[LinkSpeed]:
        """Every measurement and failure that the cluster knows, as of the last reading."""
        return self._rows

    def set_rows(self, rows: Iterable[LinkSpeed]) -> None:
        """The complete list, read anew."""
        self._rows = list(rows)
        self._speeds = {row.route: row for row in self._rows if not row.failure}

    def bytes_per_s(self, prefill: LinkEnd | None, decode: LinkEnd | None) -> float | None:
        """Measured from one worker to the other: of the slowest link of rank 0 in use; else of the fastest transport
        that both have, between their hosts. None = nobody measured it."""
        if prefill is None or decode is None or prefill.facts is None or decode.facts is None:
            return None
        peer = decode.facts.worker
        links = [link for link in prefill.used_links if link.peer == peer and link.rank == 0]
        used = [link.bytes_per_s for link in links if link.bytes_per_s > 0]
        if used:
            return min(used)
        hosts = (prefill.facts.host, decode.facts.host)
        shared = [name for name in prefill.facts.transports if name in decode.facts.transports]
        found = [self._speeds[(*hosts, name)].bytes_per_s for name in shared if (*hosts, name) in self._speeds]
        return max(found, default=None)
