"""What a target's engine is told of a session's trace: enough for its other ranks, and nothing they could not take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rpc import tracing
from tests.rpc.serving import GREEDY, STOPS, served_target

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced() -> Iterator[None]:
    assert tracing.setup_tracing("test", SimpleSpanProcessor(InMemorySpanExporter()))
    yield
    tracing.shutdown_tracing()


async def told(traceparent: str) -> str:
    """What the engine is told when a session is opened with `traceparent`."""
    async with served_target() as served:
        session = served.client.open([1, 2], [], GREEDY, STOPS, traceparent=traceparent)
        await session.verdict()
        (trace,) = served.engine.traces.values()
        return trace


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("traceparent", "trace"),
    [
        (TRACEPARENT, TRACEPARENT),
        (TRACEPARENT[:-2] + "00", ""),
        (f"01{TRACEPARENT[2:]}-and-what-later-versions-add", TRACEPARENT),
        ("", ""),
        ("00-0-0-0", ""),
        ("é" * 100_000, ""),
    ],
)
async def test_the_engine_is_told_of_a_sampled_trace_or_nothing(traceparent: str, trace: str) -> None:
    assert await told(traceparent) == trace


async def test_the_engine_is_told_nothing_while_tracing_is_off() -> None:
    assert await told(TRACEPARENT) == ""
