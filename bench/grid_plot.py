"""Owns the picture of a grid: heat maps of what the policy reached against the best fixed mode and plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.grid import AIM_TO_BEST, AIM_TO_PLAIN, Cell, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.image import AxesImage

_COLUMN_INCHES, _LINE_INCHES = 0.75, 0.45
_COLOURS = "RdBu"  # red below the aim, white at it, blue above


def draw_grid(outcomes: Sequence[Outcome], path: Path) -> Path:
    """Writes `path`, a PNG: a column of panels for each temperature, sessions by alpha in each; returns `path`."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    temperatures = sorted({outcome.cell.temperature for outcome in outcomes})
    to_best = {outcome.cell: outcome.auto_to_best for outcome in outcomes}
    to_plain = {outcome.cell: outcome.auto_to_plain for outcome in outcomes}
    maps = (
        ("auto ÷ best fixed mode", to_best, AIM_TO_BEST, TwoSlopeNorm(AIM_TO_BEST, 0.8, 1.1)),
        ("auto ÷ plain", to_plain, AIM_TO_PLAIN, TwoSlopeNorm(AIM_TO_PLAIN, 0.8, max(2.0, *to_plain.values()))),
    )
    width, height = _panel_inches(list(to_best))
    figure = Figure(figsize=(width * len(temperatures) + 1.0, 2 * height), layout="constrained")
    panels = figure.subplots(2, len(temperatures), squeeze=False)
    for line, (name, reached, aim, norm) in zip(panels, maps, strict=True):
        for axes, temperature in zip(line, temperatures, strict=True):
            here = {cell: value for cell, value in reached.items() if cell.temperature == temperature}
            image = _heat_map(axes, here, aim, norm)
            axes.set_title(f"{name}, T {temperature:g}", fontsize=9)
        bar = figure.colorbar(image, ax=list(line), shrink=0.9, extend="both")
        bar.ax.tick_params(labelsize=8)
    figure.suptitle(f"Emulated devices; bold: below {AIM_TO_BEST:g} and {AIM_TO_PLAIN:g}", fontsize=9)
    figure.savefig(path, dpi=120, format="png")
    return path


def _panel_inches(cells: Sequence[Cell]) -> tuple[float, float]:
    columns, lines = len({cell.alpha for cell in cells}), len({_load(cell) for cell in cells})
    return max(_COLUMN_INCHES * columns + 1.0, 3.0), max(_LINE_INCHES * lines + 0.9, 1.8)


def _heat_map(axes: Axes, reached: dict[Cell, float], aim: float, norm: Normalize) -> AxesImage:
    """Cells that were not measured stay empty; a value below `aim` is bold."""
    alphas = list(dict.fromkeys(cell.alpha for cell in reached))
    loads = list(dict.fromkeys(_load(cell) for cell in reached))
    values = [[float("nan")] * len(alphas) for _ in loads]
    for cell, value in reached.items():
        line, column = loads.index(_load(cell)), alphas.index(cell.alpha)
        values[line][column] = value
        weight = "bold" if value < aim else "normal"
        colour = "white" if abs(float(norm(value)) - 0.5) > 0.35 else "black"
        axes.text(column, line, f"{value:.2f}", ha="center", va="center", fontsize=8, weight=weight, color=colour)
    image = axes.imshow(values, norm=norm, cmap=_COLOURS, aspect="auto")
    axes.set_xticks(range(len(alphas)), [str(alpha) for alpha in alphas], fontsize=8)
    axes.set_yticks(range(len(loads)), loads, fontsize=8)
    axes.set_xlabel("alpha", fontsize=8)
    axes.set_ylabel("sessions (dilation)", fontsize=8)
    return image


def _load(cell: Cell) -> str:
    return f"{cell.num_sessions} (×{cell.dilation:g})"
