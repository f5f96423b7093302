"""A torch.distributed process group of two ranks that carries one link's payloads, in order, from rank 0 to rank 1.

It never touches the default group: each link has a group of its own, made over the link's control socket (no store
server, no port but gloo's own, nothing pickled), and gone with the link.
"""

from __future__ import annotations

import atexit
import contextlib
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from tandem.core.timeout_scale import patient
from tandem.kvtransfer.frame import MalformedFrameError
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, LinkClosedError
from tandem.kvtransfer.transports.control_socket import ControlSocket

SENDER_RANK, RECEIVER_RANK = 0, 1
PAYLOAD_TIMEOUT_S = patient(10.0)
"""Longest wait for one announced payload. It ends the link, so it must outlast a slow wire's window (8 MiB, shared by
other links); a caller that learns earlier that the peer is gone closes the link."""
_MAX_KEYS, _MAX_KEY_BYTES, _MAX_VALUE_BYTES = 64, 256, 8192
"""Bounds on the peer's rendezvous entries; gloo's and NCCL's have a few short ones."""
_KEY_LENGTH = struct.Struct("<H")
_DONE = b"\0\0done"
_PAYLOAD_TAG, _ABORT_TAG = 0, 1


class Transfer(Protocol):
    """A payload in flight."""

    def wait(self) -> None:
        """Wait until it was sent or has arrived, PAYLOAD_TIMEOUT_S at most. Raises LinkClosedError."""
        ...


class Communicator(Protocol):
    """One thread sends or receives, one waits, any aborts. Offsets are bytes of `staging`, which it owns."""

    @property
    def staging(self) -> memoryview: ...

    def send(self, offset: int, size: int) -> Transfer:
        """Begin to send; the bytes stay as they are until the transfer was waited for. Raises LinkClosedError."""
        ...

    def receive(self, offset: int, size: int) -> Transfer:
        """Begin to receive; no other thread touches the bytes before `wait` returned. Raises LinkClosedError."""
        ...

    def abort(self) -> None:
        """After return nothing reads or writes the staging memory any more; waits end with LinkClosedError, but for one
        that was cut in the middle of its payload: gloo leaves that to its time limit."""
        ...

    def release(self) -> None:
        """After `abort`, when no thread waits any more: give back descriptors, threads and memory."""
        ...


class ControlStore(Store):
    """The two ranks' rendezvous over their control socket: what one sets is sent, what the other wants is received.

    Used by the one thread that makes the group; complete before the first frame is sent.
    """

    def __init__(self, control: ControlSocket) -> None:
        super().__init__()
        self._control = control
        self._values: dict[str, bytes] = {}
        self._taken = 0  # of the peer's
        self._is_finished = False  # later the group may still set what it likes to know itself

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        name = key.encode()
        if not self._is_finished:
            self._control.send(_KEY_LENGTH.pack(len(name)) + name + data)

    def get(self, key: str) -> bytes:
        while key not in self._values:
            if self._is_finished or not self._receive():
                raise LinkClosedError(f"the peer's part of the rendezvous lacks {key}")
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def finish(self) -> None:
        """Send that this rank is done, and wait until the other is: after that the socket carries frames."""
        self._control.send(_DONE)
        while self._receive():
            pass
        self._is_finished = True

    def _receive(self) -> bool:
        """Take one of the peer's settings; False if it is done."""
        try:
            message = self._control.receive(_KEY_LENGTH.size + _MAX_KEY_BYTES + _MAX_VALUE_BYTES)
        except MalformedFrameError as error:
            raise LinkClosedError(str(error)) from error
        if message == _DONE:
            return False
        end = _KEY_LENGTH.size + _KEY_LENGTH.unpack_from(message)[0] if len(message) > _KEY_LENGTH.size else 0
        if not _KEY_LENGTH.size < end <= len(message):
            raise LinkClosedError("the peer broke off the rendezvous" if not message else "not a rendezvous message")
        self._taken += 1
        if self._taken > _MAX_KEYS:
            raise LinkClosedError(f"more than {_MAX_KEYS} messages in a rendezvous")
        self._values[message[_KEY_LENGTH.size : end].decode(errors="replace")] = message[end:]
        return True


class GlooCommunicator:
    """Over gloo: staging in host memory, four descriptors and two threads a link, all its own."""

    def __init__(self, control: ControlSocket, rank: int, size: int) -> None:
        """Meet the peer within about DIAL_TIMEOUT_S; both ends call this. Raises LinkClosedError or OSError."""
        self._peer = 1 - rank
        self._calls = _Calls()
        memory = bytearray(size)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self.staging = memoryview(memory)
        self._store = ControlStore(control)  # the group calls its methods, but does not keep a Python object alive
        gloo: Any = ProcessGroupGloo  # its stubs lack what follows
        options = gloo._Options()
        options._timeout = timedelta(seconds=DIAL_TIMEOUT_S)
        options._threads = 1  # of those that run collectives; point-to-point needs none
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=control.local_host)]
            self._group: Any = gloo(self._store, rank, 2, options)
            self._store.finish()
        except RuntimeError as error:
            raise LinkClosedError(f"no communicator: {first_line(error)}") from error
        atexit.register(self._leave)

    def send(self, offset: int, size: int) -> Transfer:
        return self._begin("send", self._memory[offset : offset + size])

    def receive(self, offset: int, size: int) -> Transfer:
        return self._begin("recv", self._memory[offset : offset + size])

    def abort(self) -> None:
        """Gloo has no such call; but when the time of any one operation is over it closes the group's connection, takes
        it out of its event loop and ends the waits for what has not begun. So a receive of nothing gets a millisecond.
        """
        with contextlib.suppress(LinkClosedError), self._calls.one():
            self._abort()

    def release(self) -> None:
        held, self._group = [self._group], None
        self._calls.free(held)
        atexit.unregister(self._leave)

    def _abort(self) -> None:
        if self._group is None:
            return
        nothing = torch.empty(1, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            self._group.recv([nothing], self._peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def _leave(self) -> None:
        """Leave the group to the exiting process, without waiting for it."""
        self._calls.refuse()
        self._abort()
        self._calls.wait_for_the_last(PAYLOAD_TIMEOUT_S)

    def _begin(self, operation: str, part: torch.Tensor) -> Transfer:
        if self._group is None:
            raise LinkClosedError("the communicator is gone")
        try:
            with self._calls.one():
                return _GlooTransfer(getattr(self._group, operation)([part], self._peer, _PAYLOAD_TAG), self._calls)
        except RuntimeError as error:
            raise LinkClosedError(first_line(error)) from error


_LEFT: list[Any] = []
"""Objects that threads could no longer free when the process ended; the main thread may, at the very end."""


class _Calls:
    """Counts the threads inside gloo. A daemon thread that returns from there while the interpreter ends would abort
    the process (its stack is unwound through C++ that forbids it); so the exit refuses new calls and waits for those
    under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the two below
        self._count = 0
        self._is_over = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Around a call. Raises LinkClosedError once calls are refused."""
        with self._changed:
            if self._is_over:
                raise LinkClosedError("the process ends")
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def free(self, held: list[Any]) -> None:
        """Free gloo's objects, which calls gloo, too. While the process ends their memory stays as it is."""
        try:
            with self.one():
                held.clear()
        except LinkClosedError:
            _LEFT.extend(held)

    def refuse(self) -> None:
        with self._changed:
            self._is_over = True

    def wait_for_the_last(self, limit_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._count, limit_s)


class _GlooTransfer:
    def __init__(self, work: Any, calls: _Calls) -> None:
        self._held = [work]
        self._calls = calls

    def wait(self) -> None:
        """Once."""
        why = ""
        with self._calls.one():
            try:
                self._held[0].wait(timedelta(seconds=PAYLOAD_TIMEOUT_S))
            except RuntimeError as error:
                why = first_line(error)
            self._held.clear()
        if why:
            raise LinkClosedError(why)

    def __del__(self) -> None:
        if self._held:  # it was not waited for to the end
            self._calls.free(self._held)


def first_line(error: Exception) -> str:
    """The library's message, without its stack."""
    return str(error).partition("\n")[0] or type(error).__name__
