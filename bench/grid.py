"""Owns the grid of loads, acceptances and temperatures on which the policy is held against every fixed K. Pure.

A cell of it is a load at an acceptance and a temperature. What the policy reaches there is compared with plain
decoding, and with the fixed mode that turns out best in that cell: the K that somebody would have set who knew the cell
before. Plain decoding is one of the fixed modes, K = 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.emulated_runs import EmulatedRow, Run, summarize_runs
from bench.emulation import DeviceTimes, Emulation
from bench.modes import AUTO, PLAIN, fixed_k

AIM_TO_PLAIN, AIM_TO_BEST = 0.98, 0.95
NUM_PROMPT = 8  # so few that all sessions of a cell have their first token within a forward or two
FEWEST_TOKENS = 16
_FULL_LENGTH_SESSIONS = 32
_LEAST_DILATION, _SESSIONS_PER_DILATION = 4.0, 16.0


def usual_dilation(num_sessions: int) -> float:
    """4 for up to 64 sessions, a sixteenth of their number beyond: half of two cores' time is then left over."""
    return max(_LEAST_DILATION, num_sessions / _SESSIONS_PER_DILATION)


def tokens_of(num_sessions: int, most: int) -> int:
    """Tokens of every output: `most` for up to 32 sessions, fewer the more there are beyond, but 16 if `most` allows.

    Runs of many sessions are dilated more; so they take about as long as the others.
    """
    return min(most, max(FEWEST_TOKENS, most * _FULL_LENGTH_SESSIONS // num_sessions))


@dataclass(frozen=True, slots=True)
class Alpha:
    """Probability that the draft's first choice is the target's.

    Attributes:
        start: until the middle of every output.
        end: from there on; None where it stays.
    """

    start: float
    end: float | None = None

    def __str__(self) -> str:
        return f"{self.start:g}" if self.end is None else f"{self.start:g}→{self.end:g}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the grid.

    Attributes:
        num_sessions: requests at once.
        alpha: of the emulated draft.
        temperature: of every request.
        dilation: stretches all emulated times.
        num_tokens: of every output.
    """

    num_sessions: int
    alpha: Alpha
    temperature: float
    dilation: float
    num_tokens: int

    def devices(self, base: Emulation) -> Emulation:
        """Those it is measured on: `base` with its alpha and dilation."""
        middle = NUM_PROMPT + self.num_tokens // 2
        changes = {} if self.alpha.end is None else {middle: self.alpha.end}
        return base.varied(alpha=self.alpha.start, alpha_changes=changes, dilation=self.dilation)


@dataclass(frozen=True, slots=True)
class Grid:
    """All combinations of what it lists, in that order.

    Attributes:
        loads: numbers of requests at once, each with its dilation.
        most_tokens: of an output; see tokens_of().
    """

    loads: tuple[tuple[int, float], ...]
    alphas: tuple[Alpha, ...]
    temperatures: tuple[float, ...]
    most_tokens: int

    def cells(self) -> list[Cell]:
        """Each of them, by load, then alpha, then temperature."""
        return [
            Cell(num_sessions, alpha, temperature, dilation, tokens_of(num_sessions, self.most_tokens))
            for num_sessions, dilation in self.loads
            for alpha in self.alphas
            for temperature in self.temperatures
        ]

    def systems(self, base: Emulation) -> list[tuple[Emulation, list[Cell]]]:
        """The devices that have to be emulated, one system after the other, each with the cells measured on it.

        Args:
            base: what all of them have in common.
        """
        systems: list[tuple[Emulation, list[Cell]]] = []
        for cell in sorted(self.cells(), key=lambda cell: self.alphas.index(cell.alpha)):
            devices = cell.devices(base)
            beside = next((cells for emulation, cells in systems if emulation == devices), None)
            if beside is None:
                systems.append((devices, [cell]))
            else:
                beside.append(cell)
        return systems


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured in a cell.

    Speeds are compared between runs of one repeat, which have the same prompts. The ratios are medians over repeats.

    Attributes:
        best: the fixed mode with the highest speed over plain decoding. It is picked by the same runs that it is then
            compared in, so chance is on its side.
        best_to_plain: its speed ÷ that of plain decoding.
        auto_to_plain: the policy's.
        auto_to_best: the policy's speed ÷ that of the best fixed mode.
        auto_to_best_min: the least over repeats.
        auto_to_best_max: the most.
        draft_tokens_per_round: K of the policy, plain rounds counted with 0.
        reasons: why sessions of the policy did not speculate at their end.
        wrong_tokens: of all modes, against the reference; None where outputs are sampled and have none.
        rows: all modes.
        runs: those behind the rows.
    """

    cell: Cell
    best: str
    best_to_plain: float
    auto_to_plain: float
    auto_to_best: float
    auto_to_best_min: float
    auto_to_best_max: float
    draft_tokens_per_round: float
    reasons: tuple[str, ...]
    wrong_tokens: int | None
    rows: tuple[EmulatedRow, ...]
    runs: tuple[Run, ...]

    @property
    def loses_to_plain(self) -> bool:
        """The policy is below its aim against plain decoding."""
        return self.auto_to_plain < AIM_TO_PLAIN

    @property
    def loses_to_best(self) -> bool:
        """The policy is below its aim against the best fixed mode."""
        return self.auto_to_best < AIM_TO_BEST

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"label": str(self.cell.alpha), "reaches_aims": not (self.loses_to_plain or self.loses_to_best)} | (
            asdict(self)
        )


def summarize_cell(cell: Cell, runs: Sequence[Run], target: DeviceTimes) -> Outcome:
    """What `runs`, all those of the cell, come to. Among them are plain decoding and the policy in every repeat."""
    rows = {row.mode: row for row in summarize_runs(runs, target)}
    best = max((row for row in rows.values() if _is_fixed(row.mode)), key=lambda row: row.speedup)
    auto = rows[AUTO]
    fixed = {run.repeat: run.tokens_per_s for run in runs if run.mode == best.mode}
    to_best = [run.tokens_per_s / fixed[run.repeat] for run in runs if run.mode == AUTO]
    wrong = [row.wrong_tokens for row in rows.values() if row.wrong_tokens is not None]
    return Outcome(
        cell=cell,
        best=best.mode,
        best_to_plain=best.speedup,
        auto_to_plain=auto.speedup,
        auto_to_best=statistics.median(to_best),
        auto_to_best_min=min(to_best),
        auto_to_best_max=max(to_best),
        draft_tokens_per_round=auto.draft_tokens_per_round,
        reasons=auto.reasons,
        wrong_tokens=sum(wrong) if len(wrong) == len(rows) else None,
        rows=tuple(rows.values()),
        runs=tuple(runs),
    )


def in_order(outcomes: Sequence[Outcome], grid: Grid) -> list[Outcome]:
    """As the grid lists their cells."""
    cells = grid.cells()
    return sorted(outcomes, key=lambda outcome: cells.index(outcome.cell))


def about(profile: str, base: Emulation) -> dict[str, Any]:
    """What all cells have in common, for JSON."""
    common = base.model_dump(mode="json", exclude={"alpha", "alpha_changes", "dilation"})
    aims = {"auto_to_plain": AIM_TO_PLAIN, "auto_to_best": AIM_TO_BEST}
    return {"emulated": True, "profile": profile, "aims": aims, **common}


def title(profile: str, base: Emulation) -> str:
    """What all cells have in common, for the head of the table."""
    target_ms, draft_ms = 1e3 * base.target.rtt_s, 1e3 * base.draft.rtt_s
    return (
        f"EMULATED devices, profile {profile}: recall {base.recall:g}, RTT to target {target_ms:g} ms and to draft "
        f"{draft_ms:g} ms"
    )


def verdict(outcomes: Sequence[Outcome]) -> str:
    """How many cells are where they should be, in a sentence for each aim."""
    plain, best = sum(each.loses_to_plain for each in outcomes), sum(each.loses_to_best for each in outcomes)
    return (
        f"auto ÷ off is {AIM_TO_PLAIN:g} or more in {len(outcomes) - plain} of {len(outcomes)} cells, "
        f"auto ÷ best fixed mode {AIM_TO_BEST:g} or more in {len(outcomes) - best}."
    )


def _is_fixed(mode: str) -> bool:
    return mode == PLAIN or fixed_k(mode) is not None
