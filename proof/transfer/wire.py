"""Runs one case of the wire part: sends commands to the sending process, acts as the roles, and judges every outcome.

Rules of a role: a transfer that failed anywhere is cancelled at every rank of both ends; one that every receiving rank
verified is admitted.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from proof.transfer.plan import BREAKING, HARMLESS, LETHAL, NETWORK, Case, Move
from proof.transfer.receiving import Canceller, ReceivingWorker, contents_of
from proof.transfer.sender_process import RECEIVER, SENDER, SendingProcess
from proof.transfer.shapes import NUM_BLOCKS
from tandem.core.errors import TransferError
from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, RequestId, TransferId
from tandem.core.kv_layout import DTYPE_BYTES
from tandem.kvtransfer.events import Failed, Verified
from tandem.kvtransfer.ticket import Endpoint, GroupBlocks, Ticket
from tests.integration.kvtransfer.faults import Proxy
from tools.ticket_json import as_json

PATIENCE_S = 20.0
NETWORK_PATIENCE_S = 1.0
"""After a bit flipped on the network: a flipped length may leave both ends waiting, which the roles' deadline ends."""
SLOW_S = 0.02
BREAK_IS_NOTICED_S = 1.0
"""So long after a connection was broken on purpose, transfers may fail because their sender had not noticed yet."""


@dataclass
class Flight:
    """One transfer under way. Outcomes by rank."""

    ticket: Ticket
    move: Move
    contents: dict[GroupId, Any]
    received: dict[int, Any] = field(default_factory=dict)
    sent: dict[int, dict[str, Any]] = field(default_factory=dict)
    is_given_up: bool = False
    is_judged: bool = False
    fenced: dict[int, int] = field(default_factory=dict)
    hits: set[int] = field(default_factory=set)
    writes: int = 0

    @property
    def blocks(self) -> set[tuple[GroupId, int]]:
        return {(group.group, block) for group in self.ticket.groups for block in group.blocks}


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes of one admitted transfer at the receiver. `held` for the whole prompt on all ranks; `moved`: received, each
    head once; `landed`: received, a head that several ranks hold counted at each. `ideal_*`: the sum over groups of
    blocks × the other dimensions × dtype bytes, for `held` and `landed` with replicas, for `moved` without."""

    is_chunked: bool
    hit: float
    held: int
    ideal_held: int
    moved: int
    ideal_moved: int
    landed: int
    ideal_landed: int


@dataclass
class Report:
    """Result of a case. `hits`: transfers that a fault really hit, by kind. `held`: descriptors and threads of both
    processes after the end. `violations` are empty if every promise was kept."""

    transfers: int = 0
    admitted: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    held: tuple[int, ...] = ()
    figures: list[Figures] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


class Wire(SendingProcess):
    """A sending process, and cases run against it one after the other."""

    def __init__(self, folder: Path, log: Path) -> None:
        super().__init__(log)
        self._folder = folder

    def run(self, case: Case, *, is_measuring: bool = False) -> Report:
        (folder := self._folder / case.name.replace("/", "-")).mkdir(exist_ok=True)
        run = CaseRun(self, case, folder, is_measuring=is_measuring)
        try:
            for number, wave in enumerate(case.waves):
                run.wave(number, wave)
        finally:
            run.close()
        return run.report


class CaseRun:
    """The receiving worker of a case, and the state of its transfers."""

    def __init__(self, wire: Wire, case: Case, folder: Path, *, is_measuring: bool) -> None:
        self._is_measuring = is_measuring
        self._wire, self._case, self._setting = wire, case, case.setting
        self.report = Report()
        self._rng = random.Random(case.name)
        self._sender, self._receiver = Incarnation(11), Incarnation(22)
        self._number = 0
        self._flights: dict[int, Flight] = {}
        self._worker = ReceivingWorker(case.setting, self._receiver, folder)
        self._worker.watch(self._on_write)
        self._canceller = Canceller(self._cancel_receivers)
        endpoints = [endpoint for receiver in self._worker.receivers for endpoint in receiver.endpoints()]
        self._proxies = [Proxy(endpoint) for endpoint in endpoints] if case.setting.through_proxy else []
        self._endpoints: Sequence[Endpoint] = [proxy.endpoint for proxy in self._proxies] or endpoints
        self._images = self._worker.images()
        self._last: Flight | None = None
        self._flipping: Proxy | None = None
        self._broken_s = -BREAK_IS_NOTICED_S
        self._ending = threading.Lock()  # the canceller's thread gives up, too
        wire.tell(
            "begin", transport=case.setting.transport, shape=case.setting.shape, tp=case.setting.source_tp,
            block_tokens=case.setting.source_tokens, incarnation=self._sender,
        )  # fmt: skip

    def wave(self, number: int, moves: Sequence[Move]) -> None:
        """Run the transfers of a wave to their ends."""
        self._unchanged(set(), f"between waves, before {number}")
        free = {spec.group: self._rng.sample(range(NUM_BLOCKS), NUM_BLOCKS) for spec in self._worker.specs}
        sources = {spec.group: self._rng.sample(range(NUM_BLOCKS), NUM_BLOCKS) for spec in self._worker.specs}
        self._flights = {}
        commands = []
        for place, move in enumerate(moves):
            seed = f"{self._case.name}/{number}/{place}"
            ticket = self._ticket(move, free)
            count = -(-move.tokens // self._setting.source_tokens)
            source = [[sources[spec.group].pop() for _ in range(count)] for spec in self._worker.specs]
            contents = contents_of(seed, self._setting, self._worker.specs, move.tokens)
            self._flights[ticket.transfer] = Flight(ticket, move, contents)
            commands.append({"ticket": as_json(ticket), "seed": seed, "source": source, "move": asdict(move)})
        for flight in self._flights.values():
            for receiver in self._worker.receivers:
                receiver.expect(flight.ticket)
            self._arm_network(flight)
        self._wire.tell("wave", transfers=commands)
        self._until_over(number)
        self._judge(number)

    def _ticket(self, move: Move, free: dict[GroupId, list[int]]) -> Ticket:
        self._number += 1
        groups = []
        for position, spec in enumerate(self._worker.specs):
            logical = spec.blocks_for(move.tokens)
            skip = logical if move.hit == 1.0 else int(logical * move.hit)
            if move.same_blocks and self._last is not None:
                taken: list[int] = list(self._last.ticket.groups[position].blocks)
                free[spec.group] = [block for block in free[spec.group] if block not in taken] + taken
            blocks = [free[spec.group].pop() for _ in range(logical - skip)]
            groups.append(GroupBlocks(group=spec.group, skip=skip, blocks=tuple(map(BlockId, blocks))))
        return Ticket(
            transfer=TransferId(self._number), request=RequestId(f"r{self._number}"), attempt=Attempt(2),
            sender=SENDER, sender_incarnation=self._sender, receiver=RECEIVER, receiver_incarnation=self._receiver,
            groups=tuple(groups), endpoints=tuple(self._endpoints), layout=self._worker.layout,
        )  # fmt: skip

    # ---- what happens ------------------------------------------------------------------------------------------------

    def _arm_network(self, flight: Flight) -> None:
        if flight.move.fault.kind == "network_flip":
            proxy = self._proxies[flight.move.fault.source_rank % len(self._proxies)]
            to_receiver = flight.move.fault.place < 0.7
            self._flipping = proxy
            self._note_break("network_flip")
            proxy.flip(to_receiver=to_receiver, after_bytes=flight.move.fault.at if to_receiver else 40)

    def _on_write(self, group: GroupId, blocks: Sequence[BlockId]) -> None:
        """Called on a transport's thread, before it writes."""
        for flight in tuple(self._flights.values()):
            fault = flight.move.fault
            if fault.kind not in ("slow_receiver", "cancel_receiver", "network_cut"):
                continue
            if (group, blocks[0]) in flight.blocks:
                flight.writes += 1
                if fault.kind == "slow_receiver" and flight.writes <= 3:
                    self.report.hits["slow_receiver"] += flight.writes == 1
                    threading.Event().wait(SLOW_S * fault.place)
                elif flight.writes == fault.at + 1 and fault.kind == "cancel_receiver":
                    self._canceller.put(flight.ticket.transfer)
                elif flight.writes == fault.at + 1 and fault.kind == "network_cut":
                    self.report.hits["network_cut"] += 1
                    self._note_break(fault.kind)
                    for proxy in self._proxies:
                        proxy.cut()

    def _disarm_network(self) -> None:
        """Faults that did not come to pass in this wave must not hit the next one."""
        for proxy in self._proxies:
            with proxy._lock:
                was_left = bool(proxy._flips)
                proxy._flips.clear()
            is_meant = any(flight.move.fault.kind == "network_flip" for flight in self._flights.values())
            self.report.hits["network_flip"] += is_meant and not was_left and proxy is self._flipping
        self._flipping = None

    def _note_break(self, kind: str) -> None:
        if kind in BREAKING:
            self._broken_s = time.monotonic()

    def _cancel_receivers(self, transfer: int) -> None:
        flight = self._flights.get(transfer)
        if flight is not None:
            self._give_up(flight)
            self.report.hits["cancel_receiver"] += 1

    def _give_up(self, flight: Flight) -> None:
        """Cancel at every rank of both ends, as the roles do."""
        with self._ending:
            if flight.is_given_up or flight.is_judged:
                return
            for rank, receiver in enumerate(self._worker.receivers):
                receiver.cancel(flight.ticket.transfer)
                flight.fenced[rank] = self._worker.digest(rank, flight.ticket.groups)
            flight.is_given_up = True
        self._wire.tell("cancel", transfer=flight.ticket.transfer)

    def _is_over(self, flight: Flight) -> bool:
        is_received = len(flight.received) == self._setting.dest_tp or flight.is_given_up
        return is_received and len(flight.sent) == self._setting.source_tp

    def _until_over(self, number: int) -> None:
        is_network = any(flight.move.fault.kind in NETWORK for flight in self._flights.values())
        deadline_s = time.monotonic() + (NETWORK_PATIENCE_S if is_network else PATIENCE_S)
        has_pushed = False
        while not (has_pushed and all(map(self._is_over, self._flights.values()))):
            has_pushed |= self._turn()
            if time.monotonic() < deadline_s:
                continue
            stuck = [flight for flight in self._flights.values() if not self._is_over(flight)]
            if not is_network or any(flight.is_given_up for flight in stuck):
                self._violate(f"wave {number}: no terminal state after {PATIENCE_S:g} s: {[_said(f) for f in stuck]}")
            if all(flight.is_given_up for flight in stuck):
                return
            for flight in stuck:
                self.report.hits["ended by the deadline"] += 1
                self._give_up(flight)
            deadline_s = time.monotonic() + PATIENCE_S

    def _turn(self) -> bool:
        """Take in messages of both ends; True if the sender has pushed everything."""
        has_pushed = False
        try:
            message = self._wire.said.get(timeout=0.001)
            while True:
                has_pushed |= self._from_sender(message)
                message = self._wire.said.get_nowait()
        except queue.Empty:
            pass
        while not self._worker.events.empty():
            self._from_receiver(*self._worker.events.get())
        return has_pushed

    def _from_sender(self, message: dict[str, Any]) -> bool:
        kind, flight = message["is"], self._flights.get(message.get("transfer", 0))
        if kind == "ended":
            raise RuntimeError("the sending process ended; see its log")
        if kind == "hit":
            self._note_break(message["kind"])
            if flight is not None:  # else a frame that was on its way when its transfer was cancelled
                self.report.hits[message["kind"]] += not flight.hits
                flight.hits.add(message["dest_rank"])
                if message["kind"] == "new_incarnation":
                    self._begin_anew(flight)
        elif kind == "event":
            if flight is None or message["rank"] in flight.sent:
                self._violate(f"a second or late outcome at the sender: {message}")
            else:
                flight.sent[message["rank"]] = message
                if message["event"] != "SendCompleted" and not self._is_verified(flight):
                    self._give_up(flight)
        return bool(kind == "pushed")

    def _from_receiver(self, rank: int, event: Verified | Failed) -> None:
        flight = self._flights.get(event.transfer)
        if flight is None or rank in flight.received:
            self._violate(f"a second or late outcome at the receiver's rank {rank}: {event}")
            return
        flight.received[rank] = event
        if isinstance(event, Failed):
            self._give_up(flight)
        elif wrong := self._worker.wrong_blocks(rank, flight.ticket.groups, flight.contents):
            self._violate(f"{_said(flight)}: rank {rank} verified {wrong} wrong blocks")

    def _begin_anew(self, flight: Flight) -> None:
        if flight.move.fault.place < 0.5:
            self._sender = Incarnation(self._sender + 100)
            self._wire.tell("incarnation", incarnation=self._sender)
        else:
            self._receiver = Incarnation(self._receiver + 100)
            for receiver in self._worker.receivers:
                receiver.set_incarnation(self._receiver)

    def _is_verified(self, flight: Flight) -> bool:
        while not self._worker.events.empty():
            self._from_receiver(*self._worker.events.get())
        verified = [event for event in flight.received.values() if isinstance(event, Verified)]
        return len(verified) == self._setting.dest_tp

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def _was_broken(self, flight: Flight) -> bool:
        """True if it failed because a fault had broken the link just before."""
        is_recent = time.monotonic() - self._broken_s < BREAK_IS_NOTICED_S
        is_excused = is_recent and any(words in _said(flight) for words in ("link to", "connection from"))
        self.report.hits["failed on a link broken before"] += is_excused
        return is_excused

    def _judge(self, number: int) -> None:
        self._disarm_network()
        is_calm = all(flight.move.fault.kind in HARMLESS for flight in self._flights.values())
        for flight in self._flights.values():
            self.report.transfers += 1
            words, kind = f"wave {number}, {_said(flight)}", flight.move.fault.kind
            with self._ending:
                flight.is_judged = True
            if flight.is_given_up:
                self._gone(flight, words)
            else:
                self._admit(flight, words)
            if kind in (*LETHAL, "late"):
                for rank in flight.hits:
                    if isinstance(flight.received.get(rank), Verified):
                        self._violate(f"{words}: rank {rank} verified what {kind} had hit")
            if flight.is_given_up and is_calm and not self._was_broken(flight):
                self._violate(f"{words}: failed with nothing wrong")
            if all(m["event"] == "SendCompleted" for m in flight.sent.values()) and not self._is_verified(flight):
                self._violate(f"{words}: sent, but not received")
        self._unchanged(set().union(*(flight.blocks for flight in self._flights.values())), f"wave {number}")
        if self._worker.open_transfers:
            self._violate(f"wave {number}: {self._worker.open_transfers} transfers are open at the receiver")
        self._wire.tell("status")
        if still := self._wire.expect("status")["open"]:
            self._violate(f"wave {number}: transfers {still} are open at the sender")
        self._images = self._worker.images()
        self._last = next(reversed(self._flights.values()))

    def _admit(self, flight: Flight, words: str) -> None:
        for rank, receiver in enumerate(self._worker.receivers):
            try:
                receiver.admit(flight.ticket.transfer)
            except TransferError as error:
                self._violate(f"{words}: rank {rank} does not admit it: {error}")
            if wrong := self._worker.wrong_blocks(rank, flight.ticket.groups, flight.contents):
                self._violate(f"{words}: {wrong} wrong blocks admitted by rank {rank}")
        received = sum(event.bytes for event in flight.received.values())
        self.report.admitted += 1
        if self._is_measuring:
            self.report.figures.append(self._measure(flight))
        self.report.bytes += received
        if all(message["event"] == "SendCompleted" for message in flight.sent.values()):
            sent = sum(message["bytes"] for message in flight.sent.values())
            if sent != received and flight.move.fault.kind not in ("duplicate", "stale_attempt"):
                self._violate(f"{words}: {sent} bytes sent, {received} received")

    def _measure(self, flight: Flight) -> Figures:
        worker, tp, move = self._worker, self._setting.dest_tp, flight.move
        totals = Counter[str]()
        for promised, spec in zip(flight.ticket.groups, worker.specs, strict=True):
            one_head = len(spec.layers) * spec.planes * spec.block_tokens * spec.width * DTYPE_BYTES[spec.dtype]
            prompt, seen = spec.blocks_for(move.tokens), set[range]()
            for rank in range(tp):
                heads, pool = spec.heads_of(rank, tp), worker.pools[rank][spec.group]
                totals["held"] += prompt * len(worker.memory[rank][spec.group]) // NUM_BLOCKS
                totals["ideal_held"] += prompt * one_head * len(heads)
                totals["landed"] += pool.written
                totals["ideal_landed"] += len(promised.blocks) * one_head * len(heads)
                if heads not in seen:
                    totals["moved"] += pool.written
                    totals["ideal_moved"] += len(promised.blocks) * one_head * len(heads)
                seen.add(heads)
                pool.written = 0
        return Figures(is_chunked=move.chunk_blocks > 0, hit=move.hit, **totals)

    def _gone(self, flight: Flight, words: str) -> None:
        """Check a given up transfer: nothing may have landed after the fence."""
        for rank, receiver in enumerate(self._worker.receivers):
            receiver.cancel(flight.ticket.transfer)
            if self._worker.digest(rank, flight.ticket.groups) != flight.fenced[rank]:
                self._violate(f"{words}: bytes landed on rank {rank} after the fence")

    def _unchanged(self, but: set[tuple[GroupId, int]], when: str) -> None:
        if strays := self._worker.changed_blocks(self._images) - but:
            self._violate(f"{when}: blocks {sorted(strays)} changed and were promised to nobody")

    def _violate(self, words: str) -> None:
        self.report.violations.append(f"{self._case.name} {self._setting}: {words}")

    def close(self) -> None:
        """End both ends; nothing may come or land any more."""
        self._canceller.close()
        self._wire.tell("close")
        closed = self._wire.expect("closed")
        self._worker.close()
        for proxy in self._proxies:
            proxy.close()
        here = psutil.Process()
        self.report.held = (closed["descriptors"], closed["threads"], here.num_fds(), here.num_threads())
        self._flights = {}
        self._turn()
        self._unchanged(set(), "after the end")


def _said(flight: Flight) -> str:
    """A flight in words."""
    received = {rank: type(event).__name__ for rank, event in flight.received.items()}
    reasons = [event.reason for event in flight.received.values() if isinstance(event, Failed)]
    reasons += [message["reason"] for message in flight.sent.values() if message["reason"]]
    sent = {rank: message["event"] for rank, message in flight.sent.items()}
    return f"{flight.move} → {received} {sent} {reasons}"
