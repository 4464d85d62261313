"""Owns `outrider bench`: modes of speculation against plain decoding, on prompts or on emulated devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench.modes import Mode, parse_modes
from bench.plot import Mark, draw
from deployments.commands import bench_emulated, bench_prompts
from deployments.commands.bench_emulated import Load
from deployments.commands.bench_prompts import Source
from deployments.commands.pictures import png
from deployments.console import err
from engine.errors import InvalidArgument

EMULATED_MODES = "off,auto,draft_model,sync:1-8"
_PROMPTS_ONLY = ("config", "address", "baseline", "limit")
_EMULATED_ONLY = ("sessions", "temperature", "alpha", "rtt", "dilation", "tokens", "repeats")


def bench(
    context: typer.Context,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines: id, class, messages or prompt, max_tokens.")] = None,
    emulate: Annotated[Path | None, typer.Option(help="A profile of emulated devices to measure instead.")] = None,
    modes: Annotated[
        str,
        typer.Option(
            help="Comma-separated: off, auto, ngram, draft_model (running ahead), sync (waiting for the draft), sync:4 "
            "or ahead:4 (K fixed), sync:1-8 (eight modes). Default: off, auto and each drafter; where emulated, "
            f"{EMULATED_MODES}."
        ),
    ] = "",
    config: Annotated[str, typer.Option(help="Configuration to start when no --address is given.")] = "demo",
    address: Annotated[str | None, typer.Option(help="host:port of a running server to measure instead.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="host:port of another server, whose plain decoding is measured beside.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of each class.")] = None,
    sessions: Annotated[str, typer.Option(help="Emulated: requests at once, e.g. 1,8,64; each by itself.")] = "1",
    tokens: Annotated[int, typer.Option(min=2, help="Emulated: tokens of every output.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Emulated: turns of every mode.")] = 3,
    temperature: Annotated[float, typer.Option(min=0.0, help="Emulated: above 0, no token can be checked.")] = 0.0,
    alpha: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Emulated: instead of the profile's.")] = None,
    rtt: Annotated[float | None, typer.Option(min=0.0, help="Emulated: of the draft's link, in seconds.")] = None,
    dilation: Annotated[float | None, typer.Option(min=0.01, help="Emulated: stretches all times alike.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=png,
            help="Also draw the speedups, as a PNG file. With modes sync:K also FILE-k.png, speed against K, and "
            "FILE-acceptance.png, acceptance by position.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Measure modes of speculation against plain decoding: by class of prompt, or by load on emulated devices."""
    _check_options(context, prompts, emulate)
    if prompts is not None:
        source = Source(prompts, limit, config, address, baseline)
        marks = bench_prompts.bench(source, lambda drafters: _modes(modes, drafters), as_json=as_json)
    elif emulate is not None:
        profile = bench_emulated.read_profile(emulate, alpha=alpha, draft_rtt_s=rtt, dilation=dilation)
        load = Load(_numbers(sessions), tokens, repeats, temperature)
        chosen = _modes(modes or EMULATED_MODES, profile.config.speculation.drafters)
        marks = bench_emulated.bench(profile, load, chosen, as_json=as_json)
    _draw(marks, plot)


def _check_options(context: typer.Context, prompts: Path | None, emulate: Path | None) -> None:
    """Raises BadParameter unless there is one thing to measure, and for an option that is of the other."""
    if (prompts is None) == (emulate is None):
        raise typer.BadParameter("give exactly one of --prompts and --emulate")
    needed, strangers = ("--prompts", _PROMPTS_ONLY) if emulate is not None else ("--emulate", _EMULATED_ONLY)
    for name in strangers:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"needs {needed}", param_hint=f"--{name}")


def _modes(asked: str, drafters: Sequence[str]) -> list[Mode]:
    """Modes to measure, plain decoding first. Raises BadParameter for one the server does not have."""
    try:
        return parse_modes(asked, drafters)
    except InvalidArgument as error:
        raise typer.BadParameter(f"found {error.found!r}, allowed is {error.allowed}", param_hint="--modes") from error


def _numbers(asked: str) -> tuple[int, ...]:
    """Numbers of sessions, each once."""
    parts = [part.strip() for part in asked.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(
            f"found {asked!r}, allowed are numbers from 1 on, separated by commas", param_hint="--sessions"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def _draw(marks: Sequence[Mark], path: Path | None) -> None:
    for written in draw(marks, path) if path is not None else ():
        err.print(f"drew {written}", markup=False, soft_wrap=True)
