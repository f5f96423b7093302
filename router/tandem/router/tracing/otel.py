"""Spans by OpenTelemetry's own parts: its sampling, its bounded queue, its thread that posts. Only this imports it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from opentelemetry import trace as otel
from opentelemetry.context import Context as ParentContext
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.core.logs import event
from tandem.core.urls import redacted
from tandem.router.tracing.calls import RESPONSE_HEADER, AnswerEnd, Call, Context
from tandem.router.tracing.settings import TracingSettings
from tandem.router.tracing.span_tree import Branch, branches, call_attributes, error_attributes, is_fault

_log = logging.getLogger(__name__)
CLOSE_S = 2.0
_NS = 1_000_000_000
_PROPAGATOR = TraceContextTextMapPropagator()
_OPERATIONS = {
    "chat": ("chat", {"http.request.method": "POST", "http.route": "/v1/chat/completions"}),
    "completions": ("text_completion", {"http.request.method": "POST", "http.route": "/v1/completions"}),
    "responses": ("chat", {"http.request.method": "POST", "http.route": "/v1/responses"}),
    "messages": ("chat", {"http.request.method": "POST", "http.route": "/v1/messages"}),
    "grpc": (
        "text_completion",
        {"rpc.system": "grpc", "rpc.service": "tandem.rpc.v1.Inference", "rpc.method": "Generate"},
    ),
}
"""By the name of an API: what its calls are in the GenAI conventions, and how they came."""


class OtelTracing:
    """All but the posting runs on the event loop. `wall_ns` gives nanoseconds since 1970."""

    def __init__(self, provider: TracerProvider, clock: Clock, wall_ns: Callable[[], int]) -> None:
        self._provider, self._clock, self._wall_ns = provider, clock, wall_ns
        self._tracer = provider.get_tracer("tandem.router")

    def begin(self, api: str, context: Context, received_s: float) -> Call | None:
        found = _OPERATIONS.get(api)
        if found is None:
            return None
        # One offset for all spans of a call: a wall clock that is set meanwhile tears no tree.
        offset_ns = self._wall_ns() - int(self._clock.now_s() * _NS)
        return _Call(self._tracer, found[0], found[1], context, received_s, offset_ns, self._clock)

    async def close(self) -> None:
        # The SDK may take half a minute over a receiver that is not there; a router's end must not wait that long.
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, CLOSE_S)


class _Call:
    def __init__(
        self,
        tracer: otel.Tracer,
        operation: str,
        attributes: Mapping[str, str],
        context: Context,
        received_s: float,
        offset_ns: int,
        clock: Clock,
    ) -> None:
        self._tracer, self._operation, self._clock = tracer, operation, clock
        self._received_s, self._offset_ns = received_s, offset_ns
        self._span = tracer.start_span(
            operation,
            context=_PROPAGATOR.extract(context, context=ParentContext()),
            kind=otel.SpanKind.SERVER,
            attributes={"gen_ai.operation.name": operation, "gen_ai.provider.name": "tandem", **attributes},
            start_time=self._ns(received_s),
        )

    @property
    def names(self) -> Mapping[str, str]:
        context = self._span.get_span_context()
        trace, span = otel.format_trace_id(context.trace_id), otel.format_span_id(context.span_id)
        return {RESPONSE_HEADER: f"00-{trace}-{span}-{int(context.trace_flags):02x}"}

    @property
    def trace_id(self) -> str:
        return otel.format_trace_id(self._span.get_span_context().trace_id) if self._span.is_recording() else ""

    def refuse(self, error: TandemError) -> None:
        self._span.set_attributes(error_attributes(error))
        self._end(error, self._clock.now_s())

    def end(self, answer: AnswerEnd) -> None:
        if self._span.is_recording():
            self._span.update_name(f"{self._operation} {answer.works[0].model}")
            self._span.set_attributes(call_attributes(answer))
            read = Branch(name="read", start_s=self._received_s, end_s=answer.read_s)
            for branch in (read, *branches(answer)):
                self._grow(branch, self._span)
        self._end(answer.error, answer.ended_s)

    def _end(self, error: TandemError | None, ended_s: float) -> None:
        if error is not None and is_fault(error):
            self._span.set_status(otel.StatusCode.ERROR, error.code)
        self._span.end(self._ns(ended_s))

    def _grow(self, branch: Branch, parent: otel.Span) -> None:
        span = self._tracer.start_span(
            branch.name,
            context=otel.set_span_in_context(parent, ParentContext()),
            attributes=branch.attributes,
            start_time=self._ns(branch.start_s),
        )
        for one in branch.branches:
            self._grow(one, span)
        if branch.failure:
            span.set_status(otel.StatusCode.ERROR, branch.failure)
        span.end(self._ns(branch.end_s))

    def _ns(self, at_s: float) -> int:
        return self._offset_ns + int(at_s * _NS)


def make_tracing(
    settings: TracingSettings, resource: Mapping[str, str], clock: Clock, wall_ns: Callable[[], int]
) -> OtelTracing:
    """Posts spans to the receiver that `settings` name. `resource`: what this router is; the environment's attributes
    (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) win."""
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # a line a try; `_Watched` logs losses
    said = OTELResourceDetector().detect().attributes
    provider = TracerProvider(
        sampler=_sampler(settings),
        resource=Resource.create({**resource, **said}),
        shutdown_on_exit=False,
    )
    exporter = _Watched(OTLPSpanExporter(endpoint=settings.url), redacted(settings.url))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracing(provider, clock, wall_ns)


def _sampler(settings: TracingSettings) -> Sampler | None:
    """None = the SDK reads OTEL_TRACES_SAMPLER."""
    return None if settings.sample_ratio is None else ParentBased(TraceIdRatioBased(settings.sample_ratio))


class _Watched(SpanExporter):
    """Reports once that spans do not arrive, and once that they do again. Runs on the SDK's thread."""

    def __init__(self, exporter: SpanExporter, receiver: str) -> None:
        self._exporter, self._receiver = exporter, receiver
        self._lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 - the SDK would log a traceback each time
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.FAILURE:
            if not self._lost:
                event(_log, "traces do not arrive", logging.WARNING, receiver=self._receiver)
            self._lost += len(spans)
        elif self._lost:
            event(_log, "traces arrive again", receiver=self._receiver, lost_spans=self._lost)
            self._lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
