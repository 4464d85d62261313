"""Traced requests of real routers, drafts and targets, sent over OTLP to a receiver that writes them to a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deployments import cli
from deployments.traces.spans import Span, parse_spans
from router.events import Complete
from rpc import tracing
from tests.rounds.test_failover import fleet, folders  # noqa: F401 - fixtures
from tests.traces.receiver import CALLER, TRACE, Receiver, receiving

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Receives what this process traces; `tracing.shutdown_tracing()` sends what is still waiting."""
    with receiving(tmp_path / "otlp.jsonl") as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
        assert tracing.setup_tracing("outrider-router")
        yield receiver
        tracing.shutdown_tracing()


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command as a shell would: status, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exited:
            cli.main(list(arguments))
        captured = capsys.readouterr()
        return int(exited.value.code or 0), captured.out, captured.err

    return run


def spans_of(path: Path) -> list[Span]:
    return [span for line in path.read_text().splitlines() for span in parse_spans(line)]


def everything_said(spans: Sequence[Span]) -> str:
    """All names and values of attributes and events, to search for what must not be there."""
    said = []
    for span in spans:
        said += [span.name, span.service, *map(str, span.attributes.items())]
        for event in span.events:
            said += [event.name, *map(str, event.attributes.items())]
    return "\n".join(said)


def read_back(outrider: Cli, receiver: Receiver, name: str) -> dict[str, Any]:
    tracing.shutdown_tracing()
    status, printed, said = outrider("trace", name, "--file", str(receiver.path), "--json")
    assert (status, said) == (0, "")
    found: dict[str, Any] = json.loads(printed)
    return found


def assert_one_trace(path: Path) -> None:
    """Every span hangs on another one, and the first on the caller's."""
    spans = spans_of(path)
    assert {span.trace_id for span in spans} == {TRACE}
    assert {span.parent_id for span in spans} <= {span.span_id for span in spans} | {CALLER}
    assert [span.parent_id for span in spans if span.name == "outrider.request"] == [CALLER]


def assert_adds_up(found: dict[str, Any], end: Complete) -> None:
    """The rounds are those of the reply, and no millisecond is missing or counted twice."""
    totals = end.speculation
    assert found["totals"] == {
        "rounds": totals.rounds,
        "draft_tokens": totals.draft_tokens,
        "accepted_tokens": totals.accepted_tokens,
    }
    assert sum(each["num_tokens"] for each in found["rounds"]) == totals.decoded_tokens
    assert sum(each["num_wasted"] for each in found["rounds"]) == totals.wasted_draft_tokens
    assert (found["prompt_tokens"], found["completion_tokens"]) == (
        end.usage.prompt_tokens,
        end.usage.completion_tokens,
    )
    assert (found["outcome"], found["failovers"]) == (end.finish_reason, end.failovers)
    assert sum(found["breakdown_ms"].values()) == pytest.approx(found["duration_ms"], abs=0.01)
    assert min(found["breakdown_ms"].values()) >= 0.0
