"""Measures kept links again when due, and moves to another transport if that one is faster now."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tandem.core.clock import Clock
from tandem.core.link_speed import LinkSpeed, rate
from tandem.core.logs import event
from tandem.kvtransfer.link_meter import LinkMeter
from tandem.kvtransfer.link_speeds import LinkSpeeds
from tandem.kvtransfer.probed_connection import ProbedConnection
from tandem.kvtransfer.transport_selection import Chosen, TransportSelector
from tandem.kvtransfer.transports.base import LinkClosedError
from tandem.kvtransfer.transports.dialer import DialCandidate

FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 600.0
"""Pause between two measurements, doubling for as long as measuring again changes nothing."""
PATIENCE_S = 10.0
"""A link that is never idle is measured between two jobs after so long."""
CHANGED = 0.7
"""A measurement below this part of the former one, or above the inverse, is a change."""
_log = logging.getLogger(__name__)


class Remeasure:
    """`attend` and `is_overdue` belong to the link's thread. Its own connection is measured there, when idle; the other
    transports on a thread of their own, so that a dial that hangs keeps no transfer waiting."""

    def __init__(
        self, survey: TransportSelector, chosen: Chosen, speeds: LinkSpeeds, meter: LinkMeter, clock: Clock,
        on_slower: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._survey, self._candidate, self._speeds = survey, chosen.candidate, speeds
        self._meter, self._clock, self._on_slower = meter, clock, on_slower
        self._route = survey.route(chosen.candidate)
        self._pause_s, self._not_before_s = FIRST_PAUSE_S, 0.0
        self._wrong_since_s: float | None = None
        self._others: threading.Thread | None = None

    def is_overdue(self) -> bool:
        """True if the link has been too far from its measurement for too long to wait for idleness."""
        if not self._is_slow() and not self._is_fast():
            self._wrong_since_s = None
            return False
        now_s = self._clock.now_s()
        if self._wrong_since_s is None:
            self._wrong_since_s = now_s
        return now_s - self._wrong_since_s > PATIENCE_S

    @property
    def is_pending(self) -> bool:
        """True if there will be more to do soon, though the link stay idle."""
        is_measuring = self._others is not None and self._others.is_alive()
        return is_measuring or self._clock.now_s() < self._not_before_s

    def attend(self, line: ProbedConnection) -> None:
        """Measure again where due; return soon if nothing is. Raises LinkClosedError."""
        if self._others is not None and self._others.is_alive():
            return
        if self._is_slow():
            self._measure_own(line, "transfer_link_slow")
            self._begin_others(self._candidate)
        elif self._is_fast():  # it was measured in a busy moment, and every host uses that figure
            self._measure_own(line, "transfer_link_fast")
        elif self._survey.has_due_retry(self._candidate):
            self._begin_others(None)

    def join(self) -> None:
        """Wait for the thread; after the link was closed."""
        if self._others is not None and self._others is not threading.current_thread():
            self._others.join()

    def _is_slow(self) -> bool:
        known = self._known()
        return known is not None and self._meter.is_far_below(known.bytes_per_s, known.latency_s)

    def _is_fast(self) -> bool:
        known = self._known()
        return known is not None and self._meter.is_far_above(known.bytes_per_s)

    def _known(self) -> LinkSpeed | None:
        """The link's measurement; None if it is not to be doubted yet."""
        return self._speeds.latest(self._route) if self._clock.now_s() >= self._not_before_s else None

    def _measure_own(self, line: ProbedConnection, why: str) -> None:
        known = self._speeds.latest(self._route)
        before = known.bytes_per_s if known is not None else 0.0
        achieved = self._meter.achieved_bytes_per_s()
        measured = self._survey.measure_line(self._candidate, line)
        self._meter.restart()
        self._wrong_since_s = None
        has_changed = measured is None or not CHANGED * before <= measured.bytes_per_s <= before / CHANGED
        self._pause_s = FIRST_PAUSE_S if has_changed else min(LAST_PAUSE_S, 2 * self._pause_s)
        self._not_before_s = self._clock.now_s() + self._pause_s
        event(
            _log, why,
            logging.WARNING if has_changed else logging.INFO,  # if it measures as before, the ends are slow
            transport=self._candidate.endpoint.transport, measured=rate(before), achieved=rate(achieved),
            measured_again=rate(measured.bytes_per_s) if measured is not None else "no answer",
        )  # fmt: skip

    def _begin_others(self, kept: DialCandidate | None) -> None:
        """Measure the other transports; see `TransportSelector.measure_others`."""
        others = threading.Thread(target=self._run, args=(kept,), name="kv-survey", daemon=True)
        try:
            others.start()
        except RuntimeError:
            return  # no thread available: another time
        self._others = others

    def _run(self, kept: DialCandidate | None) -> None:
        try:
            self._survey.measure_others(kept)
            best = self._survey.best()
        except LinkClosedError:
            return  # the link is no longer wanted
        if best is None or best is self._candidate:
            return
        name = best.endpoint.transport
        ours, theirs = self._speeds.latest(self._route), self._speeds.latest(self._survey.route(best))
        event(
            _log, "transfer_link_moved", logging.WARNING, transport=self._candidate.endpoint.transport, to=name,
            measured=rate(ours.bytes_per_s if ours is not None else 0.0),
            measured_there=rate(theirs.bytes_per_s if theirs is not None else 0.0),
        )  # fmt: skip
        self._on_slower(name)
