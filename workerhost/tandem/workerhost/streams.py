"""A stream between two processes of the cluster, as either end runs it: hellos and the bounds of silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import grpc.aio

from tandem.core import kv_compatibility
from tandem.core.errors import RequestTooLargeError
from tandem.core.lease_timing import STAND_S
from tandem.core.timeout_scale import patient
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.send_queue import OutQueue

HELLO_TIMEOUT_S = patient(5.0)
IDLE_TIMEOUT_S = STAND_S
"""Both ends of every stream send something at least every 0.5 s, unless their event loop is blocked; one blocked for so
long is as good as dead. A process that stops is known by its transport, sooner (PROOF_OF_LIFE)."""
CLOSED = "its control channel closed"


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
            ends.append(f"it said nothing for {IDLE_TIMEOUT_S:g} s")
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
            ends.append(f"it took nothing for {IDLE_TIMEOUT_S:g} s")
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
