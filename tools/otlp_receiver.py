"""A receiver of traces for tests: an HTTP server that takes what exporters of OpenTelemetry post, as protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tools.waiting import PATIENCE_S, wait_for


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came; `parent` "" = it has none. `is_error`: from its status."""

    trace: str
    id: str
    parent: str
    name: str
    is_server: bool
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool
    state: str

    @property
    def took_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class Receiver:
    """Received spans. `status`: the answer to posts; only those of 200 count. Safe between threads."""

    url: str = ""
    status: int = 200
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    spans: list[ReceivedSpan] = field(default_factory=list)

    def root(self, request: str, timeout_s: float = PATIENCE_S) -> ReceivedSpan:
        """The span of the call with this id in its answer, once it is here."""

        def found() -> ReceivedSpan | None:
            return next((s for s in list(self.spans) if s.attributes.get("gen_ai.response.id") == request), None)

        span: ReceivedSpan = wait_for(found, timeout_s, f"the trace of {request} arrives")
        return span

    def below(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        """Its children, in the order of their start."""
        children = [one for one in list(self.spans) if one.parent == span.id and one.trace == span.trace]
        return sorted(children, key=lambda one: (one.start_ns, one.end_ns))

    def leaves(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        """Spans below it without children, in the order of their start."""
        children = self.below(span)
        return [leaf for child in children for leaf in self.leaves(child)] if children else [span]

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.resources.append({pair.key: _value(pair.value) for pair in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.spans.extend(map(_span, scope.spans))


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver at `url`, on a port of its own."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            if receiver.status == 200:
                receiver.paths.append(self.path)
                receiver.bodies.append(body)
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                receiver.take(body)
            self.send_response(receiver.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, name="receiver")
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def _span(span: WireSpan) -> ReceivedSpan:
    return ReceivedSpan(
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        is_server=span.kind == WireSpan.SPAN_KIND_SERVER,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={pair.key: _value(pair.value) for pair in span.attributes},
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        state=span.trace_state,
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
