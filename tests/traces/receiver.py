"""An OTLP receiver over gRPC that writes what it is sent to a file, line for line as the Collector's file exporter."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"

_IDS = ("traceId", "spanId", "parentSpanId")


class Receiver(pb_grpc.TraceServiceServicer):
    """Appends one line of OTLP JSON an export."""

    def __init__(self, path: Path) -> None:
        self.path, self.address = path, ""
        self._lock = threading.Lock()

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(as_otlp_json(request)) + "\n")
        return pb.ExportTraceServiceResponse()


@contextmanager
def receiving(path: Path) -> Iterator[Receiver]:
    receiver = Receiver(path)
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


def as_otlp_json(request: pb.ExportTraceServiceRequest) -> dict[str, Any]:
    """Protobuf's JSON, but with numbers for enumerations and hexadecimal ids, which is where OTLP departs from it."""
    document: dict[str, Any] = MessageToDict(request, use_integers_for_enums=True)
    for group in document.get("resourceSpans", ()):
        for scope in group.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                span |= {name: base64.b64decode(span[name]).hex() for name in _IDS if name in span}
    return document
