"""Owns the picture of a request: what router, draft and the target's ranks did over time, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.traces.breakdown import breakdown_of
from deployments.traces.request_trace import TARGET_LOST, RequestTrace, Round, Work
from deployments.traces.waterfall import PLACES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")

_ROWS = {"router": 2, "draft": 1, "target": 0, "follower": -1}  # heights; only a target of several ranks has the last
_HEIGHT = 0.7
_MOST_LABELS = 20  # rounds of a panel that have their numbers written in; more of them need a close-up
_CLOSE_UP = 16  # rounds of that
_COLOURS = {
    "first_token": "tab:blue", "draft_wait": "gold", "queue": "orchid", "forward": "tab:green",
    "router": "darkgray", "plain": "tab:cyan", "failover": "tab:red", "idle": "gainsboro",
    "closing": "whitesmoke",
}  # fmt: skip
_WORK = {
    "prefill": ("prompt", "tab:blue"), "verify": ("verify", "tab:green"),
    "verify early": ("verify, before the router asked", "palegreen"), "decode": ("plain run", "tab:cyan"),
    "draft": ("draft", "gold"), "draft_ahead": ("draft ahead, in branches", "khaki"),
    "follow": ("forward of another rank", "mediumseagreen"), "superseded": ("came to nothing", "white"),
}  # fmt: skip
_EARLY = ("verify early", "draft_ahead")


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the request's time, in ms."""

    start: float
    end: float

    def shows(self, bar: Round | Work) -> bool:
        return bar.start_ms <= self.end and bar.start_ms + bar.duration_ms >= self.start


def draw(trace: RequestTrace, path: Path) -> None:
    """Writes `path`, as PNG or SVG by its suffix."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    windows = [Window(0.0, trace.duration_ms), *close_up(trace.rounds)]
    figure = Figure(figsize=(11.0, 1.6 + 2.0 * len(windows)), layout="constrained")
    *panels, where = figure.subplots(len(windows) + 1, 1, height_ratios=[2.0] * len(windows) + [0.35])
    for axes, window in zip(panels, windows, strict=True):
        _draw_panel(axes, trace, window)
    name = trace.request_id or trace.span_id
    panels[0].set_title(f"{name}: {trace.outcome}, {trace.duration_ms:.0f} ms", fontsize=9, loc="left", pad=14)
    for axes in panels[1:]:
        axes.set_title("around its slowest round", fontsize=9, loc="left", pad=14)
    _draw_where(where, trace)
    _draw_legend(figure, panels)
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, dpi=120, format=path.suffix[1:])


def close_up(rounds: Sequence[Round]) -> list[Window]:
    """The time around the slowest of many rounds, in which each can be seen; none where rounds are few."""
    if len(rounds) <= _MOST_LABELS:
        return []
    slowest = max(range(len(rounds)), key=lambda index: rounds[index].duration_ms)
    first = min(max(slowest - _CLOSE_UP // 2, 0), len(rounds) - _CLOSE_UP)
    return [Window(rounds[first].start_ms, rounds[first + _CLOSE_UP - 1].end_ms)]


def _draw_panel(axes: Axes, trace: RequestTrace, window: Window) -> None:
    rounds = [each for each in trace.rounds if window.shows(each)]
    _draw_bars(axes, "router", rounds, "round: accepted/proposed", "lightsteelblue")
    for each in rounds if len(rounds) <= _MOST_LABELS else ():
        at = (max(each.start_ms, window.start) + min(each.end_ms, window.end)) / 2
        axes.text(at, _ROWS["router"], _label(each), ha="center", va="center", fontsize=7, clip_on=True)
    shown = [each for each in trace.work if window.shows(each)]
    for key in dict.fromkeys(map(_key, shown)):
        label, colour = _WORK[key]
        alike = [each for each in shown if _key(each) == key]
        for who in dict.fromkeys(each.who for each in alike):
            bars = [each for each in alike if each.who == who]
            _draw_bars(axes, who, bars, label, colour, hatch="////" if key in _EARLY else "")
    _draw_happenings(axes, trace, window)
    heights = [_ROWS[row] for row in _rows(trace)]
    axes.set_yticks(heights, _rows(trace))
    axes.set_ylim(min(heights) - 0.5, max(heights) + 0.5)
    axes.set_xlim(window.start, window.end)
    axes.set_xlabel("ms since the request arrived", fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)


def _rows(trace: RequestTrace) -> list[str]:
    followed = any(each.who == "follower" for each in trace.work)
    return [row for row in _ROWS if row != "follower" or followed]


def _label(round_: Round) -> str:
    if round_.is_lost:
        return "lost"
    return f"{round_.num_accepted}/{round_.num_proposed}" if round_.num_proposed else f"{round_.num_tokens}"


def _key(work: Work) -> str:
    if work.is_superseded:
        return "superseded"
    return "verify early" if work.kind == "verify" and work.is_early else work.kind


def _draw_bars(axes: Axes, row: str, bars: Iterable[Round | Work], label: str, colour: str, *, hatch: str = "") -> None:
    places = [(each.start_ms, each.duration_ms) for each in bars]
    style: dict[str, Any] = {"facecolor": colour, "edgecolor": "dimgray", "linewidth": 0.4, "hatch": hatch or None}
    axes.broken_barh(places, (_ROWS[row] - _HEIGHT / 2, _HEIGHT), label=label, **style)


def _draw_happenings(axes: Axes, trace: RequestTrace, window: Window) -> None:
    for each in trace.happenings:
        if window.start <= each.at_ms <= window.end:
            colour = "tab:red" if each.name == TARGET_LOST else "dimgray"
            axes.axvline(each.at_ms, color=colour, linewidth=1.0, linestyle="--")
            above = axes.get_xaxis_transform()
            axes.text(each.at_ms, 1.02, each.what, color=colour, fontsize=7, transform=above)


def _draw_where(axes: Axes, trace: RequestTrace) -> None:
    left = 0.0
    for name, milliseconds in breakdown_of(trace).parts():
        if milliseconds > 0.0:
            share = milliseconds / trace.duration_ms
            label = f"{PLACES[name]} {share:.0%}"
            axes.barh(0, milliseconds, left=left, color=_COLOURS[name], edgecolor="dimgray", linewidth=0.4, label=label)
            left += milliseconds
    axes.set_xlim(0.0, trace.duration_ms)
    axes.axis("off")
    axes.set_title("where the time went", fontsize=9, loc="left", pad=2)
    axes.legend(frameon=False, ncols=4, loc="upper left", bbox_to_anchor=(0.0, -0.05), fontsize=7)


def _draw_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    labelled = dict[str, Any]()
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        labelled |= dict(zip(labels, handles, strict=True))
    figure.legend(labelled.values(), labelled.keys(), frameon=False, ncols=7, loc="outside upper center", fontsize=8)
