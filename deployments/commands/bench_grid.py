"""Owns `outrider bench-grid`: the policy against plain decoding and every fixed K, over a grid of emulated conditions.

A draft's acceptance is a property of its emulated device, and dilation one of both devices: each pair of them has a
system of its own, which starts, is measured and ends before the next one does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import Field, TypeAdapter, ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.emulated_runs import Run
from bench.emulation import Share
from bench.grid import (
    NUM_PROMPT,
    Alpha,
    Cell,
    Grid,
    Outcome,
    about,
    in_order,
    summarize_cell,
    title,
    usual_dilation,
    verdict,
)
from bench.grid_plot import draw_grid
from bench.modes import AUTO, PLAIN, Mode, fixed_k, in_turn, parse_modes
from cluster.local import LocalCluster, settings_of
from deployments.commands.bench_emulated import Demand, Profile, Stand, check_places, read_profile, running_stand
from deployments.commands.pictures import png
from deployments.console import err, out
from engine.errors import InvalidArgument

DEFAULT_MODES = "off,auto,ahead:1-3,ahead:5,ahead:7"
_STEADY_S = 600.0  # runs differ in length by their load; the remaining time is estimated from so many seconds of them

_COUNT = TypeAdapter(Annotated[int, Field(ge=1)]).validate_strings
_SHARE = TypeAdapter(Share).validate_strings
_TEMPERATURE = TypeAdapter(Annotated[float, Field(ge=0.0, allow_inf_nan=False)]).validate_strings
_DILATION = TypeAdapter(Annotated[float, Field(ge=0.01, allow_inf_nan=False)]).validate_strings

T = TypeVar("T")


def bench_grid(
    emulate: Annotated[Path, typer.Option(help="The profile of emulated devices.")],
    sessions: Annotated[str, typer.Option(help="Requests at once, each by itself.")] = "1,8,32,128",
    alpha: Annotated[str, typer.Option(help="The draft's acceptance; a system each.")] = "0.05,0.3,0.6,0.8,0.95",
    shift: Annotated[
        str, typer.Option(help="Acceptances that change in the middle of every output: 0.8:0.3,0.3:0.8. A system each.")
    ] = "",
    temperature: Annotated[str, typer.Option(help="Above 0, no token can be checked.")] = "0",
    dilation: Annotated[
        str,
        typer.Option(
            help="Stretches all times alike: one number, or one for each of --sessions. Default: 4, and a sixteenth of "
            "the sessions where they are more than 64. A system each."
        ),
    ] = "",
    modes: Annotated[str, typer.Option(help="auto, and what it is held against: ahead:K, sync:K.")] = DEFAULT_MODES,
    tokens: Annotated[
        int, typer.Option(min=2, help="Of every output for up to 32 sessions, and fewer, down to 16, for more.")
    ] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of every mode in every cell.")] = 2,
    plot: Annotated[Path | None, typer.Option(callback=png, help="Also draw heat maps, as a PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Hold the policy against the best fixed K in every cell of a grid of emulated loads, acceptances, temperatures.

    The usual grid has 20 cells and takes over 20 minutes. Stopped early, it reports the cells it has.
    """
    profile = read_profile(emulate)
    loads = _loads(sessions, dilation)
    check_places(profile.config, max(load for load, _ in loads))
    alphas = _each(alpha, "--alpha", lambda part: Alpha(_SHARE(part)), "numbers from 0 to 1")
    shifts = _each(shift, "--shift", _shift, "pairs such as 0.8:0.3 of numbers from 0 to 1") if shift else ()
    temperatures = _each(temperature, "--temperature", _TEMPERATURE, "numbers from 0 on")
    grid = Grid(loads, _once((*alphas, *shifts)), _once(temperatures), tokens)
    chosen = _modes(modes, profile.config.speculation.drafters)
    outcomes: list[Outcome] = []
    try:
        measure(profile, grid, chosen, repeats, outcomes.append)
    finally:  # what has been measured is reported, whatever ends it
        if outcomes:
            _report(profile, grid, in_order(outcomes, grid), plot, as_json=as_json)


def measure(
    profile: Profile, grid: Grid, modes: Sequence[Mode], repeats: int, on_cell: Callable[[Outcome], None]
) -> None:
    """Runs every mode `repeats` times in every cell, in an order that turns with each repeat.

    Args:
        on_cell: is given each cell's outcome as soon as it is there, since all of them take long.
    """
    systems = grid.systems(profile.emulation)
    most = max(num_sessions for num_sessions, _ in grid.loads)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Ray reads its token and ports once a process: all systems have those that are set here.
    settings = settings_of(LocalCluster(num_cpus=1, haproxy=profile.config.server.haproxy))
    with settings, Progress(*columns, console=err, speed_estimate_period=_STEADY_S) as progress:
        task = progress.add_task("measuring", total=len(grid.cells()) * len(modes) * repeats)
        for number, (devices, cells) in enumerate(systems, 1):
            progress.update(task, description=f"system {number} of {len(systems)}, alpha {cells[0].alpha}")
            with running_stand(profile.with_devices(devices), modes, most) as stand:
                for cell in cells:
                    runs = list(_runs(stand, cell, modes, repeats, lambda: progress.advance(task)))
                    on_cell(summarize_cell(cell, runs, devices.target))


def _runs(stand: Stand, cell: Cell, modes: Sequence[Mode], repeats: int, on_run: Callable[[], None]) -> Iterator[Run]:
    """All of one cell, after one of the policy's that does not count: its estimates are those of this cell then."""
    demand = Demand(cell.num_sessions, cell.num_tokens, cell.temperature, NUM_PROMPT)
    stand.warm_up(demand, next(mode for mode in modes if mode.name == AUTO))
    for repeat in range(repeats):
        for mode in in_turn(modes, repeat):
            yield stand.run(demand, mode, repeat)
            on_run()


def _loads(sessions: str, dilation: str) -> tuple[tuple[int, float], ...]:
    """Numbers of sessions, each once, with their dilations."""
    numbers = _each(sessions, "--sessions", _COUNT, "numbers from 1 on")
    if not dilation:
        return tuple((number, usual_dilation(number)) for number in _once(numbers))
    given = _each(dilation, "--dilation", _DILATION, "numbers from 0.01 on")
    if len(given) == 1:
        return tuple((number, given[0]) for number in _once(numbers))
    if len(given) != len(numbers):
        raise typer.BadParameter(
            f"found {len(given)}, allowed are one or {len(numbers)}, as many as --sessions", param_hint="--dilation"
        )
    return _once(tuple(zip(numbers, given, strict=True)))


def _shift(part: str) -> Alpha:
    start, _, end = part.partition(":")
    return Alpha(_SHARE(start), _SHARE(end))


def _each(asked: str, option: str, parse: Callable[[str], T], allowed: str) -> tuple[T, ...]:
    """What is between the commas. Raises BadParameter for what `parse` refuses."""
    try:
        return tuple(parse(part.strip()) for part in asked.split(","))
    except ValidationError as error:
        raise typer.BadParameter(
            f"found {asked!r}, allowed are {allowed}, separated by commas", param_hint=option
        ) from error


def _once(things: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(things))


def _modes(asked: str, drafters: Sequence[str]) -> list[Mode]:
    """Plain decoding, the policy and modes of fixed K. Raises BadParameter for others."""
    try:
        modes = parse_modes(asked, drafters)
    except InvalidArgument as error:
        raise typer.BadParameter(f"found {error.found!r}, allowed is {error.allowed}", param_hint="--modes") from error
    names = [mode.name for mode in modes]
    strangers = [name for name in names if name not in (PLAIN, AUTO) and fixed_k(name) is None]
    if strangers or AUTO not in names:
        raise typer.BadParameter(
            f"found {asked!r}, allowed are {AUTO}, which is needed, {PLAIN}, ahead:K and sync:K", param_hint="--modes"
        )
    return modes


def _report(profile: Profile, grid: Grid, outcomes: Sequence[Outcome], plot: Path | None, *, as_json: bool) -> None:
    if as_json:
        cells = [outcome.as_dict() for outcome in outcomes]
        content = {**about(profile.name, profile.emulation), "num_cells_asked": len(grid.cells()), "cells": cells}
        sys.stdout.write(json.dumps(content) + "\n")
    else:
        out.print(_table(title(profile.name, profile.emulation), outcomes))
        out.print(f"{verdict(outcomes)} [dim]! marks the others.[/]")
    if len(outcomes) < len(grid.cells()):
        err.print(f"only {len(outcomes)} of {len(grid.cells())} cells were measured")
    if plot is not None:
        err.print(f"drew {draw_grid(outcomes, plot)}", markup=False, soft_wrap=True)


def _table(head: str, outcomes: Sequence[Outcome]) -> Table:
    """Fits 80 columns; "÷" is over plain decoding, "÷ best" over the best fixed mode; K and reasons are auto's."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), title=head, title_justify="left")
    for name in ("sess.", "alpha", "T", "dil."):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best", no_wrap=True)
    for name in ("÷ off", "auto ÷ off", "÷ best", "K", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reasons")
    for outcome in outcomes:
        cell = outcome.cell
        table.add_row(
            str(cell.num_sessions),
            str(cell.alpha),
            f"{cell.temperature:g}",
            f"{cell.dilation:g}",
            outcome.best,
            f"{outcome.best_to_plain:.2f}",
            _marked(outcome.auto_to_plain, outcome.loses_to_plain),
            _marked(outcome.auto_to_best, outcome.loses_to_best),
            f"{outcome.draft_tokens_per_round:.1f}",
            "" if outcome.wrong_tokens is None else str(outcome.wrong_tokens),
            " ".join(outcome.reasons),
        )
    return table


def _marked(ratio: float, below: bool) -> str:
    return f"[bold red]{ratio:.2f}![/]" if below else f"{ratio:.2f} "
