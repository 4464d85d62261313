"""What becomes of a trace: which ones the collector keeps, and that it and Jaeger have the memory for theirs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.request_span import RequestSpan
from router.requests import GenerateRequest, RawPrompt
from rpc import tracing
from tests.monitoring.files import ROOT

FOLDER = ROOT / "k8s" / "monitoring"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
UNITS = {"Mi": 2**20, "MiB": 2**20, "Gi": 2**30}
TRACE_BYTES = 600_000
"""Of a reply of 500 tokens in the memory of a process in Go: about three times the 200 kB that it is on the wire."""


def tail_sampling() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "collector.yaml").read_text(encoding="utf-8"))["processors"]["tail_sampling"]


def policy(name: str) -> dict[str, Any]:
    (found,) = (each for each in tail_sampling()["policies"] if each["name"] == name)
    return found[found["type"]]


def max_traces() -> int:
    config = yaml.safe_load((FOLDER / "jaeger-config.yaml").read_text(encoding="utf-8"))
    return config["extensions"]["jaeger_storage"]["backends"]["traces"]["memory"]["max_traces"]


def memory_of(file: str) -> tuple[int, int]:
    """What the one container of a Deployment may take, and what Go keeps to, in bytes."""
    deployment, _ = yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (go,) = (each["value"] for each in container["env"] if each["name"] == "GOMEMLIMIT")
    return bytes_of(container["resources"]["limits"]["memory"]), bytes_of(go)


def bytes_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]+)", text).groups()
    return int(number) * UNITS[unit]


def span_of(request_id: str) -> ReadableSpan:
    """The router's own, of a request with this id."""
    memory = InMemorySpanExporter()
    tracing.setup_tracing("router", SimpleSpanProcessor(memory))
    try:
        RequestSpan(GenerateRequest(RawPrompt("hello"), request_id=request_id)).end("length", None)
    finally:
        tracing.shutdown_tracing()
    (span,) = memory.get_finished_spans()
    return span


@pytest.mark.parametrize(
    ("request_id", "kept"), [("trace-1", True), ("trace-", True), ("no-trace-1", False), ("0af7651916cd43dd", False)]
)
def test_a_caller_has_its_trace_kept_by_the_id_of_the_request(request_id: str, kept: bool) -> None:
    asked = policy("keep-if-asked")
    assert asked["enabled_regex_matching"]
    value = str((span_of(request_id).attributes or {})[asked["key"]])
    assert any(re.search(each, value) for each in asked["values"]) == kept  # as Go's MatchString: anywhere


def test_the_documentation_says_what_is_kept() -> None:
    section = OPERATIONS.partition("## Reading a trace\n")[2].partition("\n## ")[0]
    (pattern,) = policy("keep-if-asked")["values"]
    for said in (
        f"`{pattern.removeprefix('^')}`",
        f"{policy('keep-if-slow')['threshold_ms'] / 1000:.0f} s",
        f"{policy('keep-some')['sampling_percentage']}%",
    ):
        assert said in section


def test_the_collector_drops_whole_traces_before_it_refuses_spans() -> None:
    limiter = yaml.safe_load((FOLDER / "collector.yaml").read_text(encoding="utf-8"))["processors"]["memory_limiter"]
    limit, go = memory_of("otel-collector.yaml")
    refuses_from = limit * (limiter["limit_percentage"] - limiter["spike_limit_percentage"]) / 100
    assert tail_sampling()["num_traces"] * TRACE_BYTES < refuses_from < go < limit
    assert min(tail_sampling()["decision_cache"].values()) > 10 * tail_sampling()["num_traces"]


def test_jaeger_has_room_for_the_traces_that_it_keeps() -> None:
    limit, go = memory_of("jaeger.yaml")
    assert 2 * max_traces() * TRACE_BYTES < go < limit
    assert f"the last {max_traces():,}," in (FOLDER / "jaeger.yaml").read_text(encoding="utf-8")
