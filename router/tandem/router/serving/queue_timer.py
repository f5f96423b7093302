"""Re-evaluates the admission queue on the event loop every POLL_S while requests wait."""

from __future__ import annotations

import asyncio

from tandem.router.admission.admission_controller import POLL_S, AdmissionController


class Pump:
    """Calls `pump` of `admission` while any request waits there."""

    def __init__(self, admission: AdmissionController) -> None:
        self._admission = admission
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer: a request waits."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._admission.pump()
        finally:
            if self._admission.waiting:
                self.start()
