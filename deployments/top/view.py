"""Owns how the figures look: a screen of 80 columns and 24 lines, and what is left out where there is no room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deployments.top.figures import Engine, Figures, RouterFigures

WIDTH, HEIGHT = 80, 24
LOW_ACCEPTANCE, HIGH_BUBBLE = 0.65, 0.30
"""Where the alerts of docs/metrics.md warn."""

_ADDRESS = 21
_NONE = "–"

T = TypeVar("T")


def render(figures: Figures, title: str, failures: Mapping[str, str], height: int = HEIGHT) -> RenderableType:
    """The whole view.

    Args:
        title: its first line.
        failures: why endpoints did not answer this time.
        height: lines there are; routers and engines that have no room are counted instead.
    """
    top: list[RenderableType] = [Text(title, style="bold", no_wrap=True, overflow="ellipsis"), *_failures(failures)]
    top += [Text(), *_summary(figures), Text(), _drafters(figures)]
    num_lines = len(top) + max(len(figures.drafters), 1) + 4  # heads of the three tables, an empty line
    room = max(height - num_lines, 2)
    routers = min(len(figures.routers), max(room - len(figures.engines), room // 3, 1))
    return Group(*top, Text(), _routers(figures.routers, routers), _engines(figures.engines, room - routers))


def _failures(failures: Mapping[str, str]) -> Iterator[Text]:
    for url, why in failures.items():
        yield Text(f"no answer from {url}: {why}", style="red", no_wrap=True, overflow="ellipsis")


def _summary(figures: Figures) -> Iterator[Text]:
    yield _line(
        "requests",
        f"{figures.running} running, {figures.waiting} waiting",
        f"{figures.finished_per_s:.2f} done/s",
        (f"{figures.failed_per_s:.2f} failed/s", "red" if figures.failed_per_s else ""),
        (f"{figures.failovers} failovers", "yellow" if figures.failovers else "") if figures.failovers else "",
    )
    yield _line(
        "tokens",
        f"{figures.tokens_per_s:.1f}/s",
        f"ITL p50 {_ms(figures.itl_p50_s)} p95 {_ms(figures.itl_p95_s)} ms",
        f"first p50 {_ms(figures.ttft_p50_s)} p95 {_ms(figures.ttft_p95_s)} ms",
    )
    yield _line(
        "rounds",
        f"{figures.rounds_per_s:.1f}/s",
        f"K {_number(figures.num_speculative_tokens)}",
        (f"bubble {_share(figures.bubble)}", "yellow" if (figures.bubble or 0.0) > HIGH_BUBBLE else ""),
        f"ahead: {_share(figures.hit_rate)} hits, {_number(figures.wasted_per_accepted)} wasted",
    )
    reasons = ", ".join(f"{reason} {share:.0%}" for reason, share in figures.reasons.items())
    nothing = "in no round" if figures.rounds_per_s else _NONE
    yield _line("off", f"{reasons} of rounds" if reasons else nothing)
    if figures.dropped_per_s:
        yield _line("dropped", ", ".join(f"{why} {rate:.2f}/s" for why, rate in figures.dropped_per_s.items()))


def _line(name: str, *parts: str | tuple[str, str]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{name:<9}", style="bold")
    shown = [part if isinstance(part, tuple) else (part, "") for part in parts if part]
    for number, (text, style) in enumerate(shown):
        line.append("  ·  " if number else "", style="dim")
        line.append(text, style=style)
    return line


def _drafters(figures: Figures) -> Table:
    table = _table("drafter", "accepted", "K", "tokens/round", "proposals/s")
    for drafter in figures.drafters:
        low = drafter.acceptance is not None and drafter.acceptance < LOW_ACCEPTANCE and drafter.name != "ngram"
        table.add_row(
            drafter.name,
            Text(_share(drafter.acceptance), style="yellow" if low else ""),
            _number(drafter.num_speculative_tokens),
            _number(drafter.acceptance_length),
            f"{drafter.proposals_per_s:.1f}",
        )
    if not figures.drafters:
        table.add_row(_NONE, _NONE, _NONE, _NONE, _NONE)
    return table


def _routers(routers: Sequence[RouterFigures], room: int) -> Table:
    table = _table("router", "running", "waiting", "tokens/s", "rounds/s", "ITL p50", "p95 ms")
    shown, rest = _fitting(routers, room)
    for router in shown:
        table.add_row(
            router.name,
            str(router.running),
            str(router.waiting),
            f"{router.tokens_per_s:.1f}",
            f"{router.rounds_per_s:.1f}",
            _ms(router.itl_p50_s),
            _ms(router.itl_p95_s),
        )
    if rest:
        table.add_row(f"… {rest} more")
    return table


def _engines(engines: Sequence[Engine], room: int) -> Table:
    table = _table("engine", "sessions", "KV used", "free", "bubble", "busy", "forw/s", "ms")
    shown, rest = _fitting(engines, room)
    for engine in shown:
        is_target = engine.kind == "target"
        times = (
            (_share(engine.bubble), _share(engine.busy), _number(engine.forwards_per_s), _ms(engine.forward_s))
            if is_target
            else ("", "", "", "")
        )
        table.add_row(
            f"{engine.kind:<6} {engine.address[-_ADDRESS:]}",
            str(engine.sessions),
            _share(engine.kv_usage),
            _NONE if engine.blocks_free is None else str(engine.blocks_free),
            *times,
        )
    if rest:
        table.add_row(f"… {rest} more")
    return table


def _fitting(rows: Sequence[T], room: int) -> tuple[Sequence[T], int]:
    """Those that fit, and how many do not; a line says so."""
    if len(rows) <= room:
        return rows, 0
    shown = max(room - 1, 0)
    return rows[:shown], len(rows) - shown


def _table(first: str, *heads: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _share(share: float | None) -> str:
    return _NONE if share is None else f"{share:.0%}"


def _number(number: float | None) -> str:
    return _NONE if number is None else f"{number:.1f}"
