"""Control channels that this worker opens to others: dialled on first use, kept, watched by pings."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

import grpc
import grpc.aio

from tandem.core.errors import RequestTooLargeError
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tandem.workerhost.auth import call_metadata
from tandem.workerhost.out_queue import OutQueue
from tandem.workerhost.server import (
    HELLO_TIMEOUT_S,
    IDLE_TIMEOUT_S,
    Backend,
    from_peer,
    hello_refusal,
    peer_hello,
)

_log = logging.getLogger(__name__)
PING_EVERY_S = 0.5
CLOSED = "its control channel closed"
END: Any = grpc.aio.EOF  # type: ignore[attr-defined]
CHANNEL_OPTIONS = (("grpc.enable_retries", 0), ("grpc.max_receive_message_length", 64 * 1024 * 1024))


class PeerChannels:
    """One control channel a peer incarnation, each run by a task of the worker's task group."""

    def __init__(self, backend: Backend, secret: ClusterSecret, tasks: asyncio.TaskGroup) -> None:
        self._backend, self._secret, self._tasks = backend, secret, tasks
        self._channels: dict[tuple[str, int], OutQueue[w.PeerMessage]] = {}
        self._runs: dict[tuple[str, int], asyncio.Task[str]] = {}

    def send(self, to: e.ToPeer) -> bool:
        """Send to a peer that this worker dialled, or dials now if `to` has an address; False if neither."""
        key = (to.worker, to.incarnation)
        queue = self._channels.get(key)
        if queue is None:
            if not to.address:
                return False
            queue = self._channels[key] = OutQueue()
            run = self._runs[key] = self._tasks.create_task(self._run(key, to.address, queue))
            run.add_done_callback(functools.partial(self._ended, key))
        return queue.put(to.message)

    def close_all(self) -> None:
        """End every channel, also those that still wait for an answer to their hello; their tasks end by themselves."""
        for key, run in self._runs.items():
            self._channels[key].close()
            run.cancel()

    async def _run(self, key: tuple[str, int], address: str, queue: OutQueue[w.PeerMessage]) -> str:
        """Dial and talk until the channel ends; returns why it did."""
        worker, incarnation = key
        try:
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                stub: Any = worker_pb2_grpc.WorkerStub(channel)
                call = stub.Peer(metadata=call_metadata(self._secret))
                return await self._talk(call, worker, incarnation, queue)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except TimeoutError:
            return f"it said nothing for {IDLE_TIMEOUT_S:g} s"
        except (RequestTooLargeError, BufferError) as error:  # the rank did not get what the peer said
            return str(error)

    def _ended(self, key: tuple[str, int], run: asyncio.Task[str]) -> None:
        """However it ended, even cancelled before it began: forget the channel, and tell."""
        worker, incarnation = key
        reason = CLOSED if run.cancelled() or run.exception() is not None else run.result()
        self._channels.pop(key).close()
        del self._runs[key]
        event(_log, "peer channel ended", peer=worker, reason=reason)
        gone = e.PeerGone(worker=worker, incarnation=incarnation, reason=reason)
        self._backend.to_rank(e.HostToRank(peer_gone=gone))

    async def _talk(self, call: Any, worker: str, incarnation: int, queue: OutQueue[w.PeerMessage]) -> str:
        """Until the channel ends; returns why it did."""
        hello = peer_hello(self._backend.info, incarnation)
        try:
            await asyncio.wait_for(call.write(w.PeerMessage(hello=hello)), HELLO_TIMEOUT_S)
            # Nothing more is written before the answer: a write into a refused call would hide why it was refused.
            answer = await asyncio.wait_for(call.read(), HELLO_TIMEOUT_S)
        except TimeoutError:
            return f"it did not answer a hello within {HELLO_TIMEOUT_S:g} s"
        if answer is END:
            return CLOSED
        if why := hello_refusal(answer.hello):
            return why
        writer = asyncio.ensure_future(self._write(call, queue))
        pinger = asyncio.ensure_future(self._ping(queue))
        try:
            while True:
                message = await asyncio.wait_for(call.read(), IDLE_TIMEOUT_S)
                if message is END:
                    return CLOSED
                if message.HasField("ping"):
                    continue
                self._backend.to_rank(from_peer(worker, incarnation, message))
        finally:
            writer.cancel()
            pinger.cancel()
            await asyncio.gather(writer, pinger, return_exceptions=True)

    @staticmethod
    async def _write(call: Any, queue: OutQueue[w.PeerMessage]) -> None:
        while messages := await queue.take():
            for message in messages:
                await call.write(message)
        call.cancel()

    @staticmethod
    async def _ping(queue: OutQueue[w.PeerMessage]) -> None:
        sequence = 0
        while queue.put(w.PeerMessage(ping=w.Ping(sequence=sequence))):
            sequence += 1
            await asyncio.sleep(PING_EVERY_S)
