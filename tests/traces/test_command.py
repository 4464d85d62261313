"""`outrider trace` as a person sees it: a line a round, folds, pictures, and faults in one line."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from deployments.traces.picture import close_up, draw
from deployments.traces.rebuilding import rebuild
from deployments.traces.request_trace import RequestTrace, Round
from deployments.traces.wanted import Wanted
from deployments.traces.waterfall import MOST_LINES, SLOWEST, Fold, lines_of, render
from tests.traces.conftest import Cli
from tests.traces.made import request_span, round_span, span


def made(num_rounds: int, num_ranks: int = 1) -> RequestTrace:
    """A request of so many rounds of 10 ms, each seventh of 14 ms, a loss, and work of draft and target."""
    rounds = [
        round_span(
            number,
            10.0 + 15.0 * number,
            14.0 if number % 7 == 0 else 10.0 + number / 1e3,
            base_length=number,
            queue_ms=1.0 if number == 1 else 0.0,
        )
        for number in range(1, num_rounds + 1)
    ]
    work = [
        span("verify", 9_001, 1.0, 9.0),
        span("draft", 9_002, 25.0, 2.0, f"{1:016x}", forward_ms=2.0),
        span("draft_ahead", 9_003, 30.0, 3.0, num_branches=4),
        span("verify", 9_004, 27.0, 5.0, f"{1:016x}"),
        span("verify", 9_005, 40.0, 5.0, early=True),
        span("verify", 9_006, 45.0, 5.0, f"{2:016x}", superseded=True),
        *(span("follow", 9_100 + rank, 2.0, 8.0, rank=rank, rows=4) for rank in range(1, num_ranks)),
    ]
    whole = request_span(40.0 + 15.0 * num_rounds, [("target_lost", 33.0), ("speculation", 34.0)], ttft_ms=10.0)
    return rebuild([whole, *rounds, *work], Wanted.of("made"), "here")


def shown(trace: RequestTrace, width: int = 80, *, show_all: bool = False) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(render(trace, width, show_all=show_all))
    return capture.get().splitlines()


def test_a_short_request_has_a_line_for_every_round() -> None:
    lines = shown(made(3))
    assert lines[0].startswith("made  length  2027-01-15 08:00:00 UTC")
    assert lines[2] == "3 rounds · 6 of 12 draft tokens accepted (50%) · failovers: 1"
    (first,) = (line for line in lines if line.startswith("    1 "))
    assert first.split() == ["1", "25", "10.0", "4", "2/4", "3", "dddddd" + "qqq" + "█" * 15 + "·" * 6, "draft"]
    assert any("target lost: ?" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_a_long_request_shows_its_slowest_rounds_and_sums_of_the_others() -> None:
    trace = made(100)
    lines = lines_of(trace)
    rounds = [line for line in lines if isinstance(line, Round)]
    folds = [line for line in lines if isinstance(line, Fold)]
    assert sum(each.duration_ms == 14.0 for each in rounds) == SLOWEST
    assert len(rounds) + sum(len(fold.rounds) for fold in folds) == 100
    assert min(len(fold.rounds) for fold in folds) > 1
    assert sum(not isinstance(line, Round | Fold) for line in lines) == len(trace.happenings)
    (folded,) = (line.split() for line in shown(trace) if line.split()[:2] == ["+6", "130"])
    assert folded[2:5] == ["~10.0", "12/24", "18"]
    assert folded[-3:] == ["~", "the", "median"]
    assert sum(isinstance(line, Round) for line in lines_of(trace, show_all=True)) == 100
    assert not any(isinstance(line, Fold) for line in lines_of(made(MOST_LINES)))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_any_terminal(width: int) -> None:
    assert all(len(line) <= width for line in shown(made(100), width))


def test_a_picture_of_many_rounds_has_a_close_up(tmp_path: Path) -> None:
    trace = made(60)
    (window,) = close_up(trace.rounds)
    assert window.start < max(trace.rounds, key=lambda each: each.duration_ms).start_ms < window.end
    assert close_up(made(3).rounds) == []
    draw(trace, tmp_path / "request.svg")
    words = "".join(ElementTree.parse(tmp_path / "request.svg").getroot().itertext())
    for said in ("router", "draft", "target", "draft ahead", "before the router asked", "target forward", "lost"):
        assert said in words
    assert "follower" not in words
    draw(made(1), tmp_path / "request.png")
    assert (tmp_path / "request.png").read_bytes().startswith(b"\x89PNG")


def test_the_other_ranks_of_a_target_have_a_place_of_their_own(tmp_path: Path) -> None:
    trace = made(3, num_ranks=3)
    work = [(each.who, each.rank, each.start_ms, each.duration_ms) for each in trace.work if each.kind == "follow"]
    assert work == [("follower", 1, 2.0, 8.0), ("follower", 2, 2.0, 8.0)]
    assert shown(trace) == shown(made(3))
    draw(trace, tmp_path / "request.svg")
    words = list(ElementTree.parse(tmp_path / "request.svg").getroot().itertext())
    assert {"router", "draft", "target", "follower", "forward of another rank"} <= set(words)


@pytest.fixture
def dead_url() -> Iterator[str]:
    """An address that nothing listens on, held so that nothing else takes it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"


def test_wrong_usage_is_told_before_anything_is_read(outrider: Cli) -> None:
    for arguments in ([], ["--jaeger", "http://x", "--file", "y"]):
        assert outrider("trace", "r", *arguments)[::2] == (
            2,
            "error: Invalid value: give exactly one of --jaeger and --file\n",
        )
    status, _, said = outrider("trace", "r", "--file", "y", "--plot", "z.gif")
    assert (status, said) == (2, "error: Invalid value for --plot: found '.gif', allowed is .png or .svg\n")
    status, _, said = outrider("trace", "r", "--jaeger", "jaeger:16686")
    assert (status, said.startswith("error: --jaeger: found 'jaeger:16686'")) == (1, True)


def test_failures_are_one_line(outrider: Cli, tmp_path: Path, dead_url: str) -> None:
    path = tmp_path / "otlp.jsonl"
    path.write_text("{}\n")
    for arguments, begins in (
        (("r", "--jaeger", dead_url), f"error: no Jaeger answers at {dead_url}: "),
        (("r", "--file", str(path)), f"error: {path} has no request r; "),
        (("r", "--file", str(tmp_path)), f"error: {tmp_path}: cannot be read: Is a directory"),
    ):
        status, printed, said = outrider("trace", *arguments)
        assert (status, printed, said.count("\n")) == (1, "", 1)
        assert said.startswith(begins)


def test_json_has_what_the_table_has(outrider: Cli, tmp_path: Path) -> None:
    path = tmp_path / "otlp.jsonl"
    whole = {"traceId": "ab" * 16, "spanId": "01" * 8, "name": "outrider.request", "endTimeUnixNano": "40000000"}
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [whole]}]}]}) + "\n")
    status, printed, _ = outrider("trace", "ab" * 16, "--file", str(path), "--json")
    found = json.loads(printed)
    assert (status, found["duration_ms"], found["totals"]["rounds"], found["rounds"]) == (0, 40.0, 0, [])
    assert found["breakdown_ms"]["first_token"] == 40.0
