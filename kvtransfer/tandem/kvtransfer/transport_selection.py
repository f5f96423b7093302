"""Selects a link's transport: by known speeds of the two hosts, by measuring now, or by what connects first.

Measuring connections are anonymous (incarnation 0): a receiver fails what a peer was promised when a connection of
that peer ends, and these end at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.core.clock import Clock
from tandem.core.ids import Incarnation, Rank, WorkerId
from tandem.core.link_speed import LinkSpeed, Route, rate
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.link_speeds import LinkSpeeds, fastest
from tandem.kvtransfer.probed_connection import ANSWER_TIMEOUT_S, Measured, ProbedConnection
from tandem.kvtransfer.transports.base import Link, LinkClosedError, Peer, patience
from tandem.kvtransfer.transports.dialer import DialCandidate, dial

_log = logging.getLogger(__name__)
Open = Callable[[DialCandidate], ProbedConnection]
"""Dials the link that will carry transfers. Raises LinkClosedError."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The link that was opened, and why its transport was chosen."""

    line: ProbedConnection
    candidate: DialCandidate
    reason: str


class TransportSelector:
    """Selects for one link. `is_wanted`: whether the link is still to be made; called between the steps."""

    def __init__(
        self, speeds: LinkSpeeds, worker: WorkerId, rank: Rank, options: Sequence[DialCandidate], peer: Peer,
        secret: ClusterSecret, clock: Clock, is_wanted: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._speeds, self._worker, self._rank, self._options = speeds, worker, rank, tuple(options)
        self._peer, self._secret, self._clock, self._is_wanted = peer, secret, clock, is_wanted
        self._lock = threading.Lock()
        self._apart: Link | None = None  # the connection that is measured and then closed

    def choose(self, open_line: Open) -> Chosen:
        """Measure options without a measurement, and open the fastest that works. Raises LinkClosedError with every
        failure."""
        if not self._options:
            raise LinkClosedError("the ticket offers no transport that this sender may use")
        if len(self._options) > 1 and self._unknown():
            with self._turn():  # others may have measured it before this turn comes
                self.measure_others(None)
        for candidate in self._ranking():
            self._check_wanted()
            try:
                line = open_line(candidate)
            except LinkClosedError as error:
                self._note_failure(candidate, str(error))
                continue
            if len(self._options) == 1 and self._unknown():
                with self._turn(), contextlib.suppress(LinkClosedError):  # its owner notices, and ends the line
                    if self._unknown():
                        with patience(2 * ANSWER_TIMEOUT_S, line.link.close):  # `reserve` has no bound of its own
                            self.measure_line(candidate, line)
            return self._chosen(candidate, line)
        raise LinkClosedError("; ".join(self._failures()) or "the link was closed")

    def measure_line(self, candidate: DialCandidate, line: ProbedConnection) -> Measured | None:
        """Measure a connection that is to be kept, or is; None if no answer came. Raises LinkClosedError if it is not
        wanted any more."""
        try:
            measured = line.measure(self._rank)
        except LinkClosedError as error:
            self._note_failure(candidate, str(error))
            return None
        self._note(candidate, measured)
        return measured

    def measure_others(self, kept: DialCandidate | None) -> None:
        """Measure every option but `kept` that is not known, on connections of their own; with `kept`, also known ones.
        Recent failures are left alone."""
        for candidate in self._unknown() if kept is None else self._options:
            is_barred = self._speeds.is_barred(self.route(candidate), self._worker)
            if candidate is kept or is_barred or not self._is_wanted():
                continue
            try:
                measured = self._measure_apart(candidate)
            except LinkClosedError as error:
                self._note_failure(candidate, str(error))
            else:
                self._note(candidate, measured)

    def best(self) -> DialCandidate | None:
        """The best option by present knowledge; None if nothing is known."""
        return next(iter(self._ranking_of_known()), None)

    def abandon(self) -> None:
        """From any thread: end a measurement in progress; nothing is wanted any more."""
        with self._lock:
            if self._apart is not None:
                self._apart.close()

    def has_due_retry(self, kept: DialCandidate) -> bool:
        """True if an option that comes before `kept` failed, and is worth another try."""
        before = self._options[: self._options.index(kept)]
        return any(
            self._speeds.failure(self.route(c), self._worker)
            and not self._speeds.is_barred(self.route(c), self._worker)
            for c in before
        )

    def route(self, candidate: DialCandidate) -> Route:
        return (self._peer.host, candidate.endpoint.host, candidate.endpoint.transport)

    def unused(self, chosen: DialCandidate) -> tuple[str, ...]:
        """Reasons why the options before `chosen` in the order were not taken."""
        taken = self._speeds.latest(self.route(chosen))
        found = []
        for candidate in self._options[: self._options.index(chosen)]:
            name, known = candidate.endpoint.transport, self._speeds.latest(self.route(candidate))
            failure = self._speeds.failure(self.route(candidate), self._worker)
            if failure:
                found.append(f"{name} failed: {failure}")
            elif known is not None and taken is not None:
                found.append(f"{name} measured {rate(known.bytes_per_s)}, less than {rate(taken.bytes_per_s)}")
        return tuple(found)

    def _unknown(self) -> list[DialCandidate]:
        """Options without a fresh measurement, and those that failed here whatever others measured."""
        return [
            c for c in self._options
            if self._speeds.fresh(self.route(c)) is None or self._speeds.failure(self.route(c), self._worker)
        ]  # fmt: skip

    def _turn(self) -> contextlib.AbstractContextManager[bool]:
        return self._speeds.turn(self._peer.host, self._options[0].endpoint.host, self._is_wanted)

    def _ranking(self) -> list[DialCandidate]:
        """Options that work, the one to take first; then failed ones, which are tried as a last resort."""
        known = self._ranking_of_known()
        return [*known, *(c for c in self._options if c not in known)]

    def _ranking_of_known(self) -> list[DialCandidate]:
        speeds = {c: self._speeds.latest(self.route(c)) for c in self._options}
        working = [c for c in self._options if not self._speeds.failure(self.route(c), self._worker)]
        known = [(c, speed.bytes_per_s) for c in working if (speed := speeds[c]) is not None]
        ranked: list[DialCandidate] = []
        while known:
            place = fastest([speed for _, speed in known])
            ranked.append(known.pop(place)[0])
        return ranked

    def _measure_apart(self, candidate: DialCandidate) -> Measured:
        """Measure on a connection that is closed again. Raises LinkClosedError, also if it takes too long."""
        link = dial(candidate.endpoint, replace(self._peer, incarnation=Incarnation(0)), self._secret)
        line = ProbedConnection(link, on_reply=lambda _: None, on_end=lambda *_: None, clock=self._clock)
        with self._lock:
            self._apart = link
        try:
            line.start()
            with patience(2 * ANSWER_TIMEOUT_S, link.close):
                self._check_wanted()
                return line.measure(self._rank)
        finally:
            with self._lock:
                self._apart = None
            line.end()

    def _chosen(self, candidate: DialCandidate, line: ProbedConnection) -> Chosen:
        name, unused = candidate.endpoint.transport, self.unused(candidate)
        measured = [c.endpoint.transport for c in self._options if self._speeds.latest(self.route(c)) is not None]
        parts = [candidate.reason, *unused]
        if len(measured) > 1:
            parts.insert(1, f"fastest of {', '.join(measured)}")
        if unused:
            event(_log, "transfer_faster_link_unused", logging.WARNING, peer=self._worker, transport=name,
                  unused="; ".join(unused))  # fmt: skip
        known = self._speeds.latest(self.route(candidate))
        event(_log, "transfer_link_chosen", peer=self._worker, transport=name, reason="; ".join(parts),
              measured=rate(known.bytes_per_s) if known is not None else "–")  # fmt: skip
        return Chosen(line, candidate, "; ".join(parts))

    def _failures(self) -> list[str]:
        told = ((c.endpoint.transport, self._speeds.failure(self.route(c), self._worker)) for c in self._options)
        return [f"{name} failed: {failure}" for name, failure in told if failure]

    def _note(self, candidate: DialCandidate, measured: Measured) -> None:
        self._speeds.note(self._speed(candidate, bytes_per_s=measured.bytes_per_s, latency_s=measured.latency_s))

    def _note_failure(self, candidate: DialCandidate, why: str) -> None:
        self._check_wanted()  # closing it ends a measurement too: that is no failure
        self._speeds.note(self._speed(candidate, failure=why))
        event(_log, "transfer_dial_failed", logging.WARNING, peer=self._worker,
              transport=candidate.endpoint.transport, error=why)  # fmt: skip

    def _speed(
        self, candidate: DialCandidate, *, bytes_per_s: float = 0.0, latency_s: float = 0.0, failure: str = ""
    ) -> LinkSpeed:
        from_host, to_host, transport = self.route(candidate)
        return LinkSpeed(
            from_host=from_host, to_host=to_host, transport=transport, peer=self._worker,
            bytes_per_s=bytes_per_s, latency_s=latency_s, failure=failure,
        )  # fmt: skip

    def _check_wanted(self) -> None:
        if not self._is_wanted():
            raise LinkClosedError("the link was closed")
