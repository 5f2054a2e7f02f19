"""Spans of a request's stages, when an exporter is configured.

On only when OTEL_EXPORTER_OTLP_ENDPOINT is set and the OpenTelemetry SDK is installed. A request's
W3C `traceparent` is continued. Packages use `child_span`; without tracing it costs a context
variable. Spans carry sizes and counts, never text, keys or URLs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)
Attribute = str | int | float | bool | list[str]


class Span(Protocol):
    def set(self, name: str, value: Attribute) -> None: ...

    def event(self, name: str) -> None: ...

    def child(self, name: str) -> Span: ...

    def end(self, error: str = "") -> None:
        """Ends it; a non-empty error is its status."""
        ...

    def trace_id(self) -> str:
        """32 hex digits; "" when there is no trace or it is not sampled."""
        ...


class _NoSpan:
    def set(self, name: str, value: Attribute) -> None:
        pass

    def event(self, name: str) -> None:
        pass

    def child(self, name: str) -> Span:
        return self

    def end(self, error: str = "") -> None:
        pass

    def trace_id(self) -> str:
        return ""


NO_SPAN: Span = _NoSpan()

span_of_task: ContextVar[Span] = ContextVar("span_of_task", default=NO_SPAN)
"""The span that the current task works in."""


@contextmanager
def child_span(name: str, **attributes: Attribute) -> Iterator[Span]:
    """A stage of the current request. Not for code that yields to other tasks' contexts between
    its start and end (async generators): use `span_of_task.get().child` there."""
    span = span_of_task.get().child(name)
    if span is NO_SPAN:
        yield span
        return
    for key, value in attributes.items():
        span.set(key, value)
    token = span_of_task.set(span)
    error = ""
    try:
        yield span
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        span_of_task.reset(token)
        span.end(error)


class Tracing:
    """Starts a request's first span. Without a tracer every span is NO_SPAN."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    def start(self, name: str, headers: Mapping[str, str]) -> Span:
        """`headers` may hold `traceparent` and `tracestate`; a malformed one is ignored."""
        if self._tracer is None:
            return NO_SPAN
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        parent = TraceContextTextMapPropagator().extract(carrier)
        inner = self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER)
        return _OtelSpan(self._tracer, inner)


class _OtelSpan:
    def __init__(self, tracer: Tracer, inner: Any) -> None:
        self._tracer = tracer
        self._inner = inner

    def set(self, name: str, value: Attribute) -> None:
        self._inner.set_attribute(name, value)

    def event(self, name: str) -> None:
        self._inner.add_event(name)

    def child(self, name: str) -> Span:
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._inner)
        return _OtelSpan(self._tracer, self._tracer.start_span(name, context=context))

    def end(self, error: str = "") -> None:
        if error:
            from opentelemetry.trace import StatusCode

            self._inner.set_status(StatusCode.ERROR, error)
        self._inner.end()

    def trace_id(self) -> str:
        context = self._inner.get_span_context()
        return f"{context.trace_id:032x}" if context.trace_flags.sampled else ""


def configure_tracing(service_name: str, process: str) -> Tracing:
    """Tracing to OTEL_EXPORTER_OTLP_ENDPOINT, or a Tracing that does nothing."""
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logger.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed")
        return Tracing()
    resource = Resource.create({"service.name": service_name, "service.instance.id": process})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider.get_tracer("foveal"))
