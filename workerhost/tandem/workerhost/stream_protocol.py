"""A stream between two processes of the cluster, as either end runs it: hellos, bounds of silence, the send queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import grpc.aio

from tandem.core import kv_compatibility
from tandem.core.errors import RequestTooLargeError
from tandem.core.lease_timing import STAND_S
from tandem.core.logs import event
from tandem.core.timeout_scale import patient
from tandem.rpc.v1 import worker_pb2 as w

_log = logging.getLogger(__name__)
HELLO_TIMEOUT_S = patient(5.0)
IDLE_TIMEOUT_S = STAND_S
"""Both ends of every stream send something at least every 0.5 s, unless their event loop is blocked; one blocked for so
long is as good as dead. A process that stops is known by its transport, sooner (PROOF_OF_LIFE)."""
CLOSED = "its control channel closed"
MAX_QUEUED, MAX_QUEUED_BYTES = 20_000, 32 << 20
"""Of one stream; its writer may hold as much again."""
PATIENCE_S = 0.01
"""Time for which a message that may wait is kept back, so that it is sent with the next one."""


class OutQueue:
    """Bounded queue of messages to one stream, filled by the event loop and drained by one writer: a stream that takes
    nothing is closed, not buffered. `reader`: the reader of the stream, for the log."""

    def __init__(self, reader: str = "") -> None:
        self._reader = reader
        self._queued: list[bytes] = []
        self._bytes = 0
        self._is_due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def put(self, message: bytes, *, may_wait: bool = False) -> bool:
        """Queue a message; False if the stream is closed, or its reader is stuck (then it is closed now).

        One that `may_wait` is due with the next one that may not, after PATIENCE_S at the latest.
        """
        if self._is_closed:
            return False
        if len(self._queued) >= MAX_QUEUED or self._bytes >= MAX_QUEUED_BYTES:
            event(_log, "stream does not drain", logging.WARNING, reader=self._reader)
            self.close()
            return False
        self._queued.append(message)
        self._bytes += len(message)
        if not may_wait:
            self._is_due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._is_due.set)
        return True

    def close(self) -> None:
        """Close it: `take` gives the queued messages, and then nothing."""
        self._is_closed = True
        self._is_due.set()

    async def take(self) -> list[bytes]:
        """Take everything that is queued, in order, once something is due; nothing = closed."""
        await self._is_due.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._is_closed:
            self._is_due.clear()
        queued, self._queued, self._bytes = self._queued, [], 0
        return queued


def peer_hello(info: w.WorkerInfo, peer_incarnation: int) -> w.PeerHello:
    """Hello with which this worker opens, or answers on, a control channel with that incarnation of the peer."""
    return w.PeerHello(
        worker=info.worker,
        incarnation=info.incarnation,
        peer_incarnation=peer_incarnation,
        protocol=kv_compatibility.PROTOCOL[0],
        protocol_minor=kv_compatibility.PROTOCOL[1],
    )


def hello_refusal(hello: w.PeerHello) -> str:
    """Why this hello is refused; "" if it is accepted, in the smaller of both minor versions."""
    return kv_compatibility.protocol_refusal((hello.protocol, hello.protocol_minor), kv_compatibility.PROTOCOL)


async def run_stream(
    incoming: AsyncIterator[Any],
    handle: Callable[[Any], None],
    queue: OutQueue,
    out: Any,
    join: Callable[[Sequence[bytes]], Iterable[bytes]] = iter,
) -> str:
    """Pass `incoming` to `handle`, and messages of `queue`, joined by `join`, to `out.write`, until either end leaves,
    falls silent or takes nothing. Closes the queue; returns why it ended.

    Timeouts, not `wait_for`: that one loses a cancellation if its result comes in the same turn of the loop.
    """
    ends: list[str] = []

    async def read() -> None:
        try:
            while True:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    message = await anext(incoming)
                handle(message)
        except StopAsyncIteration:
            ends.append(CLOSED)
        except TimeoutError:
            ends.append(f"it sent nothing for {IDLE_TIMEOUT_S:g} s")
        except grpc.aio.AioRpcError as error:
            ends.append(told(error))
        except (RequestTooLargeError, BufferError) as error:  # the rank did not get the message
            ends.append(str(error))
        finally:
            queue.close()

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(read())
        try:
            while messages := await queue.take():
                for message in join(messages):
                    async with asyncio.timeout(IDLE_TIMEOUT_S):  # a peer that reads nothing is as good as dead
                        await out.write(message)
        except TimeoutError:
            ends.append(f"it read nothing for {IDLE_TIMEOUT_S:g} s")
        except grpc.aio.AioRpcError as error:
            ends.append(told(error))
        except asyncio.InvalidStateError:  # the call has ended; the reader knows why
            await reader
        finally:
            queue.close()
            reader.cancel()
    return ends[0] if ends else CLOSED


def told(error: grpc.aio.AioRpcError) -> str:
    """The reason of a failed call."""
    return f"{error.code().name}: {error.details()}"
