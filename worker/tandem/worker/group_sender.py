"""The sending end of a tensor-parallel worker: this rank's own, and every follower's by command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.core.clock import Clock
from tandem.core.ids import BlockId, GroupId, Incarnation, Rank, TransferId
from tandem.kvtransfer.events import Quiesced, SendCompleted, SenderEvent, SendFailed
from tandem.kvtransfer.peer_link import LinkInfo
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.snapshot import OpenTransfer, snapshot_of
from tandem.kvtransfer.state import TransferPhase
from tandem.kvtransfer.ticket import Ticket
from tandem.worker.commands import CancelSending, Finish, Open, PushCommand
from tandem.worker.followers import Followers
from tandem.worker.outcome_aggregation import SendTally
from tandem.worker.reports import Report

HERE = Rank(0)


class GroupSender:
    """A `SendingEnd`: one call for all ranks, one event from all ranks, when none of them reads the source any more."""

    def __init__(
        self,
        open_local: Callable[[Callable[[SenderEvent], None]], TransferSender],
        followers: Followers,
        post: Callable[[object], None],
        clock: Clock,
    ) -> None:
        """`open_local` makes this rank's end with a callback for its events; `post` hands events to the step loop."""
        self._followers, self._post, self._clock = followers, post, clock
        self._tally = SendTally((HERE, *followers.ranks))
        self._opened: dict[TransferId, tuple[Ticket, float]] = {}  # the step loop's
        self._local = open_local(self._on_local)
        followers.listen(self._on_report)

    def open(self, ticket: Ticket) -> None:
        self._tally.open(ticket.transfer)
        self._followers.broadcast(Open(ticket))  # first: should it fail here at once, the cancel comes after it
        try:
            self._local.open(ticket)
        except Exception:
            self._followers.broadcast(CancelSending(ticket.transfer))
            self._tally.forget(ticket.transfer)
            raise
        self._opened = {t: known for t, known in self._opened.items() if self._tally.is_open(t)}
        self._opened[ticket.transfer] = (ticket, self._clock.now_s())

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
        self._local.push(transfer, group, src_blocks, dst_blocks, layers, offset_tokens, tokens)
        self._followers.broadcast(PushCommand(transfer, group, src_blocks, dst_blocks, layers, offset_tokens, tokens))

    def finish(self, transfer: TransferId) -> None:
        self._local.finish(transfer)
        self._followers.broadcast(Finish(transfer))

    def cancel(self, transfer: TransferId) -> None:
        """After return this rank does not read the source; the followers do not once the transfer's event came."""
        self._followers.broadcast(CancelSending(transfer))
        self._local.cancel(transfer)

    def set_incarnation(self, incarnation: Incarnation) -> None:
        """Set this rank's; the receiving end informs the followers."""
        self._local.set_incarnation(incarnation)

    def transfers(self) -> list[OpenTransfer]:
        """This rank's, and those that only followers still work on."""
        local = self._local.transfers()
        listed, now_s = {one.transfer for one in local}, self._clock.now_s()
        elsewhere = [
            snapshot_of(ticket, TransferPhase.PUSHING, now_s - opened_s, moved_bytes=0)
            for transfer, (ticket, opened_s) in self._opened.items()
            if transfer not in listed and self._tally.is_open(transfer)
        ]
        return [*local, *elsewhere]

    def links(self) -> tuple[LinkInfo, ...]:
        """This rank's links, then the followers' as last reported."""
        return (*self._local.links(), *self._followers.links())

    def close(self) -> None:
        self._local.close()

    def _on_local(self, event: SenderEvent) -> None:
        self._note(HERE, event)

    def _on_report(self, rank: Rank, report: Report) -> None:
        if isinstance(report, SendCompleted | SendFailed | Quiesced):
            self._note(rank, report)

    def _note(self, rank: Rank, event: SenderEvent) -> None:
        verdict = self._tally.note(rank, event)
        if verdict.cancels_others:
            self._followers.broadcast_soon(CancelSending(event.transfer))
            if rank != HERE:
                self._local.cancel(event.transfer)
        if verdict.report is not None:
            self._post(verdict.report)
