"""The sending end of one rank: transfers that it feeds, and the links that it keeps to receivers' ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from tandem.core.clock import Clock
from tandem.core.errors import TransferError
from tandem.core.ids import BlockId, GroupId, Incarnation, Rank, TransferId, WorkerId
from tandem.core.link_speed import ReportedLink
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.events import SenderEvent
from tandem.kvtransfer.frame import FrameKind, FrameReply, ReplyKind
from tandem.kvtransfer.host_id import host_id
from tandem.kvtransfer.jobs import Control, Push
from tandem.kvtransfer.kv_pool_access import PoolAccess, TokenRun, is_within
from tandem.kvtransfer.link_speeds import LinkSpeeds
from tandem.kvtransfer.outgoing_transfer import Outgoing
from tandem.kvtransfer.peer_link import LinkKey, PeerLink
from tandem.kvtransfer.state import OpenTransfer
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.transports.base import Peer
from tandem.kvtransfer.transports.dialer import candidates
from tandem.kvtransfer.transports.registry import AUTO, Preference

_log = logging.getLogger(__name__)


class TransferSender:
    """Methods may be called from any thread and never wait for the network; `cancel` waits for one frame's gather.

    Each opened transfer ends with exactly one event: SendCompleted, SendFailed or Quiesced, and from then on its source
    is not read. Calls for a transfer that has ended (its event may still be on its way) do nothing. `on_event` runs on
    transport threads, or inside `cancel`, `open`, `finish` and `close`, and must not block. `pools` are borrowed
    until `close` returned.
    """

    def __init__(
        self,
        *,
        worker: WorkerId,
        incarnation: Incarnation,
        rank: Rank,
        pools: Mapping[GroupId, PoolAccess],
        secret: ClusterSecret,
        on_event: Callable[[SenderEvent], None],
        clock: Clock,
        preference: Preference = AUTO,
        on_device: bool = False,
        link_type: type[PeerLink] = PeerLink,
        speeds: LinkSpeeds | None = None,
    ) -> None:
        """`preference`: the one transport to use, or AUTO; `on_device`: the pools lie in a GPU's memory.

        `speeds`: what is known of links; they are chosen by it, and what is not known is measured. None = the first
        transport that connects is taken.
        `link_type`: what links are made of; tests give one without threads.
        """
        self._worker, self._incarnation, self._rank, self._pools = worker, incarnation, rank, pools
        self._secret, self._on_event, self._clock, self._preference = secret, on_event, clock, preference
        self._host, self._on_device, self._link_type = host_id(), on_device, link_type
        self._speeds = speeds
        self._lock = threading.Lock()  # guards the four below; never held together with a transfer's lock
        self._transfers: dict[TransferId, _OpenTransfer] = {}
        self._links: dict[LinkKey, PeerLink] = {}
        self._left: dict[LinkKey, list[PeerLink]] = {}  # slower ones; what is open on them ends there
        self._is_closed = False

    def open(self, ticket: Ticket) -> None:
        """Begin a transfer: bind it to a link for each receiving rank, dialling in the background where none is kept.

        Raises TransferError for a ticket of another sender or incarnation, ValueError for one that contradicts the
        pools or is open already. A link that cannot be made is reported as SendFailed.
        """
        if (ticket.sender, ticket.sender_incarnation) != (self._worker, self._incarnation):
            raise TransferError("the ticket is for another worker or incarnation", todo="ask for a new one")
        opened = _OpenTransfer(Outgoing(ticket, self._pools, self._rank, self._clock))
        with self._lock:
            if self._is_closed:
                raise TransferError("the sender is closed")
            if ticket.transfer in self._transfers:
                raise ValueError(f"transfer {ticket.transfer} is open already")
            self._transfers[ticket.transfer] = opened
        for rank in opened.outgoing.dest_ranks:
            if not self._bind(opened, rank):
                return

    def push(
        self,
        transfer: TransferId,
        group: GroupId,
        src_blocks: Sequence[BlockId],
        dst_blocks: Sequence[BlockId],
        layers: range,
        offset_tokens: int = 0,
        tokens: int | None = None,
    ) -> None:
        """Queue `layers` (indices in the group) of source blocks for destination blocks.

        These, in blocks of the receiver's size, hold one after another the tokens of the source blocks, from the token
        `offset_tokens` of the first on; tokens past the last source block are zeros. `tokens`:
        so many of them are the prompt's (None = all); under a codec the rest arrives as zeros. Their content must be
        final before the call and stay so until the transfer's event. Raises ValueError for blocks that the ticket does
        not promise, layers that the group does not have, and source blocks that are too few or too many.
        """
        opened = self._find(transfer)
        if opened is None:
            return
        pool, outgoing = self._pools[group], opened.outgoing
        if not outgoing.is_promised(group, frozenset(dst_blocks)):
            raise ValueError(f"the ticket does not promise these blocks of group {group}")
        source = TokenRun(tuple(src_blocks), pool.spec.block_tokens, offset_tokens, tokens)
        if not source.reaches(len(dst_blocks), outgoing.forms[group].spec.block_tokens):
            raise ValueError(
                f"{len(src_blocks)} blocks from token {offset_tokens} on for {len(dst_blocks)} that the ticket promises"
            )
        if not is_within(layers, len(pool.spec.layers)) or outgoing.is_finishing:
            raise ValueError(f"layers {layers} lie outside group {group}, or the transfer is finished")
        for route in outgoing.routes[group]:
            job = Push(outgoing, group, pool, route, source, tuple(dst_blocks), layers)
            link = opened.links.get(route.dest_rank)  # none if the sender is being closed
            if link is not None:
                link.enqueue(job)

    def finish(self, transfer: TransferId) -> None:
        """End the pushes of a transfer; `SendCompleted` follows when every receiving rank has verified its part."""
        opened = self._find(transfer)
        if opened is None:
            return
        opened.outgoing.is_finishing = True
        self._control(opened, FrameKind.FINISH)
        if not opened.outgoing.dest_ranks:
            self._end(opened, opened.outgoing.finish_unfed())

    def cancel(self, transfer: TransferId) -> None:
        """Stop: after return the source is not read, and Quiesced was reported unless another event came first."""
        opened = self._find(transfer)
        if opened is not None:
            self._end(opened, opened.outgoing.cancel(), abort=True)

    def set_incarnation(self, incarnation: Incarnation) -> None:
        """Begin a new incarnation; open transfers of the old one fail. Links are kept."""
        self._incarnation = incarnation
        self._fail_all(lambda t: t.outgoing.ticket.sender_incarnation != incarnation, "a new incarnation began")

    def links(self) -> tuple[ReportedLink, ...]:
        """Every link that transfers go over, with its transport and why that was chosen."""
        with self._lock:
            busy = {link for opened in self._transfers.values() for link in opened.links_now()}
            left = [link for links in self._left.values() for link in links if link in busy]
            kept = [*self._links.values(), *left]
        return tuple(link.info() for link in kept)

    def transfers(self) -> list[OpenTransfer]:
        """Every open transfer: one that is not listed never reads its source again."""
        with self._lock:
            opened = list(self._transfers.values())
        return [one.outgoing.snapshot() for one in opened]

    def close(self) -> None:
        """Fail what is open, end every link and wait for their threads. Not from inside `on_event`."""
        with self._lock:
            self._is_closed = True
            kept = [*self._links.values(), *(link for links in self._left.values() for link in links)]
        self._fail_all(lambda _: True, "the sender was closed")
        for link in kept:
            link.close()
        for link in kept:
            link.join()

    def _find(self, transfer: TransferId) -> _OpenTransfer | None:
        with self._lock:
            return self._transfers.get(transfer)

    def _bind(self, opened: _OpenTransfer, rank: Rank) -> bool:
        """Give the transfer a live link to `rank` and announce it there; False if it has none now."""
        ticket = opened.outgoing.ticket
        key = LinkKey(ticket.receiver, rank, tuple(e for e in ticket.endpoints if e.rank == rank))
        job = Control(opened.outgoing, FrameKind.OPEN)
        while True:
            try:
                with self._lock:
                    if self._is_closed:
                        return False
                    kept = self._links.get(key)
                    link = self._links[key] = kept or self._dial(key)
                    opened.links[rank] = link
            except RuntimeError as error:  # no thread available
                self._end(opened, opened.outgoing.fail(f"the link could not be made: {error}"), abort=True)
                return False
            if link.enqueue(job) or kept is None:  # a new link that has failed already reports it itself
                return True
            self._drop(link)

    def _dial(self, key: LinkKey) -> PeerLink:
        """Dial a link. Raises RuntimeError if no thread is available."""
        link = self._link_type(
            key, on_reply=self._on_reply, on_lost=self._on_lost, on_broken=self._on_broken, clock=self._clock,
            speeds=self._speeds, on_slower=self._on_slower,
        )  # fmt: skip
        peer = Peer(worker=self._worker, incarnation=self._incarnation, rank=self._rank, host=self._host)
        options = candidates(key.endpoints, self._host, self._preference, on_device=self._on_device)
        link.start(options, peer, self._secret)
        return link

    def _drop(self, link: PeerLink) -> None:
        with self._lock:
            if self._links.get(link.key) is link:
                del self._links[link.key]
            elif link in self._left.get(link.key, ()):
                self._left[link.key].remove(link)

    def _on_slower(self, link: PeerLink, transport: str) -> None:
        """Send new transfers over `transport` from now on. The slower link is kept: if it were closed, the receiver
        would fail promised transfers that it has no frame of yet. It is taken back if it becomes the faster one
        again."""
        with self._lock:
            if self._is_closed or self._links.get(link.key) is not link:
                return
            left = self._left.setdefault(link.key, [])
            found = next((other for other in left if other.info().transport == transport), None)
            try:
                faster = found or self._dial(link.key)
            except RuntimeError:  # no thread available: this link goes on, and is measured again
                return
            if found is not None:
                left.remove(found)
            left.append(link)
            self._links[link.key] = faster

    def _on_reply(self, link: PeerLink, reply: FrameReply) -> None:
        opened = self._find(reply.transfer) if reply.kind in (ReplyKind.DONE, ReplyKind.FAIL) else None
        if opened is None or reply.attempt != opened.outgoing.ticket.attempt:
            return
        if opened.links.get(link.key.rank) is not link:  # no link answers for another receiver, or another rank of it
            event(_log, "transfer_reply_foreign", logging.WARNING, peer=link.key.worker, transfer=reply.transfer)
            return
        if reply.kind is ReplyKind.DONE:
            self._end(opened, opened.outgoing.done(link.key.rank))
        else:
            self._end(opened, opened.outgoing.fail(f"the receiver refused: {reply.reason}"), abort=True)

    def _on_lost(self, link: PeerLink, reason: str) -> None:
        self._drop(link)
        self._fail_all(lambda opened: link in opened.links.values(), f"the link to {link.key.worker} ended: {reason}")

    def _on_broken(self, outgoing: Outgoing, reason: str) -> None:
        opened = self._find(outgoing.ticket.transfer)
        if opened is not None:
            self._end(opened, outgoing.fail(reason), abort=True)

    def _fail_all(self, is_affected: Callable[[_OpenTransfer], bool], reason: str) -> None:
        with self._lock:
            affected = [opened for opened in self._transfers.values() if is_affected(opened)]
        for opened in affected:
            self._end(opened, opened.outgoing.fail(reason), abort=True)

    def _end(self, opened: _OpenTransfer, outcome: SenderEvent | None, *, abort: bool = False) -> None:
        """Report the event that ended a transfer, if this call did, and forget it."""
        if outcome is None:
            return
        with self._lock:
            self._transfers.pop(outcome.transfer, None)
        if abort:
            self._control(opened, FrameKind.ABORT)
        self._on_event(outcome)

    def _control(self, opened: _OpenTransfer, kind: FrameKind) -> None:
        for link in opened.links_now():
            link.enqueue(Control(opened.outgoing, kind))


class _OpenTransfer:
    """A transfer and the links that it uses, by receiving rank."""

    def __init__(self, outgoing: Outgoing) -> None:
        self.outgoing = outgoing
        self.links: dict[Rank, PeerLink] = {}

    def links_now(self) -> Iterable[PeerLink]:
        return tuple(self.links.values())
