"""The same bytes without Tandem, as each transport's baseline. Nothing is checked, nothing is scattered.

    shm    memcpy into a shared ring of four chunks and out of it; a counter for each side, read in a loop
    tcp    one socket, `sendall` of each chunk, `recv_into` the target memory
    grpc   one stream of chunks; the same bytes object each time, dropped on arrival
    gloo   torch.distributed `isend`/`irecv`, four chunks under way

A transfer is a number of chunks and a word back from the receiver once it has the last.
"""

from __future__ import annotations

import mmap
import os
import queue
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

AHEAD = 4
RING_CHUNK = 1 << 20
PATIENCE_S = 60.0
_MORE, _LAST = b"\0", b"\1"


class BareReceiver(Protocol):
    """The target's side; `address` is where the source finds it."""

    address: str

    def take(self, sizes: Sequence[int], chunk: int) -> None:
        """Receive one transfer after another."""
        ...

    def close(self) -> None: ...


class BareSender(Protocol):
    """The source's side."""

    def send(self, sizes: Sequence[int], chunk: int) -> list[float]:
        """Send one transfer after another; the seconds that each took."""
        ...

    def close(self) -> None: ...


def receiver(transport: str, memory: memoryview, host: str) -> BareReceiver:
    if transport == "shm":
        return _RingReceiver(memory)
    if transport == "grpc":
        return _StreamReceiver(host)
    return _GlooReceiver(memory, host) if transport == "gloo" else _SocketReceiver(memory, host)


def sender(transport: str, memory: memoryview, address: str) -> BareSender:
    if transport == "shm":
        return _RingSender(memory, address)
    if transport == "grpc":
        return _StreamSender(address)
    return _GlooSender(memory, address) if transport == "gloo" else _SocketSender(memory, address)


class _Cursor:
    """Walks through the pool, so that bare transfers find memory as cold as ours."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def next(self, size: int) -> memoryview:
        if self._at + size > len(self._memory):
            self._at = 0
        self._at += size
        return self._memory[self._at - size : self._at]


def _chunks(size: int, chunk: int) -> Iterator[int]:
    for at in range(0, size, chunk):
        yield min(chunk, size - at)


def _timed(sizes: Sequence[int], send_one: Callable[[int], None]) -> list[float]:
    took = []
    for size in sizes:
        started_s = time.perf_counter()
        send_one(size)
        took.append(time.perf_counter() - started_s)
    return took


# ---- memcpy through shared memory ------------------------------------------------------------------------------------


class _Ring:
    def __init__(self, path: Path) -> None:
        size = mmap.PAGESIZE + AHEAD * RING_CHUNK
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        view = memoryview(self._map)
        self.counters = view[: mmap.PAGESIZE].cast("Q")  # [0] filled, written by the sender; [8] taken, by the receiver
        self._data = view[mmap.PAGESIZE :]

    def room(self, number: int, size: int) -> memoryview:
        at = number % AHEAD * RING_CHUNK
        return self._data[at : at + size]

    def wait(self, counter: int, least: int) -> None:
        """Until a counter has reached `least`."""
        counters = self.counters
        while counters[counter] < least:
            os.sched_yield()


class _RingReceiver:
    def __init__(self, memory: memoryview) -> None:
        self._path = Path("/dev/shm") / f"kvbench-{secrets.token_hex(6)}"
        self._path.write_bytes(bytes(mmap.PAGESIZE + AHEAD * RING_CHUNK))
        self.address = str(self._path)
        self._ring, self._cursor = _Ring(self._path), _Cursor(memory)
        self._taken = 0

    def take(self, sizes: Sequence[int], chunk: int) -> None:
        ring = self._ring
        for size in sizes:
            for part in _chunks(size, chunk):
                ring.wait(0, self._taken + 1)
                self._cursor.next(part)[:] = ring.room(self._taken, part)
                self._taken += 1
                ring.counters[8] = self._taken

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class _RingSender:
    def __init__(self, memory: memoryview, address: str) -> None:
        self._ring, self._cursor = _Ring(Path(address)), _Cursor(memory)
        self._filled = 0

    def send(self, sizes: Sequence[int], chunk: int) -> list[float]:
        ring = self._ring

        def one(size: int) -> None:
            for part in _chunks(size, chunk):
                ring.wait(8, self._filled + 1 - AHEAD if self._filled >= AHEAD else 0)
                ring.room(self._filled, part)[:] = self._cursor.next(part)
                self._filled += 1
                ring.counters[0] = self._filled
            ring.wait(8, self._filled)

        return _timed(sizes, one)

    def close(self) -> None:
        pass


# ---- a plain socket --------------------------------------------------------------------------------------------------


class _SocketReceiver:
    def __init__(self, memory: memoryview, host: str) -> None:
        self._listening = socket.create_server((host, 0))
        self.address = f"{host}:{self._listening.getsockname()[1]}"
        self._cursor = _Cursor(memory)
        self._connection: socket.socket | None = None

    def take(self, sizes: Sequence[int], chunk: int) -> None:
        if self._connection is None:
            self._connection, _ = self._listening.accept()
            self._connection.settimeout(PATIENCE_S)
        for size in sizes:
            for part in _chunks(size, chunk):
                room = self._cursor.next(part)
                while room:
                    got = self._connection.recv_into(room)
                    if not got:
                        raise ConnectionError("the sender hung up")
                    room = room[got:]
            self._connection.sendall(_LAST)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listening.close()


class _SocketSender:
    def __init__(self, memory: memoryview, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)), PATIENCE_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._cursor = _Cursor(memory)

    def send(self, sizes: Sequence[int], chunk: int) -> list[float]:
        def one(size: int) -> None:
            for part in _chunks(size, chunk):
                self._connection.sendall(self._cursor.next(part))
            self._connection.recv(1)

        return _timed(sizes, one)

    def close(self) -> None:
        self._connection.close()


# ---- a bare gRPC stream ----------------------------------------------------------------------------------------------

_LIMITS = (("grpc.max_receive_message_length", 2 << 20), ("grpc.max_send_message_length", 2 << 20))


class _StreamReceiver:
    def __init__(self, host: str) -> None:
        import grpc

        def push(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
            for message in requests:
                if message[:1] == _LAST:
                    yield _LAST

        handler = grpc.stream_stream_rpc_method_handler(push)
        self._server = grpc.server(ThreadPoolExecutor(2), options=_LIMITS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"Push": handler}),))
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        self._server.start()

    def take(self, sizes: Sequence[int], chunk: int) -> None:
        pass

    def close(self) -> None:
        self._server.stop(None).wait()


class _StreamSender:
    def __init__(self, address: str) -> None:
        import grpc

        channel: Any = grpc.insecure_channel(address, options=(*_LIMITS, ("grpc.enable_http_proxy", 0)))
        self._channel = channel
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call: Any = channel.stream_stream("/bench/Push")(iter(self._outbox.get, None))
        self._messages: dict[tuple[bytes, int, int], bytes] = {}

    def send(self, sizes: Sequence[int], chunk: int) -> list[float]:
        def one(size: int) -> None:
            parts = list(_chunks(size, chunk))
            for number, part in enumerate(parts[:-1]):
                self._outbox.put(self._message(_MORE, part, number))
            self._outbox.put(self._message(_LAST, parts[-1], len(parts)))
            next(self._call)

        return _timed(sizes, one)

    def close(self) -> None:
        self._outbox.put(None)
        self._call.cancel()
        self._channel.close()

    def _message(self, kind: bytes, size: int, number: int) -> bytes:
        """The `number`th message of a transfer: real bytes and each its own, as those of a pool are."""
        key = kind, size, number
        if key not in self._messages:
            self._messages[key] = kind + secrets.token_bytes(size - 1)
        return self._messages[key]


# ---- raw gloo --------------------------------------------------------------------------------------------------------


class _Gloo:
    """A process group of two that is made at first use, for both sides must come."""

    def __init__(self, memory: memoryview, address: str, rank: int) -> None:
        import torch

        self._torch, self._address, self._rank = torch, address, rank
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._at = 0
        self._word = torch.zeros(1, dtype=torch.uint8)
        self._group: Any = None

    def group(self) -> Any:
        if self._group is None:
            import torch.distributed as distributed

            dist: Any = distributed

            host, _, port = self._address.rpartition(":")
            is_master = self._rank == 1
            store = dist.TCPStore(host, int(port), world_size=2, is_master=is_master, wait_for_workers=True)
            gloo = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=_interface_to(host))]
            self._group = gloo(store, self._rank, 2, options)
        return self._group

    def next(self, size: int) -> Any:
        if self._at + size > len(self._memory):
            self._at = 0
        self._at += size
        return self._memory[self._at - size : self._at]

    def run(self, size: int, chunk: int, begin: Callable[[Any], Any]) -> None:
        under_way: deque[Any] = deque()
        for part in _chunks(size, chunk):
            if len(under_way) == AHEAD:
                under_way.popleft().wait()
            under_way.append(begin(self.next(part)))
        for work in under_way:
            work.wait()


def _interface_to(host: str) -> str:
    """The address of the interface over which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


class _GlooReceiver:
    def __init__(self, memory: memoryview, host: str) -> None:
        with socket.create_server((host, 0)) as probe:
            self.address = f"{host}:{probe.getsockname()[1]}"
        self._gloo = _Gloo(memory, self.address, 1)

    def take(self, sizes: Sequence[int], chunk: int) -> None:
        group = self._gloo.group()
        for size in sizes:
            self._gloo.run(size, chunk, lambda part: group.recv([part], 0, 0))
            group.send([self._gloo._word], 0, 1).wait()

    def close(self) -> None:
        pass


class _GlooSender:
    def __init__(self, memory: memoryview, address: str) -> None:
        self._gloo = _Gloo(memory, address, 0)

    def send(self, sizes: Sequence[int], chunk: int) -> list[float]:
        group = self._gloo.group()

        def one(size: int) -> None:
            self._gloo.run(size, chunk, lambda part: group.send([part], 1, 0))
            group.recv([self._gloo._word], 1, 1).wait()

        return _timed(sizes, one)

    def close(self) -> None:
        pass
