"""Owns `outrider trace`: the rounds of one traced request, and where the time of its reply went."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.console import err, out
from deployments.traces.breakdown import breakdown_of
from deployments.traces.picture import SUFFIXES, draw
from deployments.traces.rebuilding import rebuild
from deployments.traces.request_trace import RequestTrace
from deployments.traces.sources import FileSource, JaegerSource, TraceSource
from deployments.traces.wanted import Wanted
from deployments.traces.waterfall import render


def trace(
    request_id: Annotated[str, typer.Argument(help="Id of the request, of its trace, or its traceparent.")],
    jaeger: Annotated[str | None, typer.Option(help="URL of Jaeger's query port, e.g. http://127.0.0.1:16686.")] = None,
    file: Annotated[Path | None, typer.Option(help="OTLP JSON lines, from the Collector's file exporter.")] = None,
    service: Annotated[str, typer.Option(help="What Jaeger calls the router.")] = "outrider-router",
    show_all: Annotated[bool, typer.Option("--all", help="Show every round of a long request.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw router, draft and target over time: .png, .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show the rounds of one traced request, and where the time of its reply went."""
    if plot is not None and plot.suffix not in SUFFIXES:
        raise typer.BadParameter(f"found {plot.suffix!r}, allowed is {' or '.join(SUFFIXES)}", param_hint="--plot")
    source = _source(jaeger, file, service)
    wanted = Wanted.of(request_id)
    found = rebuild(source.find(wanted), wanted, source.name)
    if as_json:
        sys.stdout.write(json.dumps(as_dict(found)) + "\n")
    else:
        out.print(render(found, out.width, show_all=show_all))
    if plot is not None:
        draw(found, plot)
        err.print(f"drew {plot}", markup=False, soft_wrap=True)


def as_dict(found: RequestTrace) -> dict[str, Any]:
    """The object that `--json` prints: times in milliseconds, the same names as in the code."""
    totals = {"rounds": found.num_rounds, "draft_tokens": found.draft_tokens, "accepted_tokens": found.accepted_tokens}
    where = {name: round(milliseconds, 3) for name, milliseconds in breakdown_of(found).parts()}
    whole = asdict(found) | {"began": found.began.isoformat()}
    return {**whole, "failovers": found.failovers, "totals": totals, "breakdown_ms": where}


def _source(jaeger: str | None, file: Path | None, service: str) -> TraceSource:
    if (jaeger is None) == (file is None):
        raise typer.BadParameter("give exactly one of --jaeger and --file")
    return FileSource(file) if file is not None else JaegerSource(jaeger or "", service)
