"""Owns the pictures of a simulation: speed against K for several acceptance rates, and a map of K × acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.simulation.scenario import Setup, curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_LINES = (0.5, 0.6, 0.7, 0.8, 0.9)
_MAP = tuple(round(0.30 + 0.05 * step, 2) for step in range(14))  # 0.30 to 0.95
_MAP_SPEEDS = (0.25, 4.0)  # where its colours end
_PANEL_INCHES = (3.3, 3.4)


def draw(setup: Setup, sessions: Sequence[int], path: Path) -> list[Path]:
    """Writes `path`, speed against K, and beside it ``FILE-map``, the best K by acceptance; returns both. PNG."""
    return [
        _saved(_speed_by_k(setup, sessions), path),
        _saved(_maps(setup, sessions), path.with_stem(f"{path.stem}-map")),
    ]


def _speed_by_k(setup: Setup, sessions: Sequence[int]) -> Figure:
    """A panel a load, two lines a rate: dashed where rounds wait for the draft."""
    figure, panels = _panels(sessions, num_rows=1)
    sizes = range(1, setup.max_draft_tokens + 1)
    for axes, number in zip(panels[0], sessions, strict=True):
        for index, alpha in enumerate(_LINES):
            found, colour = curves(setup, number, (alpha,)), f"C{index}"
            label = f"α {alpha:g}"
            axes.plot(sizes, [s.speedup for s in found.ahead], color=colour, marker="o", markersize=3, label=label)
            axes.plot(sizes, [s.speedup for s in found.waiting], color=colour, linestyle="--")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        _label(axes, number)
    panels[0][0].set_ylabel("× plain decoding")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(_LINES), loc="outside upper center", fontsize=8)
    figure.supxlabel("simulated; solid: running ahead, K at most; dashed: waiting for the draft", fontsize=8)
    return figure


def _maps(setup: Setup, sessions: Sequence[int]) -> Figure:
    """A panel a load, above waiting and below running ahead; the dot is the best K of its row, none where none pays."""
    figure, panels = _panels(sessions, num_rows=2)
    for column, number in enumerate(sessions):
        by_alpha = [curves(setup, number, (alpha,)) for alpha in _MAP]
        _map(panels[0][column], [[s.speedup for s in each.waiting] for each in by_alpha], number)
        image = _map(panels[1][column], [[s.speedup for s in each.ahead] for each in by_alpha], number)
    panels[0][0].set_ylabel("waiting: acceptance α")
    panels[1][0].set_ylabel("running ahead: acceptance α")
    figure.colorbar(image, ax=[axes for row in panels for axes in row], label="× plain decoding, simulated", shrink=0.8)
    return figure


def _map(axes: Axes, speedups: Sequence[Sequence[float]], num_sessions: int) -> AxesImage:
    from matplotlib.colors import TwoSlopeNorm

    half = (_MAP[1] - _MAP[0]) / 2
    extent = (0.5, len(speedups[0]) + 0.5, _MAP[0] - half, _MAP[-1] + half)
    norm = TwoSlopeNorm(1.0, *_MAP_SPEEDS)  # white where nothing is won or lost, and the same in all panels
    image = axes.imshow(speedups, origin="lower", aspect="auto", extent=extent, cmap="RdBu", norm=norm)
    for alpha, row in zip(_MAP, speedups, strict=True):
        if max(row) > 1.0:  # of equals the first: a cap beyond what there is time for changes nothing
            axes.plot(1 + row.index(max(row)), alpha, marker="o", markersize=3, color="black")
    _label(axes, num_sessions)
    return image


def _panels(sessions: Sequence[int], num_rows: int) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib.figure import Figure

    width = max(_PANEL_INCHES[0] * len(sessions), 5.5)
    figure = Figure(figsize=(width, _PANEL_INCHES[1] * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, len(sessions), sharey=True, squeeze=False)
    return figure, [list(row) for row in panels]


def _label(axes: Axes, num_sessions: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(f"{num_sessions} session{'s' if num_sessions > 1 else ''}", fontsize=9)
    axes.set_xlabel("K (num_speculative_tokens)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=120, format="png")
    return path
