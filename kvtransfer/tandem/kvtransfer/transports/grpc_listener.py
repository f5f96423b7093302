"""The receiver's side of `grpc`: a server in this process; one thread a stream scatters its messages into the pool."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from tandem.core.call_proof import PROOF_KEY, ProofChecker, Refused, value_of
from tandem.core.errors import StartupError
from tandem.core.ids import Rank, new_incarnation
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import Frame, FrameKind, FrameReply, MalformedFrameError, ReplyKind, encode_reply
from tandem.kvtransfer.host_id import host_id
from tandem.kvtransfer.receiver_core import InboundLink, ReceiverCore
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.base import Peer
from tandem.kvtransfer.transports.flow_control import ReceiverCredit
from tandem.kvtransfer.transports.grpc import (
    COMMON_OPTIONS,
    KEEPALIVE_MS,
    MAX_MESSAGE_BYTES,
    METHOD,
    PATH,
    PEER_KEY,
    REPORT_BYTES,
    SERVICE,
    split_message,
)
from tandem.kvtransfer.transports.tcp_socket import join_address

MAX_LINKS = 256
_PATIENT = frozenset(FrameKind) - {FrameKind.PROBE}
"""A reply is a message of its own, and costs as many hand-overs as a frame of the largest size."""
_AHEAD = 3
"""Messages of a stream that are fetched while one is being scattered."""
_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", 64 << 10),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)
_log = logging.getLogger(__name__)


class GrpcListener:
    """Serves on `bind_host` at a port that the system chooses; `advertise_host` goes into the endpoint for senders."""

    def __init__(
        self, intake: ReceiverCore, secret: ClusterSecret, rank: Rank, bind_host: str, advertise_host: str
    ) -> None:
        self._intake, self._checker, self._rank = intake, ProofChecker(secret), rank
        self._bind_host, self._advertise_host = bind_host, advertise_host
        self._threads = ThreadPoolExecutor(MAX_LINKS, thread_name_prefix="kv-grpc-in")
        self._server = grpc.server(self._threads, options=_OPTIONS, maximum_concurrent_rpcs=MAX_LINKS)
        handler = grpc.stream_stream_rpc_method_handler(self._push)  # no serializers: messages stay bytes
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self._port, self._name = 0, f"{new_incarnation():x}"
        self._lock = threading.Lock()
        self._fetchers: set[_Fetcher] = set()

    def start(self) -> None:
        """Raises StartupError if the address cannot be bound."""
        try:
            self._port = self._server.add_insecure_port(join_address(self._bind_host, 0))
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {self._bind_host}", why=str(error)) from error
        self._server.start()

    def endpoint(self) -> Endpoint:
        """Address ending with a name unique to this listener: a dialler's proof is valid for this listener alone."""
        address = f"{join_address(self._advertise_host, self._port)}/{self._name}"
        return Endpoint(rank=self._rank, transport="grpc", host=host_id(), address=address)

    def close(self) -> None:
        """End every stream; after return no thread of it runs."""
        self._server.stop(None).wait()
        self._threads.shutdown()
        with self._lock:
            fetchers = tuple(self._fetchers)
        for fetcher in fetchers:
            fetcher.join()

    def _push(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        link = self._intake.connect(self._authenticate(context))
        feed = _Feed(self._intake, link)
        if not context.add_callback(lambda: feed.end("the stream ended")):
            feed.end("the stream ended before it began")
            return
        yield encode_reply(FrameReply(kind=ReplyKind.ACK))  # the greeting: authenticated, go on
        yield from self._serve(requests, link, feed)

    def _authenticate(self, context: grpc.ServicerContext) -> Peer:
        """Return a call's peer; abort the call (by raising) if it does not know the secret or does not identify
        itself."""
        metadata = context.invocation_metadata()
        line = value_of(metadata, PROOF_KEY)
        refusal = self._checker.refusal(line, PATH, self._name)
        if refusal is not None:
            is_stranger = refusal.kind is Refused.STRANGER
            code = grpc.StatusCode.UNAUTHENTICATED if is_stranger else grpc.StatusCode.FAILED_PRECONDITION
            context.abort(code, refusal.why)
        context.send_initial_metadata(self._checker.answer(line))
        try:
            return Peer.decode(value_of(metadata, PEER_KEY).encode())
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the sender did not introduce itself: {error}")

    def _serve(self, requests: Iterator[bytes], link: InboundLink, feed: _Feed) -> Iterator[bytes]:
        reason, credit, fetcher = "the stream was dropped", ReceiverCredit(REPORT_BYTES, _PATIENT), _Fetcher(requests)
        with self._lock:
            self._fetchers.add(fetcher)
        try:
            fetcher.start()
            while (message := fetcher.take()) is not None:
                for frame, payload in split_message(message):
                    reply = feed.accept(frame, payload)
                    if reply is None:
                        return
                    due = credit.settle(frame, reply)
                    if due is not None:
                        yield encode_reply(due)
            reason = fetcher.reason
        except MalformedFrameError as error:
            reason = f"malformed frame: {error}"
            self._intake.reject(link, error)
            yield encode_reply(FrameReply(kind=ReplyKind.CLOSING, reason=reason))
        finally:
            feed.end(reason)
            fetcher.stop()
            with self._lock:
                self._fetchers.discard(fetcher)
            event(_log, "transfer_link_ended", transport="grpc", peer=link.peer.worker, reason=reason)


class _Feed:
    """Hands a stream's frames to the intake until the stream ends, and then ends it there: once, because a second time
    could hit later promises to the peer, and with no frame in progress, which could begin a transfer that never fails.

    One thread feeds; any thread ends.
    """

    def __init__(self, intake: ReceiverCore, link: InboundLink) -> None:
        self._intake, self._link = intake, link
        self._lock = threading.Lock()  # guards the two below
        self._is_feeding = False
        self._reason: str | None = None  # why it has ended

    def accept(self, frame: Frame, payload: memoryview) -> FrameReply | None:
        """Return the intake's reply; None if the stream has ended. Raises MalformedFrameError."""
        with self._lock:
            if self._reason is not None:
                return None
            self._is_feeding = True
        try:
            return self._intake.accept(frame, payload, self._link)
        finally:
            with self._lock:
                self._is_feeding = False
                ended = self._reason
            if ended is not None:
                self._intake.disconnect(self._link, ended)

    def end(self, reason: str) -> None:
        """End with this reason, unless an earlier one was given."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason, is_feeding = reason, self._is_feeding
        if not is_feeding:  # else the feeding thread does it
            self._intake.disconnect(self._link, reason)


class _Fetcher:
    """A thread that takes a stream's messages from gRPC, _AHEAD of the consumer. It ends with the stream."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self._requests = requests
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque()
        self._is_over = self._is_stopped = False
        self.reason = "the sender hung up"
        self._thread = threading.Thread(target=self._run, name="kv-grpc-fetch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> bytes | None:
        """The next message; None when the stream is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._is_over)
            message = self._messages.popleft() if self._messages else None
            self._changed.notify_all()
            return message

    def stop(self) -> None:
        """Take no more messages; the thread ends as soon as gRPC ends the stream."""
        with self._changed:
            self._is_stopped = True
            self._messages.clear()
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            for message in self._requests:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_stopped or len(self._messages) < _AHEAD)
                    if self._is_stopped:
                        return
                    self._messages.append(message)
                    self._changed.notify_all()
        except grpc.RpcError:
            self.reason = "the connection was lost"
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
