"""Owns `outrider top`: a running system, live in a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live

from deployments.console import out
from deployments.top.endpoints import endpoints_of, local_endpoints, read_all
from deployments.top.figures import figures_of
from deployments.top.samples import Change, Sample
from deployments.top.view import render
from engine.errors import Unavailable

SPAN = 3
"""Samples that rates go back over. Ray hands its metrics on in steps of its own, of 10 s if nobody says otherwise."""

View = tuple[Change, Mapping[str, str]]


def top(
    metrics: Annotated[
        list[str] | None,
        typer.Option(help="URL of a node's metrics, several times for several nodes. Default: those of this machine."),
    ] = None,
    every: Annotated[
        float, typer.Option(min=0.2, help="Seconds between two samples. Ray itself exports every 10 s.")
    ] = 10.0,
    once: Annotated[bool, typer.Option(help="Print one view, of two samples, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a sample, one a line.")] = False,
) -> None:
    """Watch a running system: requests, tokens/s, speculation, forward bubble and KV blocks, by replica."""
    urls = endpoints_of(metrics) if metrics else local_endpoints()
    views = _views(urls, every)
    if as_json:
        for change, failures in views:
            content = {"endpoints": urls, "no_answer": failures, **figures_of(change).as_json()}
            sys.stdout.write(json.dumps(content) + "\n")
            sys.stdout.flush()
            if once:
                return
    elif once:
        out.print(_drawn(next(views), urls))
    elif out.is_terminal:
        _live(views, urls)
    else:
        raise typer.BadParameter("standard output is no terminal; give --once or --json")


def _live(views: Iterator[View], urls: Sequence[str]) -> None:
    with Live(console=out, screen=True, auto_refresh=False) as live:
        live.update(f"sampling {', '.join(urls)} …", refresh=True)
        for view in views:
            live.update(_drawn(view, urls, out.height), refresh=True)


def _drawn(view: View, urls: Sequence[str], height: int | None = None) -> RenderableType:
    change, failures = view
    where = urls[0] if len(urls) == 1 else f"{len(urls)} endpoints"
    title = f"outrider top  {datetime.now():%H:%M:%S}  {where}  over {change.seconds:.0f} s"
    figures = figures_of(change)
    return render(figures, title, failures) if height is None else render(figures, title, failures, height)


def _views(urls: Sequence[str], every_s: float) -> Iterator[View]:
    """The change up to each sample from the second on, and the endpoints that did not answer it.

    Raises:
        Unavailable: none answers the first time, or none of those that do has metrics of ours.
        UnreadableMetrics: one answers with something else.
    """
    samples: deque[Sample] = deque(maxlen=SPAN + 1)
    samples.append(_first(urls))
    while True:
        time.sleep(every_s)
        answers, failures = read_all(urls)
        samples.append(Sample.of(time.monotonic(), answers))
        yield Change(samples[0], samples[-1]), failures


def _first(urls: Sequence[str]) -> Sample:
    answers, failures = read_all(urls)
    if not answers:
        raise Unavailable("; ".join(f"nothing answers at {url}: {why}" for url, why in failures.items()))
    sample = Sample.of(time.monotonic(), answers)
    if not sample.values:
        raise Unavailable(
            f"no metrics of outrider at {', '.join(answers)}: it may be of a node without a router, of another "
            "system, or of one that started just now"
        )
    return sample
