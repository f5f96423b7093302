"""One kept link to one rank of a receiver: a thread that dials, then gathers and sends; another that reads replies.

push ──▶ queue ──▶ [link thread: reserve window → gather under the transfer's lock → checksum → commit]
                   [reply thread: credit back to the window; done and failed → sender]
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.core.clock import Clock
from tandem.core.ids import BlockId, GroupId, Rank, WorkerId
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import FrameKind, Reply, checksum
from tandem.kvtransfer.layout import FrameSlice, HeadRoute, slices
from tandem.kvtransfer.outgoing import Outgoing
from tandem.kvtransfer.pool import PoolAccess
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.base import Link, LinkClosedError, Peer
from tandem.kvtransfer.transports.dialling import Candidate, dial_first

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Push:
    """Blocks of one group and some of its layers, for the heads of one route."""

    outgoing: Outgoing
    group: GroupId
    pool: PoolAccess
    route: HeadRoute
    source_blocks: tuple[BlockId, ...]
    dest_blocks: tuple[BlockId, ...]
    layers: range


@dataclass(frozen=True, slots=True)
class Control:
    """A frame without payload."""

    outgoing: Outgoing
    kind: FrameKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkInfo:
    """A link as shown to people: `transport` is empty while it dials; `reason` says why this one was chosen."""

    worker: WorkerId
    rank: Rank
    transport: str
    reason: str
    stalls: int


@dataclass(frozen=True, slots=True)
class LinkKey:
    """What makes two tickets share a link: the receiver and one rank's endpoints (a restart changes them)."""

    worker: WorkerId
    rank: Rank
    endpoints: tuple[Endpoint, ...]


class PeerLink:
    """`on_reply` and `on_lost` are called from its threads; `on_broken` when reading the source raised."""

    def __init__(
        self,
        key: LinkKey,
        *,
        on_reply: Callable[[PeerLink, Reply], None],
        on_lost: Callable[[PeerLink, str], None],
        on_broken: Callable[[Outgoing, str], None],
        clock: Clock,
    ) -> None:
        self.key = key
        self._on_reply, self._on_lost, self._on_broken, self._clock = on_reply, on_lost, on_broken, clock
        self._jobs: queue.SimpleQueue[Push | Control | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the three below
        self._link: Link | None = None
        self._is_closed = False
        self._reason = "dialling"
        self._thread: threading.Thread | None = None

    def start(self, options: Sequence[Candidate], peer: Peer, secret: ClusterSecret) -> None:
        """Dial in the background; jobs wait meanwhile."""
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

    def info(self) -> LinkInfo:
        with self._lock:
            transport, stalls = (self._link.transport, self._link.stalls) if self._link else ("", 0)
            return LinkInfo(
                worker=self.key.worker, rank=self.key.rank, transport=transport, reason=self._reason, stalls=stalls
            )

    def close(self) -> None:
        """Take no more jobs and end the connection; does not wait."""
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)
            if self._link is not None:
                self._link.close()

    def join(self) -> None:
        """After `close`: wait for its threads."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, options: Sequence[Candidate], peer: Peer, secret: ClusterSecret) -> None:
        try:
            link, reason = dial_first(options, peer, secret)
        except LinkClosedError as error:
            self.close()
            self._on_lost(self, str(error))
            return
        with self._lock:
            self._link, self._reason = link, reason
            if self._is_closed:
                link.close()
        reader = threading.Thread(target=self._read_replies, args=(link,), name="kv-out-replies", daemon=True)
        reader.start()
        try:
            while (job := self._jobs.get()) is not None:
                self._do(link, job)
        except LinkClosedError:
            pass  # the reply thread knows why, and tells
        finally:
            link.close()
            reader.join()
            link.release()

    def _read_replies(self, link: Link) -> None:
        reason = "its reader broke"
        try:
            for reply in link.replies():
                self._on_reply(self, reply)
        except LinkClosedError as error:
            reason = str(error)
        finally:  # also if the callback raised: a link without reader must not look alive
            self.close()
            self._on_lost(self, reason)

    def _do(self, link: Link, job: Push | Control) -> None:
        """Send one job's frames. Raises LinkClosedError."""
        if isinstance(job, Control):
            self._send_control(link, job)
            return
        try:
            spec, size = job.pool.spec, link.max_payload_bytes
            for part in slices(spec, job.source_blocks, job.dest_blocks, job.layers, job.route, size):
                if not self._send_slice(link, job, part):
                    return
        except LinkClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - the pool is the caller's: its failure ends this transfer, not the link
            _log.exception("transfer_source_unreadable")
            self._on_broken(job.outgoing, f"the source could not be read: {error}")

    def _send_slice(self, link: Link, job: Push, part: FrameSlice) -> bool:
        """Gather and send one frame; False if the transfer has ended meanwhile."""
        outgoing = job.outgoing
        with link.reserve(part.payload_bytes) as payload:
            with outgoing.lock:
                if not outgoing.can_move_bytes:
                    return False
                outgoing.begin()
                send_ns = int(self._clock.now_s() * 1e9)
                job.pool.read_into(part.source_blocks, part.layers, part.source_heads, payload)
                outgoing.bytes += part.payload_bytes
            frame = replace(
                outgoing.control_frame(FrameKind.DATA, self.key.rank),
                group=job.group, layers=part.layers, heads=part.dest_heads, blocks=part.dest_blocks,
                payload_bytes=part.payload_bytes, payload_crc=checksum(payload), send_ns=send_ns,
            )  # fmt: skip
            link.commit(frame, payload)
        return True

    def _send_control(self, link: Link, job: Control) -> None:
        if job.kind is FrameKind.FINISH:
            with job.outgoing.lock:
                if not job.outgoing.can_move_bytes:
                    return
                job.outgoing.note_finish(self.key.rank)
        link.commit(job.outgoing.control_frame(job.kind, self.key.rank), None)
