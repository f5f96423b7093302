"""Both ends of a transfer over real transports: in this process, and with the peer in a process of its own.

A transport joins the suite by its name in `NAMES`, and by how it carries raw bytes in `raw.py`.
"""

from __future__ import annotations

import itertools
import json
import queue
import random
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, RequestId, TransferId, WorkerId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import Frame, FrameKind
from tandem.kvtransfer.kv_pool_access import HostPool
from tandem.kvtransfer.receiver import TransferReceiver
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.ticket import Endpoint, GroupBlocks, Ticket
from tandem.kvtransfer.transports import dialer
from tandem.kvtransfer.transports import grpc as over_grpc
from tandem.kvtransfer.transports.base import WINDOW_BYTES, Peer
from tandem.kvtransfer.transports.payload_ring import RING_BYTES
from tandem.kvtransfer.transports.registry import find
from tests.integration.kvtransfer.faults import Faults, FaultyLink, Proxy
from tests.integration.kvtransfer.raw import Raw, dial_raw

ROOT = Path(__file__).resolve().parents[3]

NAMES = ("shm", "tcp", "grpc", "gloo", "cpu_ipc")
"""Every transport that must pass the suite."""
PATIENCE_S = 60.0
SECRET = ClusterSecret(b"the secret of these tests")
SENDER, RECEIVER = Incarnation(11), Incarnation(22)
DENSE = KVGroupSpec(
    group=GroupId(0), layers=tuple(range(4)), planes=2, heads=4, width=32, block_tokens=16, dtype="float16"
)
LATENT = KVGroupSpec(
    group=GroupId(1), layers=(4, 5), planes=1, heads=1, width=18, block_tokens=16, dtype="float32", is_replicated=True
)
NUM_BLOCKS = 64


class GatedPool(HostPool):
    """A pool with reads or writes that wait while a gate is shut; counts both."""

    def __init__(self, spec: KVGroupSpec, tp: int, data: memoryview) -> None:
        super().__init__(spec, tp, data)
        self.read_gate, self.write_gate = threading.Event(), threading.Event()
        self.read_gate.set()
        self.write_gate.set()
        self.bytes_read = 0
        self.writing, self.reading = threading.Event(), threading.Event()

    def read_into(self, blocks: Sequence[BlockId], layers: range, heads: range, out: memoryview) -> int:
        self.reading.set()
        assert self.read_gate.wait(PATIENCE_S)
        crc = super().read_into(blocks, layers, heads, out)
        self.bytes_read += len(out)
        return crc

    def write_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: memoryview) -> int:
        self.writing.set()
        assert self.write_gate.wait(PATIENCE_S)
        return super().write_from(blocks, layers, heads, payload)


def _on_device(spec: KVGroupSpec, tp: int, content: bytearray, device: str) -> tuple[Any, Any]:
    """The memory there, and like GatedPool over it."""
    from tests.integration.kvtransfer.tensorpools import DeviceBytes, GatedDevicePool

    memory = DeviceBytes(content, device)
    return memory, GatedDevicePool(spec, tp, memory, PATIENCE_S)


class Side:
    """Pools of one rank with their memory, and the events of the end that owns them."""

    def __init__(
        self,
        specs: Sequence[KVGroupSpec],
        *,
        tp: int = 1,
        num_blocks: int = NUM_BLOCKS,
        seed: int = 0,
        device: str = "",
    ) -> None:
        """`device`: of torch's, for the memory of the pools; none = plain host memory."""
        self.memory: dict[GroupId, Any] = {
            spec.group: bytearray(random.Random(seed + spec.group).randbytes(num_blocks * spec.block_bytes(tp)))
            if seed
            else bytearray(num_blocks * spec.block_bytes(tp))
            for spec in specs
        }
        self.pools: dict[GroupId, Any] = {}
        for spec in specs:
            if device:
                self.memory[spec.group], self.pools[spec.group] = _on_device(spec, tp, self.memory[spec.group], device)
            else:
                self.pools[spec.group] = GatedPool(spec, tp, memoryview(self.memory[spec.group]))
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def event(self) -> Any:
        return self.events.get(timeout=PATIENCE_S)

    def event_within(self, seconds: float) -> Any:
        """The next event, or None."""
        try:
            return self.events.get(timeout=seconds)
        except queue.Empty:
            return None

    def image(self) -> dict[GroupId, bytes]:
        return {group: bytes(data) for group, data in self.memory.items()}

    def block(self, group: int, block: int) -> bytes:
        size = self.pools[GroupId(group)].spec.block_bytes(self.pools[GroupId(group)].tp)
        return bytes(self.memory[GroupId(group)][block * size : (block + 1) * size])


class Rig:
    """Makes receivers and senders over one transport and closes all of them at the end."""

    SENDER, RECEIVER, DENSE, LATENT = SENDER, RECEIVER, DENSE, LATENT
    patience_s = PATIENCE_S

    def __init__(self, transport: str, runtime_dir: Path) -> None:
        self.transport, self.runtime_dir = transport, runtime_dir
        self.secret = SECRET
        self.device = {"cpu_ipc": "cpu", "cuda_ipc": "cuda"}.get(transport, "")
        self.window_bytes = {"tcp": WINDOW_BYTES, "grpc": over_grpc.WINDOW_BYTES}.get(transport, RING_BYTES)
        self._closers: list[Callable[[], None]] = []
        self._numbers = itertools.count(1)
        self._specs: tuple[KVGroupSpec, ...] = (DENSE,)  # of the sides made last

    def side(self, *specs: KVGroupSpec, **options: Any) -> Side:
        self._specs = specs or (DENSE,)
        return Side(self._specs, **({"device": self.device} | options))

    def receiver(self, side: Side, *, rank: int = 0, **options: Any) -> TransferReceiver:
        settings: dict[str, Any] = {"transports": (self.transport,), "runtime_dir": self.runtime_dir}
        receiver = TransferReceiver(
            incarnation=RECEIVER, rank=Rank(rank), pools=side.pools, secret=SECRET,
            on_event=side.events.put, clock=MonotonicClock(), **(settings | options),
        )  # fmt: skip
        receiver.start()
        self._closers.append(receiver.close)
        return receiver

    def sender(self, side: Side, *, rank: int = 0, **options: Any) -> TransferSender:
        settings: dict[str, Any] = {"preference": self.transport, "secret": SECRET}
        sender = TransferSender(
            worker=WorkerId("p0"), incarnation=SENDER, rank=Rank(rank), pools=side.pools,
            on_event=side.events.put, clock=MonotonicClock(), **(settings | options),
        )  # fmt: skip
        self._closers.append(sender.close)
        return sender

    def ticket(
        self, endpoints: Sequence[Endpoint], groups: dict[int, Sequence[int]] | None = None, **changes: Any
    ) -> Ticket:
        fields: dict[str, Any] = {
            "transfer": TransferId(next(self._numbers)),
            "request": RequestId("r"),
            "attempt": Attempt(1),
            "sender": WorkerId("p0"),
            "sender_incarnation": SENDER,
            "receiver": WorkerId("d0"),
            "receiver_incarnation": RECEIVER,
            "groups": tuple(
                GroupBlocks(group=GroupId(g), skip=0, blocks=tuple(map(BlockId, blocks)))
                for g, blocks in (groups or {0: range(8)}).items()
            ),
            "endpoints": tuple(endpoints),
            "layout": KVLayout(groups=self._specs, tp=len({endpoint.rank for endpoint in endpoints}) or 1),
        }
        return Ticket(**(fields | changes))

    @staticmethod
    def push_all(sender: TransferSender, ticket: Ticket, source: Iterable[int], target: Iterable[int]) -> None:
        """Push these blocks of the first group and finish."""
        here, there = tuple(map(BlockId, source)), tuple(map(BlockId, target))
        sender.push(ticket.transfer, GroupId(0), here, there, range(4))
        sender.finish(ticket.transfer)

    def block(self, ticket: Ticket, payload: bytes) -> Frame:
        """DATA that brings whole blocks of `ticket`."""
        return Frame(
            kind=FrameKind.DATA, transfer=ticket.transfer, attempt=ticket.attempt,
            source_incarnation=ticket.sender_incarnation, dest_incarnation=ticket.receiver_incarnation,
            source_rank=Rank(0), source_ranks=1, dest_rank=Rank(0), group=GroupId(0), layers=range(4), heads=range(4),
            blocks=ticket.groups[0].blocks, payload_bytes=len(payload), payload_crc=zlib.crc32(payload),
        )  # fmt: skip

    def dial(self, endpoint: Endpoint) -> Raw:
        """A bare link, to send what a TransferSender never would."""
        peer = Peer(worker=WorkerId("p0"), incarnation=SENDER, rank=Rank(0), host=endpoint.host)
        raw = Raw(dial_raw(endpoint, peer, SECRET), endpoint.transport)
        self._closers += [raw.link.release, raw.link.close]
        return raw

    def tamper(self, monkeypatch: pytest.MonkeyPatch, faults: Faults) -> None:
        """Apply `faults` to the frames of links that are dialled from now on."""
        usual = find(self.transport)

        def dial(*arguments: Any) -> FaultyLink:
            return FaultyLink(usual.dial(*arguments), faults)

        monkeypatch.setattr(dialer, "TRANSPORTS", {self.transport: replace(usual, dial=dial)})

    def sum_wrongly(self, monkeypatch: pytest.MonkeyPatch, pool: Any) -> None:
        """Make the checksum of data read from `pool` for sending one bit off."""
        if self.device:
            from tandem.kernels.payload_checksum import payload_checksum

            where = "tandem.kvtransfer.transports.ipc.payload_checksum"
            monkeypatch.setattr(where, lambda data: payload_checksum(data) ^ 1)
            return
        read = pool.read_into
        monkeypatch.setattr(pool, "read_into", lambda *arguments: read(*arguments) ^ 1)

    def proxy(self, endpoint: Endpoint) -> Proxy:
        """A machine in the middle of the way to `endpoint`."""
        proxy = Proxy(endpoint)
        self._closers.append(proxy.close)
        return proxy

    def peer(self, role: str, **options: Any) -> PeerProcess:
        peer = PeerProcess(role, runtime_dir=str(self.runtime_dir), transport=self.transport, **options)
        self._closers.append(peer.close)
        return peer

    def close(self) -> None:
        for close in reversed(self._closers):
            close()


class PeerProcess:
    """`tests.integration.kvtransfer.peer` in a process of its own: commands go in and events come out as JSON lines."""

    def __init__(self, role: str, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.integration.kvtransfer.peer", role, json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.hello = self.read()

    def command(self, name: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": name} | fields) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer process ended"
        decoded: dict[str, Any] = json.loads(line)
        return decoded

    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(Endpoint(**fields) for fields in self.hello["endpoints"])

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
