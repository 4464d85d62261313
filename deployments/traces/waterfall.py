"""Owns how a request looks in a terminal: a line a round, with a bar for where its time went, and two tables below.

A long request shows its slowest rounds; those between two of them share a line.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deployments.traces.breakdown import Breakdown, breakdown_of, parts_of
from deployments.traces.request_trace import Happening, RequestTrace, Round

MOST_LINES = 24  # rounds of a request that is not folded
SLOWEST = 12  # rounds of one that is

PLACES = {
    "first_token": "until the first token",
    "draft_wait": "waiting for the draft",
    "queue": "waiting in the target",
    "forward": "target forward",
    "router": "router and transport",
    "plain": "plain decoding",
    "failover": "failover",
    "idle": "between rounds",
    "closing": "closing, reply was out",
}
# A letter besides the colour: a bar says the same in a file, and to those who do not see colours.
_INK = {
    "first_token": ("p", "blue"),
    "draft_wait": ("d", "yellow"),
    "queue": ("q", "magenta"),
    "forward": ("█", "green"),
    "router": ("·", "white"),
    "plain": ("=", "cyan"),
    "failover": ("x", "red"),
    "idle": ("-", "white"),
    "closing": ("c", "white"),
}
_OTHER_COLUMNS = 50  # of a line, besides its bar


@dataclass(frozen=True, slots=True)
class Fold:
    """Rounds that are not shown one by one."""

    rounds: tuple[Round, ...]


Line = Round | Happening | Fold


def lines_of(trace: RequestTrace, *, show_all: bool = False) -> list[Line]:
    """What there is to show, in order: every happening, and all rounds or the slowest with folds between them."""
    shown = trace.rounds
    if not show_all and len(trace.rounds) > MOST_LINES:
        shown = tuple(heapq.nlargest(SLOWEST, trace.rounds, key=lambda each: each.duration_ms))
    numbers = {each.number for each in shown}
    everything: list[Round | Happening] = [*trace.rounds, *trace.happenings]
    lines, folded = list[Line](), list[Round]()
    for each in sorted(everything, key=_place):
        if isinstance(each, Round) and each.number not in numbers:
            folded.append(each)
            continue
        lines += [*_fold(folded), each]
        folded = []
    return lines + _fold(folded)


def _fold(rounds: list[Round]) -> list[Line]:
    """One line for many; a single one has a line to itself anyway."""
    return [Fold(tuple(rounds))] if len(rounds) > 1 else [*rounds]


def render(trace: RequestTrace, width: int, *, show_all: bool = False) -> RenderableType:
    """The whole answer for a terminal of so many columns."""
    bar_width = max(width - _OTHER_COLUMNS, 10)
    parts: list[RenderableType] = [_heading(trace), Text()]
    if lines := lines_of(trace, show_all=show_all):
        parts += [_rounds(lines, bar_width), Text()]
    return Group(*parts, _where(breakdown_of(trace), bar_width))


def _heading(trace: RequestTrace) -> Text:
    times = [f"{trace.duration_ms:.0f} ms"]
    if trace.completion_tokens is not None:
        times.insert(0, f"{trace.prompt_tokens}+{trace.completion_tokens} tokens")
    if trace.ttft_ms is not None:
        times.append(f"first token after {trace.ttft_ms:.0f} ms")
    counts = [f"{trace.num_rounds} rounds"]
    if trace.draft_tokens:
        share = trace.accepted_tokens / trace.draft_tokens
        counts.append(f"{trace.accepted_tokens} of {trace.draft_tokens} draft tokens accepted ({share:.0%})")
    if trace.failovers:
        counts.append(f"failovers: {trace.failovers}")
    return Text.assemble(
        (trace.request_id or trace.span_id, "bold"),
        (f"  {trace.outcome or 'no outcome'}  ", "bold green" if trace.ended_well else "bold red"),
        f"{trace.began:%Y-%m-%d %H:%M:%S} UTC\n",
        f"{' · '.join(times)}\n{' · '.join(counts)}\n",
        (f"trace {trace.trace_id} · {', '.join(each.removeprefix('outrider-') for each in trace.services)}", "dim"),
    )


def _rounds(lines: Sequence[Line], bar_width: int) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("round", "at ms", "ms", "K", "acc.", "tok."):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where its time went", no_wrap=True, width=bar_width)
    table.add_column("how", no_wrap=True, max_width=14, overflow="ellipsis")
    longest = max((line.duration_ms for line in lines if isinstance(line, Round)), default=0.0)
    for line in lines:
        if isinstance(line, Round):
            table.add_row(*_cells(line), _bar(line, longest, bar_width), _how(line))
        elif isinstance(line, Fold):
            table.add_row(*_sums(line.rounds, longest, bar_width), style="dim")
        else:
            table.add_row("", f"{line.at_ms:.0f}", "", "", "", "", Text(line.what, "bold", overflow="ellipsis"), "")
    return table


def _cells(round_: Round) -> Iterator[str]:
    yield str(round_.number)
    yield f"{round_.start_ms:.0f}"
    yield f"{round_.duration_ms:.1f}"
    yield "" if round_.is_plain else str(round_.num_speculative_tokens)
    yield f"{round_.num_accepted}/{round_.num_proposed}" if round_.num_proposed else ""
    yield "lost" if round_.is_lost else str(round_.num_tokens)


def _how(round_: Round) -> str:
    """Who proposed, and what was out of the ordinary."""
    drafter = "draft" if round_.drafter == "draft_model" else round_.drafter
    if round_.is_early:
        drafter = "early"
    return " ".join(filter(None, (drafter or "plain", round_.dropped or round_.reason)))


def _bar(round_: Round, longest_ms: float, width: int) -> Text:
    """As long as the round, against the longest of those that are shown."""
    parts = parts_of(round_, round_.duration_ms)
    order = ("draft_wait", "queue", "forward", "router", "plain", "failover")  # as they follow one another in a round
    bar, ended, drawn = Text(), 0.0, 0
    for name in order:
        ended += getattr(parts, name)
        until = round(width * ended / longest_ms) if longest_ms else 0
        letter, colour = _INK[name]
        bar.append(letter * (until - drawn), colour)
        drawn = until
    return bar


def _sums(rounds: Sequence[Round], longest_ms: float, width: int) -> Iterator[str | Text]:
    """One line for several rounds: the one of median length, with the tokens of all."""
    middle = sorted(rounds, key=lambda each: each.duration_ms)[len(rounds) // 2]
    yield f"+{len(rounds)}"
    yield f"{rounds[0].start_ms:.0f}"
    yield f"~{middle.duration_ms:.1f}"
    yield ""
    proposed = sum(each.num_proposed for each in rounds)
    yield f"{sum(each.num_accepted for each in rounds)}/{proposed}" if proposed else ""
    yield str(sum(each.num_tokens for each in rounds))
    yield _bar(middle, longest_ms, width)
    yield "~ the median"


def _where(where: Breakdown, bar_width: int) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("where all of it went", no_wrap=True)
    for name in ("ms", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, milliseconds in where.parts():
        share = milliseconds / where.total if where.total else 0.0
        letter, colour = _INK[name]
        bar = Text(letter * round(share * bar_width), colour)
        table.add_row(Text(letter, colour), PLACES[name], f"{milliseconds:.1f}", f"{share:.1%}", bar)
    table.add_row("", "the request", f"{where.total:.1f}", "", "", style="bold")
    return table


def _place(line: Round | Happening) -> tuple[float, int]:
    """When it is told; what happened in a round is told behind it."""
    return (line.start_ms, 0) if isinstance(line, Round) else (line.at_ms, 1)
