"""Control channels that this worker opens to others: dialled on first use, kept, watched by pings."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from tandem.core.call_proof import PEER, CallProof, stream_target
from tandem.core.lease_timing import PROOF_OF_LIFE
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import passing_pb2 as p
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.relay import InboundMessage, from_peer, heard_from_peer
from tandem.workerhost.server import Backend
from tandem.workerhost.stream_protocol import (
    CLOSED,
    HELLO_TIMEOUT_S,
    OutQueue,
    hello_refusal,
    peer_hello,
    run_stream,
    told,
)

_log = logging.getLogger(__name__)
PING_EVERY_S = 0.5
UNPROVEN = "it did not prove that it knows the cluster secret"
CHANNEL_OPTIONS = (
    *PROOF_OF_LIFE,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)


class PeerChannels:
    """One control channel a peer incarnation, each run by a task of the worker's task group."""

    def __init__(self, backend: Backend, secret: ClusterSecret, tasks: asyncio.TaskGroup) -> None:
        self._backend, self._secret, self._tasks = backend, secret, tasks
        self._channels: dict[tuple[str, int], OutQueue] = {}
        self._runs: dict[tuple[str, int], asyncio.Task[str]] = {}
        self._is_closed = False

    def send(self, to: p.PassedToPeer) -> bool:
        """Send to a peer that this worker dialled, or dials now if `to` has an address; False if neither, or closed."""
        key = (to.worker, to.incarnation)
        queue = self._channels.get(key)
        if queue is None:
            if not to.address or self._is_closed:
                return False
            queue = self._channels[key] = OutQueue(to.worker)
            run = self._runs[key] = self._tasks.create_task(self._run(key, to.address, queue))
            run.add_done_callback(functools.partial(self._ended, key))
        return queue.put(to.message)

    def drop_all(self) -> None:
        """End every channel, also those that still wait for an answer to their hello; their tasks end by themselves."""
        for key, run in self._runs.items():
            self._channels[key].close()
            run.cancel()

    def close(self) -> None:
        """The same for good: no worker is dialled from now on."""
        self._is_closed = True
        self.drop_all()

    async def _run(self, key: tuple[str, int], address: str, queue: OutQueue) -> str:
        """Dial and exchange messages until the channel ends; returns why it did."""
        worker, incarnation = key
        try:
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                dial: Any = channel.stream_stream(PEER, None, heard_from_peer)
                proof = CallProof.of(self._secret, PEER, stream_target(worker, incarnation))
                call = dial(metadata=proof.metadata)
                incoming = aiter(call)
                if why := await self._greet(call, incoming, incarnation, proof):
                    return why
                async with asyncio.TaskGroup() as group:
                    pings = group.create_task(self._ping(queue))
                    try:
                        return await run_stream(incoming, self._hear(worker, incarnation), queue, call)
                    finally:
                        pings.cancel()
        except grpc.aio.AioRpcError as error:
            return told(error)

    def _ended(self, key: tuple[str, int], run: asyncio.Task[str]) -> None:
        """However it ended, even cancelled before it began: forget the channel, and report it to the rank."""
        worker, incarnation = key
        reason = CLOSED if run.cancelled() or run.exception() is not None else run.result()
        self._channels.pop(key).close()
        del self._runs[key]
        event(_log, "peer channel ended", peer=worker, reason=reason)
        gone = e.PeerGone(worker=worker, incarnation=incarnation, reason=reason)
        self._backend.to_rank(e.HostToRank(peer_gone=gone))

    async def _greet(
        self, call: Any, incoming: AsyncIterator[InboundMessage[w.PeerMessage]], incarnation: int, proof: CallProof
    ) -> str:
        """Exchange proofs, then hellos; returns why the peer is refused, "" if it is not.

        Nothing more is written before the answer: a write into a refused call would hide why it was refused.
        """
        hello = peer_hello(self._backend.info, incarnation)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                if not proof.is_answered(await call.initial_metadata()):
                    await anext(incoming, None)  # raises why it was refused
                    return UNPROVEN
                await call.write(w.PeerMessage(hello=hello).SerializeToString())
                answer = await anext(incoming, None)
        except TimeoutError:
            return f"it did not answer a hello within {HELLO_TIMEOUT_S:g} s"
        return CLOSED if answer is None else hello_refusal(answer.message.hello)

    def _hear(self, worker: str, incarnation: int) -> Callable[[InboundMessage[w.PeerMessage]], None]:
        def handle(heard: InboundMessage[w.PeerMessage]) -> None:
            if not heard.message.HasField("ping"):
                self._backend.to_rank(from_peer(worker, incarnation, heard.data))

        return handle

    @staticmethod
    async def _ping(queue: OutQueue) -> None:
        sequence = 0
        while queue.put(w.PeerMessage(ping=w.Ping(sequence=sequence)).SerializeToString()):
            sequence += 1
            await asyncio.sleep(PING_EVERY_S)
