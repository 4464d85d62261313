"""Owns the pictures of a comparison: speed as a multiple of plain decoding by mode and by K, acceptance by position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.modes import AHEAD, PLAIN, SYNC, family, fixed_k
from router.acceptance import DRAFT_MODEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_INCHES = (3.2, 3.4)
_LABELS = {SYNC: "waiting for the draft", AHEAD: "running ahead, fixed K", DRAFT_MODEL: "running ahead", PLAIN: "plain"}


@dataclass(frozen=True, slots=True)
class Mark:
    """What one mode reached on one group of measurements: a class of prompts, or a number of sessions.

    Attributes:
        speedup: speed as a multiple of plain decoding.
        spread: lower and upper end of it.
        acceptance_by_position: how likely the draft tokens up to and with each position were all accepted.
    """

    group: str
    mode: str
    speedup: float
    spread: tuple[float, float]
    acceptance_by_position: tuple[float, ...] = ()

    @property
    def whiskers(self) -> tuple[float, float]:
        """Distances to both ends of the spread, which may lie on one side of a speed over all."""
        below, above = self.spread
        return max(self.speedup - below, 0.0), max(above - self.speedup, 0.0)


def draw(marks: Sequence[Mark], path: Path) -> list[Path]:
    """Writes `path`, and beside it the pictures that modes of fixed K allow; returns what was written.

    All are PNG: ``speed.png`` has speed by mode. With modes ``sync:K`` there are also ``speed-k.png``, speed against K,
    and ``speed-acceptance.png``, acceptance by position.
    """
    written = [_saved(_speedups(marks), path)]
    if any(_is_sync(mark) for mark in marks):
        written.append(_saved(_speed_by_k(marks), path.with_stem(f"{path.stem}-k")))
        written.append(_saved(_acceptance(marks), path.with_stem(f"{path.stem}-acceptance")))
    return written


def _speedups(marks: Sequence[Mark]) -> Figure:
    """One group of bars a group of measurements, one bar a mode."""
    groups = _groups(marks)
    modes = [mode for mode in dict.fromkeys(mark.mode for mark in marks) if mode != PLAIN]
    figure = _figure(8.0, 3.6)
    axes = figure.add_subplot()
    width = 0.8 / max(len(modes), 1)
    for number, mode in enumerate(modes):
        by_group = {mark.group: mark for mark in marks if mark.mode == mode}
        bars = [by_group[group] for group in groups]
        places = [index + (number - (len(modes) - 1) / 2) * width for index in range(len(groups))]
        drawn = axes.bar(places, [bar.speedup for bar in bars], width * 0.92, label=mode, yerr=_errors(bars), capsize=2)
        axes.bar_label(drawn, fmt="%.2f", fontsize=7, label_type="center", color="white")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("× plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=min(len(modes), 5), loc="outside upper center")
    return figure


def _speed_by_k(marks: Sequence[Mark]) -> Figure:
    """A panel a group: a curve for each kind of fixed K, a line with its spread for every other mode."""
    groups = _groups(marks)
    figure = _figure(max(_PANEL_INCHES[0] * len(groups), 5.5), _PANEL_INCHES[1])
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        _draw_curves(axes, [mark for mark in marks if mark.group == group])
        axes.set_title(group, fontsize=9)
        axes.set_xlabel("K (num_speculative_tokens)")
        _whole_numbers(axes)
    panels[0].set_ylabel("× plain decoding")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=3, loc="outside upper center", fontsize=8)
    return figure


def _draw_curves(axes: Axes, marks: Sequence[Mark]) -> None:
    colours = iter(f"C{number}" for number in range(10))
    for kind in (SYNC, AHEAD):
        points = sorted((k, mark) for mark in marks if family(mark.mode) == kind and (k := fixed_k(mark.mode)))
        if points:
            sizes, reached = zip(*points, strict=True)
            speeds = [mark.speedup for mark in reached]
            label, colour = _LABELS[kind], next(colours)
            axes.errorbar(
                sizes, speeds, yerr=_errors(reached), marker="o", markersize=4, capsize=2, label=label, color=colour
            )
    for mark in marks:
        if fixed_k(mark.mode) is None:
            colour = "black" if mark.mode == PLAIN else next(colours)
            axes.axhline(mark.speedup, linestyle="--", label=_LABELS.get(mark.mode, mark.mode), color=colour)
            axes.axhspan(*mark.spread, color=colour, alpha=0.12, linewidth=0)
    axes.spines[["top", "right"]].set_visible(False)


def _acceptance(marks: Sequence[Mark]) -> Figure:
    """A line a group, of the longest fixed K that waits for the draft."""
    figure = _figure(4.8, 3.4)
    axes = figure.add_subplot()
    for group in _groups(marks):
        longest = max((m for m in marks if m.group == group and _is_sync(m)), key=lambda mark: fixed_k(mark.mode) or 0)
        shares = longest.acceptance_by_position
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, label=group)
    axes.set_ylim(0.0, 1.0)
    axes.set_xlabel("position in the proposal")
    axes.set_ylabel("accepted up to there")
    _whole_numbers(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _is_sync(mark: Mark) -> bool:
    return family(mark.mode) == SYNC and fixed_k(mark.mode) is not None


def _groups(marks: Sequence[Mark]) -> list[str]:
    return list(dict.fromkeys(mark.group for mark in marks))


def _errors(marks: Iterable[Mark]) -> Any:
    """As matplotlib takes them: all lower lengths, all upper ones."""
    return tuple(zip(*(mark.whiskers for mark in marks), strict=True))


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=120, format="png")
    return path
