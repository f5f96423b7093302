"""Forwards messages between the host's streams and rank 0, as the bytes that came. Inbound messages are parsed once,
for those that are the host's own and to reject malformed ones; messages of ranks are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import grpc

from tandem.core.clock import MonotonicClock
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import passing_pb2 as p
from tandem.rpc.v1 import worker_pb2 as w

SERVICE = "tandem.rpc.v1.Worker"
BATCH_BYTES = 256 * 1024
"""Past so much, the next message begins."""
_CLOCK = MonotonicClock()
Said = TypeVar("Said", w.RouterMessage, w.PeerMessage)
ForRank: TypeAlias = e.HostToRank | p.ToRank


class InboundMessage(NamedTuple, Generic[Said]):
    """A message in parsed form, and the bytes that came."""

    message: Said
    data: bytes


def heard_from_router(data: bytes) -> InboundMessage[w.RouterMessage]:
    """Raises DecodeError."""
    return InboundMessage(w.RouterMessage.FromString(data), data)


def heard_from_peer(data: bytes) -> InboundMessage[w.PeerMessage]:
    """Raises DecodeError."""
    return InboundMessage(w.PeerMessage.FromString(data), data)


def handlers(stream: Callable[..., Any], peer: Callable[..., Any]) -> grpc.GenericRpcHandler[Any, Any]:
    """The service `Worker`: both methods get an iterator of `InboundMessage`, and write bytes."""
    methods = {
        "Stream": grpc.stream_stream_rpc_method_handler(stream, request_deserializer=heard_from_router),
        "Peer": grpc.stream_stream_rpc_method_handler(peer, request_deserializer=heard_from_peer),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def from_router(router: str, data: bytes) -> p.ToRank:
    """A router's message in rank 0's form."""
    return p.ToRank(router=p.PassedFromRouter(router=router, message=data))


def from_peer(worker: str, incarnation: int, data: bytes) -> p.ToRank:
    """A peer's message in rank 0's form, stamped with the time of its arrival."""
    stamped = p.PassedFromPeer(worker=worker, incarnation=incarnation, message=data, received_s=_CLOCK.now_s())
    return p.ToRank(peer=stamped)


def joined(messages: Sequence[bytes]) -> Iterator[bytes]:
    """The same WorkerMessages in fewer: a message costs both ends more than most contents do."""
    batch: list[bytes] = []
    size = 0
    for message in messages:
        batch.append(message)
        size += len(message)
        if size > BATCH_BYTES:
            yield _as_one(batch)
            batch, size = [], 0
    if batch:
        yield _as_one(batch)


def _as_one(messages: list[bytes]) -> bytes:
    if len(messages) == 1:  # most steps
        return messages[0]
    return p.PassedWorkerMessage(batch=p.PassedBatch(messages=messages)).SerializeToString()
