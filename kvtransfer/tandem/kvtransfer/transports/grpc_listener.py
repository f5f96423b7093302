"""The receiver's side of `grpc`: a server in this process; one thread a stream scatters its messages into the pool."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc

from tandem.core.errors import StartupError
from tandem.core.ids import Rank
from tandem.core.logs import event
from tandem.core.secret import METADATA_KEY, ClusterSecret
from tandem.kvtransfer.frame import MalformedFrameError, Reply, ReplyKind, decode, encode_reply
from tandem.kvtransfer.hostid import host_id
from tandem.kvtransfer.intake import InboundLink, Intake
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.base import Peer
from tandem.kvtransfer.transports.grpc import KEEPALIVE_MS, MAX_MESSAGE_BYTES, METHOD, PEER_KEY, SERVICE

MAX_LINKS = 256
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", 64 << 10),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
)
_log = logging.getLogger(__name__)


class GrpcListener:
    """Serves on `bind_host` at a port that the system chooses; `advertise_host` is what senders are told."""

    def __init__(self, intake: Intake, secret: ClusterSecret, rank: Rank, bind_host: str, advertise_host: str) -> None:
        self._intake, self._secret, self._rank = intake, secret, rank
        self._bind_host, self._advertise_host = bind_host, advertise_host
        self._threads = ThreadPoolExecutor(MAX_LINKS, thread_name_prefix="kv-grpc-in")
        self._server = grpc.server(self._threads, options=_OPTIONS, maximum_concurrent_rpcs=MAX_LINKS)
        handler = grpc.stream_stream_rpc_method_handler(self._push)  # no serializers: messages stay bytes
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self._port = 0

    def start(self) -> None:
        """Raises StartupError if the address cannot be bound."""
        try:
            self._port = self._server.add_insecure_port(f"{self._bind_host}:0")
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {self._bind_host}", why=str(error)) from error
        self._server.start()

    def endpoint(self) -> Endpoint:
        address = f"{self._advertise_host}:{self._port}"
        return Endpoint(rank=self._rank, transport="grpc", host=host_id(), address=address)

    def close(self) -> None:
        """End every stream; after return no thread of it runs."""
        self._server.stop(None).wait()
        self._threads.shutdown()

    def _push(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        link = self._intake.connect(self._authenticate(context))
        if not context.add_callback(lambda: self._intake.disconnect(link, "the stream ended")):
            self._intake.disconnect(link, "the stream ended before it began")
            return
        yield encode_reply(Reply(kind=ReplyKind.ACK))  # the greeting: authenticated, go on
        yield from self._serve(requests, link)

    def _authenticate(self, context: grpc.ServicerContext) -> Peer:
        """The peer behind a call; aborts the call (by raising) if it does not know the secret or hides who it is."""
        metadata = dict(context.invocation_metadata())
        if not self._secret.is_rpc_token(str(metadata.get(METADATA_KEY, ""))):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the sender does not know the cluster secret")
        try:
            return Peer.decode(str(metadata.get(PEER_KEY, "")).encode())
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the sender did not introduce itself: {error}")

    def _serve(self, requests: Iterator[bytes], link: InboundLink) -> Iterator[bytes]:
        reason, consumed = "the stream was dropped", 0
        try:
            for message in requests:
                frame, payload = decode(memoryview(message))
                reply = self._intake.accept(frame, payload, link)
                consumed += len(message)
                yield encode_reply(replace(reply, consumed=consumed))
            reason = "the sender hung up"
        except MalformedFrameError as error:
            reason = f"malformed frame: {error}"
            self._intake.reject(link, error)
            yield encode_reply(Reply(kind=ReplyKind.CLOSING, reason=reason))
        except grpc.RpcError:
            reason = "the connection was lost"
        finally:
            self._intake.disconnect(link, reason)
            event(_log, "transfer_link_ended", transport="grpc", peer=link.peer.worker, reason=reason)
