"""Workers that wait for a machine with room for them, from the cluster's events: such a worker has no process yet, and
no registry entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tandem.core.events import FOR_A_PLACE, EventKind

EVENTS = 200
"""Number of latest events that are read."""
_GOES_ON = (EventKind.WAITING, EventKind.EXITED, EventKind.RESTART_PLANNED)
"""Kinds of events of a worker without a place while it waits, and is tried again."""


class Unplaced:
    """The workers that have no place yet, with why and since when."""

    def __init__(self) -> None:
        self._waits: dict[str, tuple[str, float]] = {}

    def hear(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in events as the admin port gives them, oldest first, each once."""
        for one in events:
            worker, reason = str(one["subject"]), str(one["reason"])
            if one["kind"] == EventKind.WAITING and reason.startswith(FOR_A_PLACE):
                since_s = self._waits.get(worker, ("", float(one["time_s"])))[1]
                self._waits[worker] = (reason, since_s)
            elif one["kind"] not in _GOES_ON:
                self._waits.pop(worker, None)

    def why(self, worker: str) -> str:
        """Return the reason, such as "waits for a place: needs 2 CPU on one node: …"; "" = it does not wait."""
        reason, _ = self._waits.get(worker, ("", 0.0))
        return reason and f"waits {reason}"

    def since_s(self, worker: str) -> float:
        """Return since when a worker waits, in wall-clock seconds since 1970."""
        return self._waits[worker][1]
