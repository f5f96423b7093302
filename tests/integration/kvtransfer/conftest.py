"""Both ends of a transfer over real transports: in this process, and with the peer in a process of its own."""

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, RequestId, TransferId, WorkerId
from tandem.core.kvlayout import KVGroupSpec
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.pool import HostPool
from tandem.kvtransfer.receiver import TransferReceiver
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.ticket import Endpoint, GroupBlocks, Ticket

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
    """A pool whose reads or writes wait while a gate is shut; counts both."""

    def __init__(self, spec: KVGroupSpec, tp: int, data: memoryview) -> None:
        super().__init__(spec, tp, data)
        self.read_gate, self.write_gate = threading.Event(), threading.Event()
        self.read_gate.set()
        self.write_gate.set()
        self.bytes_read = 0
        self.writing, self.reading = threading.Event(), threading.Event()

    def read_into(self, blocks: Sequence[BlockId], layers: range, heads: range, out: memoryview) -> None:
        self.reading.set()
        assert self.read_gate.wait(PATIENCE_S)
        super().read_into(blocks, layers, heads, out)
        self.bytes_read += len(out)

    def write_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: memoryview) -> None:
        self.writing.set()
        assert self.write_gate.wait(PATIENCE_S)
        super().write_from(blocks, layers, heads, payload)


class Side:
    """Pools of one rank with their memory, and the events of the end that owns them."""

    def __init__(
        self, specs: Sequence[KVGroupSpec], *, tp: int = 1, num_blocks: int = NUM_BLOCKS, seed: int = 0
    ) -> None:
        self.memory = {
            spec.group: bytearray(random.Random(seed + spec.group).randbytes(num_blocks * spec.block_bytes(tp)))
            if seed
            else bytearray(num_blocks * spec.block_bytes(tp))
            for spec in specs
        }
        self.pools = {spec.group: GatedPool(spec, tp, memoryview(self.memory[spec.group])) for spec in specs}
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def event(self) -> Any:
        return self.events.get(timeout=PATIENCE_S)

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
        self._closers: list[Callable[[], None]] = []
        self._numbers = itertools.count(1)

    def side(self, *specs: KVGroupSpec, **options: Any) -> Side:
        return Side(specs or (DENSE,), **options)

    def receiver(self, side: Side, *, rank: int = 0, **options: Any) -> TransferReceiver:
        settings: dict[str, Any] = {"transports": (self.transport,), "runtime_dir": self.runtime_dir}
        receiver = TransferReceiver(
            worker=WorkerId("d0"), incarnation=RECEIVER, rank=Rank(rank), pools=side.pools, secret=SECRET,
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
        }
        return Ticket(**(fields | changes))

    def dial(self, endpoint: Endpoint) -> Any:
        """A bare link, to send what a TransferSender never would."""
        from tandem.kvtransfer.transports.base import Peer

        peer = Peer(worker=WorkerId("p0"), incarnation=SENDER, rank=Rank(0), host=endpoint.host)
        if endpoint.transport == "shm":
            from tandem.kvtransfer.transports.shm import ShmLink as Chosen
        else:
            from tandem.kvtransfer.transports.grpc import GrpcLink as Chosen  # type: ignore[assignment]
        link = Chosen.dial(endpoint.address, peer, SECRET)
        self._closers += [link.release, link.close]
        return link

    def send_raw(self, link: Any, message: bytes) -> None:
        """One message as the transport would carry a frame, with whatever bytes in it."""
        if self.transport == "shm":
            link._socket.send(bytes(8) + message)
        else:
            link._outbox.put(message)

    def peer(self, role: str, **options: Any) -> PeerProcess:
        peer = PeerProcess(role, runtime_dir=str(self.runtime_dir), transport=self.transport, **options)
        self._closers.append(peer.close)
        return peer

    def close(self) -> None:
        for close in reversed(self._closers):
            close()


class PeerProcess:
    """`peer.py` in a process of its own: commands go in and events come out as JSON lines."""

    def __init__(self, role: str, **options: Any) -> None:
        script = Path(__file__).with_name("peer.py")
        path = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, str(script), role, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
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


def as_json(ticket: Ticket) -> dict[str, Any]:
    return asdict(ticket)


@pytest.fixture
def ticket_json() -> Callable[[Ticket], dict[str, Any]]:
    return as_json


@pytest.fixture(params=["shm", "grpc"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture
def any_rig(tmp_path: Path) -> Iterator[Rig]:
    """For tests that name their transports themselves."""
    made = Rig("shm", tmp_path)
    yield made
    made.close()


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Waits for a condition; fails the test when it does not come."""

    def wait(condition: Callable[[], bool]) -> None:
        never = threading.Event()
        for _ in range(int(PATIENCE_S / 0.005)):
            if condition():
                return
            never.wait(0.005)
        pytest.fail("the condition did not come")

    return wait
