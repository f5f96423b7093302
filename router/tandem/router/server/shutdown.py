"""Drains a router: answers in progress may go on until a deadline; then their clients get an error."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence

from tandem.core.clock import Clock
from tandem.core.errors import TandemError, UnavailableError
from tandem.core.logs import event
from tandem.router.admission.admission_controller import AdmissionController
from tandem.router.api.servers import UNHEARD_S
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.serving.response_stream import ERROR_FLUSH_S

_log = logging.getLogger(__name__)
_LOOK_S = 0.02
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
AFTER_DRAIN_S = ERROR_FLUSH_S + UNHEARD_S + 6.0
"""Time of a stop beyond `drain_s` at most: last errors, closing sockets, giving leases back."""


def on_signal(stop: Callable[[], None], *, second_ends: bool = True) -> None:
    """Have SIGTERM or SIGINT call `stop` in the running loop. With `second_ends` the next one ends the process,
    whatever it is at; without, it changes nothing: a part of a router is stopped by its parent, and often once more by
    a terminal or supervisor that signals all processes."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        for number in _SIGNALS if second_ends else ():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, first)


class Drain:
    """`busy`: each returns how much of something is still going on."""

    def __init__(
        self, dispatcher: Dispatcher, admission: AdmissionController, busy: Sequence[Callable[[], int]], clock: Clock
    ) -> None:
        self._dispatcher, self._admission, self._clock = dispatcher, admission, clock
        self._busy = (lambda: len(dispatcher.flights), lambda: admission.waiting, *busy)

    async def run(self, drain_s: float) -> None:
        """Wait until nothing goes on, `drain_s` at most; whatever does after that fails."""
        event(_log, "stopping", requests=len(self._dispatcher.flights), waiting=self._admission.waiting)
        if await self._is_quiet_within(drain_s):
            return
        flights = self._dispatcher.flights
        event(_log, "cut off", logging.WARNING, requests=len(flights), waiting=self._admission.waiting, after_s=drain_s)
        error = _cut_off(drain_s)
        self._admission.refuse_all(error)
        for flight in flights:
            flight.inbox.fail(error)
        await self._is_quiet_within(ERROR_FLUSH_S)

    async def _is_quiet_within(self, seconds: float) -> bool:
        ends_s = self._clock.now_s() + seconds
        while any(busy() for busy in self._busy):
            if self._clock.now_s() >= ends_s:
                return False
            await asyncio.sleep(_LOOK_S)
        return True


def _cut_off(drain_s: float) -> TandemError:
    why = f"it was asked to {drain_s:g} s ago, and the answer took longer"
    return UnavailableError("this router stops", why=why, todo="send the request again", retry_after_s=1.0)
