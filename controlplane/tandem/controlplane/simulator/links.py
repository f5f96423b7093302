"""Wires between workers: a worker's transfers go out one after the other at its link's speed, and come in so."""

from __future__ import annotations

from collections import defaultdict

from tandem.core.ids import WorkerId


class Wires:
    """Every worker has one way out and one way in of `bytes_per_s` each; a transfer needs both."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._out_free_s: defaultdict[WorkerId, float] = defaultdict(float)
        self._in_free_s: defaultdict[WorkerId, float] = defaultdict(float)
        self.sent_bytes: defaultdict[tuple[WorkerId, WorkerId], float] = defaultdict(float)

    def send(
        self, sender: WorkerId, receiver: WorkerId, size_bytes: float, *, from_s: float, last_s: float, parts: int = 1
    ) -> float:
        """Return when the last byte is there. The bytes come into being in `parts`, the first of them at `from_s` and
        the last one at `last_s`."""
        took_s = size_bytes / self.bytes_per_s
        out_s = self._out_free_s[sender] = max(self._out_free_s[sender], from_s) + took_s
        in_s = self._in_free_s[receiver] = max(self._in_free_s[receiver], from_s) + took_s
        self.sent_bytes[sender, receiver] += size_bytes
        return max(out_s, in_s, last_s + took_s / parts)
