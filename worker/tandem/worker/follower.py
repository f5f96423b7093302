"""A follower rank: obeys rank 0's commands in their order, reports outcomes of its transfers, decides nothing."""

from __future__ import annotations

import logging
import select
import threading
from collections import deque

import msgspec

from tandem.core.clock import Clock
from tandem.core.errors import TransferError
from tandem.core.ids import Incarnation, TransferId
from tandem.core.logs import event
from tandem.core.timeout_scale import patient
from tandem.engine.runner_protocol import Runner, StepBatch
from tandem.kvtransfer.events import Failed, SendFailed
from tandem.kvtransfer.receiver import TransferReceiver
from tandem.kvtransfer.sender import TransferSender
from tandem.worker import reports
from tandem.worker.commands import (
    Admit,
    CancelReceiving,
    CancelSending,
    Command,
    CopyBlocks,
    Expect,
    Finish,
    Joiner,
    Open,
    PushCommand,
    Revoke,
    SetIncarnation,
    Step,
    Stop,
    decode,
)
from tandem.workercore.heartbeat import Pulse
from tandem.workercore.message_ring import RingReader, RingWriter

_log = logging.getLogger(__name__)
WAIT_S = 0.1
REPORT_TIMEOUT_S = patient(10.0)
COUNTERS_EVERY_S = 0.1
LINKS_EVERY_S = 2.0
BETWEEN_STEPS = (Step, CopyBlocks, Expect, Stop)
"""Commands that are never obeyed inside a step."""


class Reporter:
    """Sends reports to rank 0, from any thread."""

    def __init__(self, writer: RingWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()

    def say(self, report: reports.Report) -> None:
        """Raises TimeoutError if rank 0 takes nothing any more."""
        data = reports.encode(report)
        with self._lock:
            self._writer.write(data, REPORT_TIMEOUT_S)


class Follower:
    """One thread runs everything but the transports' reports."""

    def __init__(
        self,
        runner: Runner,
        receiver: TransferReceiver,
        sender: TransferSender,
        commands: RingReader,
        reporter: Reporter,
        pulse: Pulse,
        clock: Clock,
    ) -> None:
        self._runner, self._receiver, self._sender = runner, receiver, sender
        self._commands, self._reporter, self._pulse, self._clock = commands, reporter, pulse, clock
        self._joiner = Joiner()
        self._waiting: deque[tuple[int, Command]] = deque()  # taken from the ring, not obeyed yet
        self._held: deque[PushCommand | Finish] = deque()  # wait for the lease
        self._incarnation = Incarnation(0)
        self._is_stopping = False
        self._batch: StepBatch | None = None  # being computed now
        self._counters, self._counters_s = reports.Counters({}), 0.0
        self._links, self._links_s = reports.Links(()), float("-inf")

    def run(self) -> None:
        """Run until stopped. An exception here ends the process: the ranks no longer agree."""
        while not self._is_stopping:
            self.turn()

    def batch_counts(self) -> dict[str, int]:
        """Numbers of the step in progress; {} between steps. Any thread."""
        batch = self._batch
        return batch.counts() if batch is not None else {}

    def close(self) -> None:
        """End the transfers of this rank."""
        self._sender.close()
        self._receiver.close()

    def turn(self, max_wait_s: float = WAIT_S) -> None:
        """Obey the commands that are there, waiting up to `max_wait_s` for one."""
        if not self._waiting:
            select.select([self._commands.filled], [], [], max_wait_s)
        self._take()
        while self._waiting and not self._is_stopping:
            self._obey(self._waiting.popleft()[1])
            self._take()
        self._release_held()
        self._report_changes()

    def _take(self) -> None:
        for message in self._commands.read_all():
            if (data := self._joiner.add(message)) is not None:
                self._waiting.append(decode(data))

    def _on_layers(self, _first: int, last: int) -> None:
        """Inside a step: obey commands that rank 0 sent when it had stored no more layers than this rank has now."""
        self._take()
        while self._waiting and self._waiting[0][0] <= last and not isinstance(self._waiting[0][1], BETWEEN_STEPS):
            self._obey(self._waiting.popleft()[1])

    def _obey(self, command: Command) -> None:
        match command:
            case Step():
                self._step(command)
            case CopyBlocks():
                self._runner.copy_blocks(command.group, command.pairs)
            case PushCommand() | Finish():
                self._release_held()
                self._held.append(command)
                self._release_held()
            case Open():
                self._open(command)
            case CancelSending():
                self._drop_held(command.transfer)
                self._sender.cancel(command.transfer)
            case Expect():
                self._expect(command)
            case Admit():
                self._receiver.admit(command.transfer)
            case CancelReceiving():
                self._receiver.cancel(command.transfer, command.reason)
            case Revoke():
                if not self._receiver.revoke(command.transfer, even_if_begun=True):  # complete, or failed
                    self._receiver.cancel(command.transfer, "revoked")
            case SetIncarnation():
                self._incarnation = command.incarnation
                self._held.clear()  # they belong to the old one; its transfers fail now
                self._receiver.set_incarnation(command.incarnation)
                self._sender.set_incarnation(command.incarnation)
            case Stop():
                self._is_stopping = True

    def _step(self, command: Step) -> None:
        """Rank 0 holds the lease when it begins a step; the step is finished even if it lapses meanwhile."""
        self._batch = command.batch
        self._pulse.begin_step()
        try:
            self._runner.step(command.batch, (), self._on_layers if command.has_hook else None)
        finally:
            self._pulse.end_step()
            self._batch = None

    # ---- sending ---------------------------------------------------------------------------------------------------

    def _open(self, command: Open) -> None:
        try:
            self._sender.open(command.ticket)
        except (TransferError, ValueError) as error:
            self._reporter.say(SendFailed(transfer=command.ticket.transfer, reason=str(error)))

    def _release_held(self) -> None:
        """Past its lease a rank pushes nothing: earlier push commands wait for the lease's return."""
        while self._held and self._has_lease():
            command = self._held.popleft()
            try:
                if isinstance(command, Finish):
                    self._sender.finish(command.transfer)
                else:
                    self._sender.push(*msgspec.structs.astuple(command))
            except ValueError as error:  # rank 0 pushed the same: then this rank's part alone is over
                self._sender.cancel(command.transfer)
                event(_log, "push refused", logging.ERROR, transfer=command.transfer, reason=error)

    def _drop_held(self, transfer: TransferId) -> None:
        self._held = deque(command for command in self._held if command.transfer != transfer)

    def _has_lease(self) -> bool:
        """Rank 0 announces another incarnation first."""
        return self._pulse.has_lease(self._clock.now_s(), self._incarnation)

    # ---- receiving -------------------------------------------------------------------------------------------------

    def _expect(self, command: Expect) -> None:
        try:
            self._receiver.expect(command.ticket)
        except (TransferError, ValueError) as error:
            self._reporter.say(Failed(transfer=command.ticket.transfer, reason=str(error)))
        else:
            self._reporter.say(reports.Expected(command.ticket.transfer))

    def _report_changes(self) -> None:
        """Report counters and links, each at its interval and only if it changed."""
        now_s = self._clock.now_s()
        if now_s - self._counters_s >= COUNTERS_EVERY_S:
            self._counters_s = now_s
            counters = reports.Counters(self._receiver.counters())
            if counters != self._counters:
                self._counters = counters
                self._reporter.say(counters)
        if now_s - self._links_s >= LINKS_EVERY_S:
            self._links_s = now_s
            links = reports.Links(self._sender.links())
            if links != self._links:
                self._links = links
                self._reporter.say(links)
