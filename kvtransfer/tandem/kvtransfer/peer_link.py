"""One kept link to one rank of a receiver: a thread that dials, then gathers and sends; another that reads replies.

push ──▶ queue ──▶ [link thread: reserve window → gather and checksum under the transfer's lock → commit]
                   [reply thread: credit back to the window; done and failed → sender]

With a table of speeds it measures transports that have no measurement, and again when its transfers run far below one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.core.ids import Rank, WorkerId
from tandem.core.link_speed import ReportedLink
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import FrameKind, FrameReply, ReplyKind
from tandem.kvtransfer.jobs import Control, FrameWriter, Push
from tandem.kvtransfer.link_meter import LinkMeter
from tandem.kvtransfer.link_speeds import LinkSpeeds
from tandem.kvtransfer.outgoing_transfer import Outgoing
from tandem.kvtransfer.probed_connection import ProbedConnection
from tandem.kvtransfer.remeasure import Remeasure
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transport_selection import TransportSelector
from tandem.kvtransfer.transports.base import Link, LinkClosedError, Peer
from tandem.kvtransfer.transports.dialer import DialCandidate, dial, dial_first

_log = logging.getLogger(__name__)
IDLE_S = 0.2
"""Idle time after which the link maintains itself."""
REST_S = 5.0
"""Idle time after that, if nothing was due: only time changes that, a failure is tried again at the earliest 10 s
later."""


@dataclass(frozen=True, slots=True)
class LinkKey:
    """Tickets with equal keys share a link: the receiver and one rank's endpoints (a restart changes them)."""

    worker: WorkerId
    rank: Rank
    endpoints: tuple[Endpoint, ...]


class PeerLink:
    """`on_reply` and `on_lost` are called from its threads; `on_broken` when reading the source raised.

    `speeds`: what is known of links, to which it adds; None = the first transport that connects is taken, unmeasured.
    `on_slower(link, transport)`: another transport is faster now; from a thread of the link's own.
    """

    def __init__(
        self,
        key: LinkKey,
        *,
        on_reply: Callable[[PeerLink, FrameReply], None],
        on_lost: Callable[[PeerLink, str], None],
        on_broken: Callable[[Outgoing, str], None],
        clock: Clock,
        speeds: LinkSpeeds | None = None,
        on_slower: Callable[[PeerLink, str], None] = lambda link, transport: None,
    ) -> None:
        self.key = key
        self._on_reply, self._on_lost, self._on_slower = on_reply, on_lost, on_slower
        self._clock, self._speeds = clock, speeds
        self._meter = LinkMeter(clock)
        self._writer = FrameWriter(key.rank, on_broken=on_broken, clock=clock)  # the link thread's
        self._jobs: queue.SimpleQueue[Push | Control | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the fields below
        self._link: Link | None = None
        self._is_closed = False
        self._reason = "dialling"
        self._survey: TransportSelector | None = None
        self._candidate: DialCandidate | None = None
        self._from: Peer | None = None
        self._thread: threading.Thread | None = None
        self._care: Remeasure | None = None
        self._opened: ProbedConnection | None = None  # the link thread's

    def start(self, options: Sequence[DialCandidate], peer: Peer, secret: ClusterSecret) -> None:
        """Dial in the background; jobs wait meanwhile. Raises RuntimeError if no thread is available."""
        run = threading.Thread(target=self._run, args=(options, peer, secret), name="kv-out", daemon=True)
        self._thread = run
        run.start()

    def enqueue(self, job: Push | Control) -> bool:
        """Queue a job; False if the link is closed and the job will not be done."""
        with self._lock:
            if self._is_closed:
                return False
            self._jobs.put(job)
            return True

    def info(self) -> ReportedLink:
        with self._lock:
            transport, stalls = (self._link.transport, self._link.stalls) if self._link else ("", 0)
            survey, candidate, peer, reason = self._survey, self._candidate, self._from, self._reason
        known = None
        if survey is not None and candidate is not None and self._speeds is not None:
            known = self._speeds.latest(survey.route(candidate))
        return ReportedLink(
            peer=self.key.worker, peer_rank=self.key.rank, transport=transport, reason=reason, stalls=stalls,
            from_host=peer.host if peer is not None else "", rank=peer.rank if peer is not None else Rank(0),
            to_host=candidate.endpoint.host if candidate is not None else "",
            bytes_per_s=known.bytes_per_s if known is not None else 0.0,
            latency_s=known.latency_s if known is not None else 0.0,
            achieved_bytes_per_s=self._meter.achieved_bytes_per_s(),
            unused=survey.unused(candidate) if survey is not None and candidate is not None else (),
        )  # fmt: skip

    def close(self) -> None:
        """Take no more jobs and end the connection; does not wait."""
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)
            if self._link is not None:
                self._link.close()
            if self._survey is not None:
                self._survey.abandon()

    def join(self) -> None:
        """After `close`: wait for its threads."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, options: Sequence[DialCandidate], peer: Peer, secret: ClusterSecret) -> None:
        try:
            line = self._connect(options, peer, secret)
        except LinkClosedError as error:
            self._give_up(str(error))
            return
        except Exception as error:  # noqa: BLE001 - top of a thread: waiting transfers must learn that there is no link
            _log.exception("transfer_link_broke")
            self._give_up(f"the link could not be made: {error}")
            return
        try:
            while (job := self._next_job(line)) is not None:
                self._write(line.link, job)
        except LinkClosedError:
            pass  # the reply thread knows why, and reports it
        finally:
            line.end()
            if self._care is not None:
                self._care.join()

    def _give_up(self, reason: str) -> None:
        self.close()
        if self._opened is not None:
            self._opened.end()
        self._on_lost(self, reason)

    def _connect(self, options: Sequence[DialCandidate], peer: Peer, secret: ClusterSecret) -> ProbedConnection:
        """Choose, dial and begin to read. Raises LinkClosedError."""

        def adopt(link: Link) -> ProbedConnection:
            line = ProbedConnection(link, on_reply=self._take_reply, on_end=self._ended, clock=self._clock)
            with self._lock:
                self._link = link
                if self._is_closed:
                    link.close()
            self._opened = line  # first: if no thread is available it is ended all the same
            line.start()
            return line

        if self._speeds is None:
            link, reason = dial_first(options, peer, secret)
            with self._lock:
                self._from, self._reason = peer, reason
            return adopt(link)
        survey = TransportSelector(
            self._speeds, self.key.worker, self.key.rank, options, peer, secret, self._clock,
            lambda: not self._is_closed,
        )  # fmt: skip
        with self._lock:
            self._survey = survey
        chosen = survey.choose(lambda candidate: adopt(dial(candidate.endpoint, peer, secret)))
        with self._lock:
            self._from, self._reason = peer, chosen.reason
            self._candidate = chosen.candidate
        self._care = Remeasure(
            survey, chosen, self._speeds, self._meter, self._clock, lambda name: self._on_slower(self, name)
        )
        return chosen.line

    def _next_job(self, line: ProbedConnection) -> Push | Control | None:
        """Return the next job; while there is none, or after a long busy time, maintain the link."""
        if self._care is None:
            return self._jobs.get()
        pause_s = IDLE_S
        while True:
            if self._care.is_overdue():
                self._care.attend(line)
            try:
                return self._jobs.get(timeout=pause_s)
            except queue.Empty:
                pause_s = IDLE_S
                if not self._meter.is_busy:
                    self._care.attend(line)
                    pause_s = IDLE_S if self._care.is_pending else REST_S

    def _write(self, link: Link, job: Push | Control) -> None:
        before, transfer = self._writer.bytes, job.outgoing.ticket.transfer
        is_last = isinstance(job, Control) and job.kind is FrameKind.FINISH
        if is_last:
            self._meter.finishing(transfer)  # first: the answer may be faster than we are
        if isinstance(job, Push):
            self._meter.begin()
        for _ in self._writer.write(link, job):
            pass
        if isinstance(job, Push):
            self._meter.wrote(self._writer.bytes - before)
        is_given_up = isinstance(job, Control) and job.kind is FrameKind.ABORT  # to which a mere ACK is all that comes
        if is_given_up or (is_last and self._writer.finished != transfer):
            self._meter.answered(transfer)

    def _take_reply(self, reply: FrameReply) -> None:
        if reply.kind in (ReplyKind.DONE, ReplyKind.FAIL):
            self._meter.answered(reply.transfer)
        self._on_reply(self, reply)

    def _ended(self, _line: ProbedConnection, reason: str) -> None:
        self.close()
        self._on_lost(self, reason)
