"""The sending worker of the wire part: all its ranks' TransferSenders in a process of their own, and that from outside.

Driven by JSON lines on stdin; events, hits of faults and answers leave as JSON lines on stdout.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from proof.transfer.plan import Fault, Move
from proof.transfer.shapes import NUM_BLOCKS, drawn, in_blocks, place, specs_of, view
from proof.transfer.tampering import Tampering
from tandem.core.clock import MonotonicClock
from tandem.core.ids import BlockId, Incarnation, Rank, TransferId, WorkerId
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.kv_pool_access import HostPool
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.ticket import Ticket
from tools.ticket_json import ticket_of

SECRET = ClusterSecret(b"the secret of this proof")
SENDER, RECEIVER = WorkerId("p0"), WorkerId("d0")
_output = threading.Lock()


class SendingProcess:
    """`sender_process` from outside. `said`: its messages, in order. `tell` may be called from any thread."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("ab")
        self._telling = threading.Lock()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "proof.transfer.sender_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="from sender", daemon=True)
        self._reader.start()
        self.expect("ready")

    def tell(self, do: str, **fields: Any) -> None:
        assert self._child.stdin is not None
        with self._telling:
            self._child.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self._child.stdin.flush()

    def expect(self, kind: str) -> dict[str, Any]:
        """The next message of that kind; events before it are kept in `said`."""
        kept = []
        try:
            while (message := self.said.get(timeout=60))["is"] != kind:
                if message["is"] == "ended":
                    raise RuntimeError("the sending process ended; see its log")
                kept.append(message)
            return message
        finally:
            for other in kept:
                self.said.put(other)

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join(10)
        assert self._child.stdout is not None
        self._child.stdout.close()
        self._log.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.said.put(json.loads(line))
        self.said.put({"is": "ended"})


class Worker:
    """The ranks of one case."""

    def __init__(self, begin: dict[str, Any]) -> None:
        self.specs = specs_of(begin["shape"], begin["block_tokens"])
        self.tp = int(begin["tp"])
        self.memory = [
            {s.group: bytearray(NUM_BLOCKS * s.block_bytes(self.tp)) for s in self.specs} for _ in range(self.tp)
        ]
        self.senders = [self._sender(rank, begin) for rank in range(self.tp)]

    def _sender(self, rank: int, begin: dict[str, Any]) -> TransferSender:
        def report(event: Any) -> None:
            fields = {"bytes": getattr(event, "bytes", 0), "reason": getattr(event, "reason", "")}
            say("event", rank=rank, event=type(event).__name__, transfer=event.transfer, **fields)

        pools = {s.group: HostPool(s, self.tp, memoryview(self.memory[rank][s.group])) for s in self.specs}
        return TransferSender(
            worker=SENDER, incarnation=Incarnation(begin["incarnation"]), rank=Rank(rank), pools=pools,
            secret=SECRET, on_event=report, clock=MonotonicClock(), preference=begin["transport"],
        )  # fmt: skip

    def wave(self, transfers: list[dict[str, Any]], tampering: Tampering) -> None:
        """Open all, push them in turns, finish all."""
        opened = []
        for fields in transfers:
            move = Move(**(fields["move"] | {"fault": Fault(**fields["move"]["fault"])}))
            ticket = ticket_of(fields["ticket"])
            self._fill(fields["seed"], move.tokens, fields["source"])
            tampering.plan(ticket.transfer, move.fault)
            for sender in self.senders:
                sender.open(ticket)
            opened.append((ticket, self._pushes(ticket, move, fields["source"])))
        while opened:
            for entry in tuple(opened):
                ticket, pushes = entry
                push = next(pushes, None)
                if push is None:
                    for sender in self.senders:
                        sender.finish(ticket.transfer)
                    opened.remove(entry)
                    continue
                for sender in self.senders:
                    sender.push(ticket.transfer, *push)

    def _fill(self, seed: str, tokens: int, source: list[list[int]]) -> None:
        """Compute the prompt: whole blocks of drawn content."""
        for spec, blocks in zip(self.specs, source, strict=True):
            content = drawn(seed, spec, len(blocks) * spec.block_tokens)
            for rank in range(self.tp):
                pool = view(self.memory[rank][spec.group], spec, self.tp)
                place(pool, blocks, in_blocks(content, spec, self.tp, rank, 0, len(blocks)))

    def _pushes(self, ticket: Ticket, move: Move, source: list[list[int]]) -> Iterator[tuple[Any, ...]]:
        for spec, theirs, promised in zip(self.specs, ticket.layout.groups, ticket.groups, strict=True):
            count, blocks = len(promised.blocks), source[spec.group]
            for first in range(0, count, move.chunk_blocks or count or 1):
                last = min(count, first + (move.chunk_blocks or count))
                begin = (promised.skip + first) * theirs.block_tokens
                end = min((promised.skip + last) * theirs.block_tokens, move.tokens)
                ours = blocks[begin // spec.block_tokens : -(-end // spec.block_tokens)]
                layers = len(spec.layers)
                for layer in range(0, layers, move.layer_step or layers):
                    some = range(layer, min(layers, layer + (move.layer_step or layers)))
                    dest = promised.blocks[first:last]
                    yield spec.group, tuple(map(BlockId, ours)), dest, some, begin % spec.block_tokens


def main() -> None:
    cancels: queue.SimpleQueue[TransferId] = queue.SimpleQueue()

    def hit(transfer: TransferId, kind: str, dest_rank: int) -> None:
        say("hit", transfer=transfer, kind=kind, dest_rank=dest_rank)
        if kind == "cancel_sender":
            cancels.put(transfer)

    tampering = Tampering(hit)
    tampering.install()
    worker: Worker | None = None

    def cancel() -> None:
        while True:
            transfer = cancels.get()
            for sender in worker.senders if worker else ():
                sender.cancel(transfer)

    threading.Thread(target=cancel, daemon=True).start()
    say("ready")
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "begin":
                tampering.reset()
                worker = Worker(command)
            case "wave":
                assert worker is not None
                worker.wave(command["transfers"], tampering)
                say("pushed")
            case "cancel":
                assert worker is not None
                for sender in worker.senders:
                    sender.cancel(TransferId(command["transfer"]))
            case "incarnation":
                assert worker is not None
                for sender in worker.senders:
                    sender.set_incarnation(Incarnation(command["incarnation"]))
            case "status":
                assert worker is not None
                say("status", open=[t.transfer for sender in worker.senders for t in sender.transfers()])
            case "close":
                assert worker is not None
                for sender in worker.senders:
                    sender.close()
                worker = None
                process = psutil.Process()
                say("closed", descriptors=process.num_fds(), threads=process.num_threads())


def say(what: str, **fields: Any) -> None:
    with _output:
        print(json.dumps({"is": what, **fields}), flush=True)


if __name__ == "__main__":
    main()
