"""A collector that listens for OTLP over gRPC and keeps the spans it is sent, as Jaeger or the OTel Collector would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


@dataclass(frozen=True)
class Seen:
    """One span: who sent it, and where it hangs."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]


class Collector(pb_grpc.TraceServiceServicer):
    """Keeps spans by trace."""

    def __init__(self) -> None:
        self.address = ""
        self._lock = threading.Lock()
        self._spans: list[Seen] = []

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        with self._lock:
            self._spans += _spans(request)
        return pb.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Seen]:
        with self._lock:
            return [span for span in self._spans if span.trace_id == trace_id]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _spans(request: pb.ExportTraceServiceRequest) -> Iterator[Seen]:
    for resource in request.resource_spans:
        names = {a.key: a.value.string_value for a in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    names["service.name"],
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    {a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in span.attributes},
                )
