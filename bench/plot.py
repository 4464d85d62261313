"""Owns the picture of a comparison: speed of each mode as a multiple of plain decoding, by class of prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.comparison import PLAIN, Row


def draw_speedups(rows: Sequence[Row], path: Path) -> None:
    """Writes a PNG: one group of bars a class, one bar a mode, whiskers from the 10th to the 90th percentile."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row.kind for row in rows))
    modes = [mode for mode in dict.fromkeys(row.mode for row in rows) if mode != PLAIN]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / max(len(modes), 1)
    for number, mode in enumerate(modes):
        by_kind = {row.kind: row for row in rows if row.mode == mode}
        bars = [by_kind[kind] for kind in kinds]
        places = [index + (number - (len(modes) - 1) / 2) * width for index in range(len(kinds))]
        below = [max(row.speedup - row.speedup_p10, 0.0) for row in bars]
        above = [max(row.speedup_p90 - row.speedup, 0.0) for row in bars]
        drawn = axes.bar(
            places, [row.speedup for row in bars], width * 0.92, label=mode, yerr=(below, above), capsize=2
        )
        axes.bar_label(drawn, fmt="%.2f", fontsize=7, label_type="center", color="white")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel("× plain decoding")
    figure.legend(frameon=False, ncols=len(modes), loc="outside upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
