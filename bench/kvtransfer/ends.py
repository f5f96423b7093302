"""One end of the transfers under measurement, in a process of its own; the bare way of the same bytes beside it.

python -m bench.kvtransfer.ends '{"role": "sender", "transport": "tcp", …}'
"""

from __future__ import annotations

import json
import queue
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.kvtransfer import bare, pools
from bench.kvtransfer.children import Handler, serve
from tandem.core.clock import MonotonicClock
from tandem.core.ids import BlockId, GroupId, Rank, TransferId, WorkerId
from tandem.core.kv_layout import KVGroupSpec
from tandem.kernels.cpu_memory import keep_freed_memory
from tandem.kvtransfer.events import Failed, SendCompleted, Verified
from tandem.kvtransfer.kv_pool_access import HostPool
from tandem.kvtransfer.receiver import TransferReceiver
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.ticket import Endpoint

PATIENCE_S = 60.0
GROUP = GroupId(0)


class _Memory:
    """A pool in ordinary memory, touched page by page."""

    def __init__(self, spec: KVGroupSpec, seed: int) -> None:
        size = pools.num_blocks(spec) * spec.block_bytes()
        part = random.Random(seed).randbytes(1 << 20)
        self.view = memoryview(bytearray(part * -(-size // len(part))))[:size]
        self.pool = HostPool(spec, 1, self.view)

    def checksum(self, blocks: Sequence[BlockId]) -> int:
        size, crc = self.pool.spec.block_bytes(), 0
        for block in blocks:
            crc = zlib.crc32(self.view[block * size : (block + 1) * size], crc)
        return crc


class ReceiverEnd:
    """Takes transfers; `settle` waits for them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._spec = pools.SPECS[options["spec"]]
        self._memory = _Memory(self._spec, 0)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._folder = tempfile.TemporaryDirectory(prefix="kvbench-")
        self._places = pools.target(self._spec)
        self._receiver = TransferReceiver(
            incarnation=pools.RECEIVER, rank=Rank(0), pools={GROUP: self._memory.pool},
            secret=pools.SECRET, runtime_dir=Path(self._folder.name), on_event=self._events.put,
            clock=MonotonicClock(), transports=(options["transport"],), bind_host=options["host"],
        )  # fmt: skip
        self._receiver.start()
        self._bare = bare.receiver(options["transport"], self._memory.view, options["host"])

    def hello(self) -> dict[str, Any]:
        fields = ("rank", "transport", "host", "address")
        endpoints = [{name: getattr(e, name) for name in fields} for e in self._receiver.endpoints()]
        return {"endpoints": endpoints, "bare": self._bare.address}

    def expect(self, first: int, count: int, blocks: int, codec: str = "") -> dict[str, Any]:
        for number in range(first, first + count):
            targets, endpoints = self._places.blocks(number, blocks), self._receiver.endpoints()
            ticket = pools.ticket(number, targets, endpoints, self._spec, codec)
            self._receiver.expect(ticket)
        return {}

    def processor(self) -> dict[str, Any]:
        """Processor time that this process has used, all threads."""
        return {"processor_s": time.process_time()}

    def settle(self, count: int, blocks: int) -> dict[str, Any]:
        """Wait until all are verified; returns when each was (monotonic), and the checksum of the last one's blocks."""
        verified: dict[int, float] = {}
        for _ in range(count):
            event = self._events.get(timeout=PATIENCE_S)
            if isinstance(event, Failed):
                raise RuntimeError(event.reason)
            assert isinstance(event, Verified)
            self._receiver.admit(event.transfer)
            verified[event.transfer] = event.verified_at_s
        last = self._places.blocks(max(verified), blocks)
        return {"verified_s": [verified[key] for key in sorted(verified)], "checksum": self._memory.checksum(last)}

    def bare_take(self, sizes: list[int], chunk: int) -> dict[str, Any]:
        self._bare.take(sizes, chunk)
        return {}

    def close(self) -> None:
        self._bare.close()
        self._receiver.close()
        self._folder.cleanup()


class SenderEnd:
    """Pushes transfers and times them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._spec = pools.SPECS[options["spec"]]
        self._memory = _Memory(self._spec, 7)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._source, self._target = pools.source(self._spec), pools.target(self._spec)
        self._endpoints: tuple[Endpoint, ...] = ()
        self._sender = TransferSender(
            worker=WorkerId("p"), incarnation=pools.SENDER, rank=Rank(0), pools={GROUP: self._memory.pool},
            secret=pools.SECRET, on_event=self._events.put, clock=MonotonicClock(), preference=options["transport"],
        )  # fmt: skip
        self._bare: bare.BareSender | None = None

    def connect(self, endpoints: list[dict[str, Any]], bare_address: str) -> dict[str, Any]:
        self._endpoints = tuple(Endpoint(**fields) for fields in endpoints)
        self._bare = bare.sender(self._options["transport"], self._memory.view, bare_address)
        return {}

    def send(self, first: int, count: int, blocks: int, at_once: int, codec: str = "") -> dict[str, Any]:
        """Seconds of all and of each: from opening a transfer to the notice that it is verified."""
        prepared = [self._prepared(number, blocks, codec) for number in range(first, first + count)]
        began: dict[int, float] = {}
        took: list[float] = []
        started_s, used_s = time.perf_counter(), time.process_time()
        for ticket, source in prepared:
            if len(began) - len(took) == at_once:
                took.append(self._await_sent(began))
            began[ticket.transfer] = time.perf_counter()
            self._sender.open(ticket)
            self._sender.push(ticket.transfer, GROUP, source, ticket.groups[0].blocks, range(len(self._spec.layers)))
            self._sender.finish(ticket.transfer)
        while len(took) < count:
            took.append(self._await_sent(began))
        all_s, used_s = time.perf_counter() - started_s, time.process_time() - used_s
        links = self._sender.links()
        checksum = self._memory.checksum(prepared[-1][1])
        return {"all_s": all_s, "each_s": took, "checksum": checksum, "transport": links[0].transport,
                "stalls": links[0].stalls, "processor_s": used_s}  # fmt: skip

    def bare_send(self, sizes: list[int], chunk: int) -> dict[str, Any]:
        assert self._bare is not None
        started_s, used_s = time.perf_counter(), time.process_time()
        each_s = self._bare.send(sizes, chunk)
        all_s, used_s = time.perf_counter() - started_s, time.process_time() - used_s
        return {"all_s": all_s, "each_s": each_s, "processor_s": used_s}

    def close(self) -> None:
        if self._bare is not None:
            self._bare.close()
        self._sender.close()

    def _prepared(self, number: int, blocks: int, codec: str) -> tuple[Any, tuple[BlockId, ...]]:
        ticket = pools.ticket(number, self._target.blocks(number, blocks), self._endpoints, self._spec, codec)
        return ticket, self._source.blocks(number, blocks)

    def _await_sent(self, began: dict[int, float]) -> float:
        event = self._events.get(timeout=PATIENCE_S)
        if not isinstance(event, SendCompleted):
            raise RuntimeError(f"transfer {event.transfer} ended as {event}")
        return time.perf_counter() - began[TransferId(event.transfer)]


def main() -> None:
    options = json.loads(sys.argv[1])
    keep_freed_memory()  # as a worker does that computes on the CPU; gRPC's messages of 1 MiB cost a third more without
    if options["role"] == "receiver":
        taker = ReceiverEnd(options)
        print(json.dumps(taker.hello()), flush=True)
        try:
            handlers: dict[str, Handler] = {"expect": taker.expect, "settle": taker.settle, "bare": taker.bare_take}
            serve(handlers | {"processor": taker.processor})
        finally:
            taker.close()
    else:
        giver = SenderEnd(options)
        print("{}", flush=True)
        try:
            serve({"connect": giver.connect, "send": giver.send, "bare": giver.bare_send})
        finally:
            giver.close()


if __name__ == "__main__":
    main()
