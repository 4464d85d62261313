"""A stand-in for Jaeger's query port: the two calls of it that are used, with its own shapes of answers and errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from deployments.traces.spans import parse_spans


@dataclass
class Jaeger:
    """Traces by id, each as OTLP JSON, and the paths that were asked for."""

    traces: Mapping[str, Any]
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, str]:
        self.asked.append(path)
        parts = urlsplit(path)
        if parts.path == "/api/traces":
            (tags,) = parse_qs(parts.query)["tags"]
            return 200, json.dumps({"data": self._search(json.loads(tags)), "total": 0, "errors": None})
        if parts.path.startswith("/api/v3/traces/"):
            trace = self.traces.get(parts.path.rsplit("/", 1)[1])
            if trace is None:
                return 404, json.dumps({"error": {"httpCode": 404, "message": "No traces found"}})
            return 200, json.dumps({"result": trace})
        return (200, "<html>") if parts.path.startswith("/page") else (404, "404 page not found\n")

    def _search(self, tags: Mapping[str, str]) -> list[dict[str, Any]]:
        return [
            {"traceID": trace_id, "spans": [], "processes": {}, "warnings": None}
            for trace_id, trace in self.traces.items()
            if any(tags.items() <= dict(span.attributes).items() for span in parse_spans(json.dumps(trace)))
        ]


@contextmanager
def answering(traces: Mapping[str, Any]) -> Iterator[Jaeger]:
    jaeger = Jaeger(traces)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = jaeger.answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        jaeger.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield jaeger
        finally:
            server.shutdown()
            thread.join()
