"""A stream between two processes of the cluster, as either end runs it: hellos, batches, and the bounds of silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc.aio

from tandem.core import pairing
from tandem.core.errors import RequestTooLargeError
from tandem.core.liveness import LEASE_S
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.out_queue import OutQueue

HELLO_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = LEASE_S
"""Both ends of every stream say something at least every 0.5 s; silence for this long means a dead peer. A stop has to
be known, and what it held given back, with room left of 3 s."""
BATCH_BYTES = 256 * 1024
"""Past so much, the next message is another one."""
CLOSED = "its control channel closed"


def peer_hello(info: w.WorkerInfo, peer_incarnation: int) -> w.PeerHello:
    """How this worker opens, or answers on, a control channel with that incarnation of the peer."""
    return w.PeerHello(
        worker=info.worker,
        incarnation=info.incarnation,
        peer_incarnation=peer_incarnation,
        protocol=pairing.PROTOCOL[0],
        protocol_minor=pairing.PROTOCOL[1],
    )


def hello_refusal(hello: w.PeerHello) -> str:
    """Why a peer that says this cannot be spoken to; "" if it can, in the smaller of both minor versions."""
    return pairing.protocol_refusal((hello.protocol, hello.protocol_minor), pairing.PROTOCOL)


def from_peer(worker: str, incarnation: int, message: w.PeerMessage) -> e.HostToRank:
    """A peer's message as rank 0 gets it, stamped with the time of its arrival."""
    stamped = e.FromPeer(worker=worker, incarnation=incarnation, message=message, received_s=time.monotonic())
    return e.HostToRank(peer=stamped)


def joined(messages: Sequence[w.WorkerMessage]) -> Iterator[w.WorkerMessage]:
    """The same in fewer messages: each costs both ends more than what most of them say."""
    if len(messages) == 1:  # most steps: neither measured nor copied
        yield messages[0]
        return
    batch: list[w.WorkerMessage] = []
    size = 0
    for message in messages:
        batch.append(message)
        size += message.ByteSize()
        if size > BATCH_BYTES:
            yield _as_one(batch)
            batch, size = [], 0
    if batch:
        yield _as_one(batch)


def _as_one(messages: list[w.WorkerMessage]) -> w.WorkerMessage:
    return messages[0] if len(messages) == 1 else w.WorkerMessage(batch=w.WorkerBatch(messages=messages))


async def run_stream(
    incoming: AsyncIterator[Any],
    handle: Callable[[Any], None],
    queue: OutQueue[Any],
    out: Any,
    join: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> str:
    """Read `incoming` into `handle`, and what `queue` gives, as `join` puts it, into `out.write`, until either end
    leaves, falls silent or takes nothing. Closes the queue; returns why it ended.

    Timeouts, not `wait_for`: that one forgets a cancellation if what it waits for comes in the same turn of the loop.
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
        except (RequestTooLargeError, BufferError) as error:  # the rank did not get what it said
            ends.append(str(error))
        finally:
            queue.close()

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(read())
        try:
            while messages := await queue.take():
                for message in join(messages):
                    async with asyncio.timeout(IDLE_TIMEOUT_S):  # who reads nothing is as good as dead
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
    """What a call that failed says of the reason."""
    return f"{error.code().name}: {error.details()}"
