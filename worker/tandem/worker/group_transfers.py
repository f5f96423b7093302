"""Both transfer ends of a tensor-parallel worker: this rank's own, and every follower's by command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.core.clock import Clock
from tandem.core.errors import WorkerLostError
from tandem.core.ids import BlockId, GroupId, Incarnation, Rank, TransferId
from tandem.core.link_speed import ReportedLink
from tandem.kvtransfer.events import Failed, Quiesced, ReceiverEvent, SendCompleted, SenderEvent, SendFailed, Verified
from tandem.kvtransfer.receiver import TransferReceiver
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.state import OpenTransfer, TransferPhase
from tandem.kvtransfer.ticket import Endpoint, Ticket
from tandem.worker.commands import (
    Admit,
    CancelReceiving,
    CancelSending,
    Expect,
    Finish,
    Open,
    PushCommand,
    Revoke,
    SetIncarnation,
)
from tandem.worker.followers import COMMAND_TIMEOUT_S, Followers
from tandem.worker.outcome_aggregation import ReceiveAggregator, SendTally
from tandem.worker.reports import Expected, Report

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
        self._local = open_local(lambda event: self._note(HERE, event))
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
            OpenTransfer(ticket, TransferPhase.PUSHING, now_s - opened_s, bytes=0)
            for transfer, (ticket, opened_s) in self._opened.items()
            if transfer not in listed and self._tally.is_open(transfer)
        ]
        return [*local, *elsewhere]

    def links(self) -> tuple[ReportedLink, ...]:
        """This rank's links, then the followers' as last reported."""
        return (*self._local.links(), *self._followers.links())

    def close(self) -> None:
        self._local.close()

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


class GroupReceiver:
    """A `ReceivingEnd`: one call for all ranks, one event from all ranks.

    Its guarantees about blocks rest on the order of the step loop's commands: a follower has fenced a transfer that the
    step loop cancelled before it obeys any step, copy or ticket that uses the blocks again.
    """

    def __init__(
        self,
        open_local: Callable[[Callable[[ReceiverEvent], None]], TransferReceiver],
        followers: Followers,
        post: Callable[[object], None],
    ) -> None:
        """`open_local` makes this rank's end with a callback for its events; `post` hands events to the step loop."""
        self._followers, self._post = followers, post
        self._tally = ReceiveAggregator((HERE, *followers.ranks))
        self._local = open_local(lambda event: self._note(HERE, event))
        followers.listen(self._on_report)

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (*self._local.endpoints(), *self._followers.endpoints())

    def expect(self, ticket: Ticket) -> None:
        """Returns when every rank takes the ticket's frames, for the sender may push as soon as it has the ticket.

        Raises WorkerLostError if a follower does not get to it. Between steps only: inside one, a follower may wait for
        this rank.
        """
        if self._followers.is_in_step:
            raise RuntimeError("a ticket cannot be granted inside a step")
        self._tally.expect(ticket.transfer)
        try:
            self._local.expect(ticket)
            self._tally.expected(HERE, ticket.transfer)
            self._followers.broadcast(Expect(ticket))
        except Exception:
            self._tally.forget(ticket.transfer)
            raise
        if not self._tally.wait_expected(ticket.transfer, COMMAND_TIMEOUT_S):
            raise WorkerLostError("a rank does not read its commands", why=f"no answer for {COMMAND_TIMEOUT_S:g} s")

    def admit(self, transfer: TransferId) -> None:
        self._local.admit(transfer)
        self._followers.broadcast(Admit(transfer))
        self._tally.forget(transfer)

    def cancel(self, transfer: TransferId, reason: str = "cancelled") -> None:
        """After return this rank is fenced, and every follower before it obeys the next command."""
        self._local.cancel(transfer, reason)
        self._followers.broadcast(CancelReceiving(transfer, reason))
        self._tally.forget(transfer)

    def revoke(self, transfer: TransferId) -> bool:
        """If no byte came to this rank. A follower that has some by then drops the rest just as quietly."""
        if not self._local.revoke(transfer):
            return False
        self._followers.broadcast(Revoke(transfer))
        self._tally.forget(transfer)
        return True

    def set_incarnation(self, incarnation: Incarnation) -> None:
        """Set it at both ends of the followers; those of this rank are set one by one."""
        self._local.set_incarnation(incarnation)
        self._followers.broadcast(SetIncarnation(incarnation))

    def transfers(self) -> list[OpenTransfer]:
        return self._local.transfers()

    def counters(self) -> dict[str, int]:
        """Sums over the ranks; `open` are this rank's. Followers' are up to 0.1 s old."""
        total = self._local.counters()
        for counters in self._followers.counters():
            for name, value in counters.items():
                if name != "open":
                    total[name] = total.get(name, 0) + value
        return total

    def close(self) -> None:
        self._local.close()

    def _on_report(self, rank: Rank, report: Report) -> None:
        if isinstance(report, Expected):
            self._tally.expected(rank, report.transfer)
        elif isinstance(report, Verified | Failed):
            self._note(rank, report)

    def _note(self, rank: Rank, event: ReceiverEvent) -> None:
        verdict = self._tally.note(rank, event)
        if verdict.cancels_others:
            reason = f"rank {rank} failed"
            if rank != HERE:
                self._local.cancel(event.transfer, reason)
            self._followers.broadcast_soon(CancelReceiving(event.transfer, reason))
        if verdict.report is not None:
            self._post(verdict.report)
