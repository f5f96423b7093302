"""Limits the running requests of batches: as many as the gaps of interactive traffic take, none while it waits.

Pure arithmetic over the router's state; the caller looks a few times a second.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.lifecycle import RoleName
from tandem.router.dispatch.inflight_request import InFlightRequest
from tandem.router.workers.connection import WorkerLink

GRACE_S = 0.1
"""A request that was sent off so recently does not wait yet."""
GROW_S = 0.5
"""Undisturbed for so long: one more at once."""
YIELD_S = 1.0
"""Interactive requests that still wait after so long get the place of a running one."""


class Pace:
    """`look` gives how many may run; `limit` is the most that ever may."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._window = 1
        self._changed_s = float("-inf")
        self._pressed_s: float | None = None

    def look(self, now_s: float, waiting: int, running: int) -> int:
        """The number that may run now, given `waiting` interactive requests and `running` ones of batches.

        While any request waits nothing new starts; after YIELD_S of that, and again every YIELD_S, one that runs has to
        stop. Afterwards the number grows from 1, by one every GROW_S in which all that may run does.
        """
        if waiting > 0:
            if self._pressed_s is None:
                self._pressed_s = now_s
                self._window = running
            elif now_s - self._pressed_s >= YIELD_S:
                self._pressed_s = now_s
                self._window = min(self._window, running) - 1
            self._window = max(0, min(self._window, running))
            self._changed_s = now_s
            return self._window
        self._pressed_s = None
        if self._window == 0:
            self._window, self._changed_s = 1, now_s
        elif running >= self._window and now_s - self._changed_s >= GROW_S:
            self._window, self._changed_s = min(self._limit, self._window + 1), now_s
        return min(self._window, self._limit)


def waiting(flights: Iterable[InFlightRequest], links: Iterable[WorkerLink], now_s: float) -> int:
    """Interactive requests that no worker computes yet: of this router, and of others as the workers report them."""
    ours = 0
    own: dict[str, int] = {}
    for flight in flights:
        has_begun = flight.prefill_started_s is not None or flight.first_token_s is not None
        if has_begun:
            continue
        if flight.is_background or now_s - flight.started_s < GRACE_S:
            where = flight.plan.decode if flight.plan.prefill is None else flight.plan.prefill
            own[where] = own.get(where, 0) + 1
        else:
            ours += 1
    others = sum(
        max(0, link.load.queued_requests - own.get(link.worker, 0))
        for link in links
        if link.facts is not None and link.facts.role is not RoleName.DECODE
    )
    return max(ours, others)
