"""Looks after those that wait, on the event loop: a few times in the time of a short prompt; not while nobody does."""

from __future__ import annotations

import asyncio

from tandem.router.admission.admission_controller import POLL_S, Admission


class Pump:
    """Calls `pump` of `admission` while anybody waits there."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Somebody waits."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._admission.pump()
        finally:
            if self._admission.waiting:
                self.start()
